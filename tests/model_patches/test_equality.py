"""Stock attention through our route is the original model; so is a registered function that is softmax attention."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AttentionInterface

import model_patches
from tests.model_patches.families import MODELS, TEXT, ids, padded
from tests.model_patches.support import NAME, TOLERANCE, distance, outputs, reference, switch


def check(model, inputs):
    """The three implementations against the stock model, and one call per run of a routed module."""
    mask = inputs.get("attention_mask")
    before = model.config._attn_implementation
    expected = outputs(model, inputs)
    switch(model, "eager")
    expected_eager = outputs(model, inputs)
    assert model_patches.serve(model)
    hosts = dict(model_patches.hosts(model))
    assert distance(outputs(model, inputs), expected_eager, mask) <= TOLERANCE
    switch(model, "sdpa")
    assert distance(outputs(model, inputs), expected, mask) <= TOLERANCE
    runs = []
    hooks = [
        module.register_forward_hook(lambda module, *_: runs.append(module))
        for module in hosts.values()
    ]
    with reference() as calls:
        switch(model, NAME)
        result = outputs(model, inputs)
    assert distance(result, expected, mask) <= TOLERANCE
    known = {id(module) for module in hosts.values()}
    assert runs and [call[0] for call in calls if id(call[0]) in known] == runs
    for hook in hooks:
        hook.remove()
    switch(model, before)


@pytest.mark.parametrize("name", MODELS)
def test_route_equals_original(name):
    model, inputs = MODELS[name]()
    check(model, inputs)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", TEXT)
def test_route_equals_original_with_padding(name, side):
    check(TEXT[name](), padded(side))


@pytest.mark.parametrize(
    "name", ["bloom", "falcon-alibi", "falcon-multi-query", "gptj", "mpt", "xglm"]
)
def test_single_token(name):
    check(TEXT[name](), ids(length=1))


@pytest.mark.parametrize(
    "name", ["bloom", "codegen", "deberta-v3", "falcon-grouped", "gpt_neo", "mpnet", "mpt"]
)
@pytest.mark.parametrize("implementation", ["eager", "sdpa", NAME])
def test_output_attentions(name, implementation):
    model, inputs = TEXT[name](), padded("right") | {"output_attentions": True}
    before = switch(model, "eager")
    expected = model(**inputs).attentions
    switch(model, before)
    model_patches.serve(model)
    with reference():
        switch(model, implementation)
        found = model(**inputs).attentions
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if one is not None:  # sdpa has no weights to give
            rows = inputs["attention_mask"].bool()
            one, other = one.transpose(1, 2)[rows], other.transpose(1, 2)[rows]
            assert torch.allclose(one, other, atol=TOLERANCE)
        else:
            assert implementation == "sdpa"


def test_bidirectional_by_config():
    model = TEXT["bloom"]()
    model.config.is_causal = False
    check(model, ids())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["bloom", "codegen", "deberta-v2", "falcon-alibi", "gpt_neo", "gptj", "mpnet", "mpt"]
)
def test_half_precision(name, dtype):
    model = TEXT[name]().to(dtype)
    expected = outputs(model, padded("right"))
    before = model.config._attn_implementation
    model_patches.serve(model)
    switch(model, before)
    scale = max(tensor.abs().max().item() for tensor in expected.values())
    found = outputs(model, padded("right"))
    assert (
        distance(found, expected, padded("right")["attention_mask"])
        <= 8 * torch.finfo(dtype).eps * scale
    )


@pytest.mark.parametrize(
    "name", ["bloom", "deberta-v2", "falcon-alibi", "gptj", "mpnet", "mpt", "roformer"]
)
def test_another_thread_may_ask_for_less(name):
    """While a call computes that is to return its weights, another thread calls the same model without them."""
    model, inputs = TEXT[name](), padded("right")
    model_patches.serve(model)
    asking = inputs | {"output_attentions": True}
    host = next(iter(model_patches.hosts(model)))[1]
    found, first = [], threading.current_thread()

    def call_in_between(module, args, output):
        if threading.current_thread() is first and not found:
            with ThreadPoolExecutor(1) as other:
                found.append(other.submit(outputs, model, inputs).result())

    with reference():
        weighing = AttentionInterface._global_mapping[NAME]

        def attend(*args, output_attentions=False, **keywords):
            context, weights = weighing(*args, **keywords)
            return context, weights if output_attentions else None

        AttentionInterface.register(NAME, attend)
        switch(model, NAME)
        expected, others = outputs(model, asking), outputs(model, inputs)
        assert len(expected) > len(others)
        layer = next(m for m in host.modules() if isinstance(m, torch.nn.Linear))
        layer.register_forward_hook(call_in_between)
        again = outputs(model, asking)
    assert again.keys() == expected.keys() and distance(again, expected) == 0
    assert found[0].keys() == others.keys() and distance(found[0], others) == 0
