"""Gradients through the route are the original's, with checkpointing, adapters, hooks and the compiler in between."""

import peft
import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from transformers import AttentionInterface

import model_patches
from tests.model_patches.families import MODELS, TEXT, ids, padded
from tests.model_patches.support import NAME, TOLERANCE, distance, outputs, reference, switch
from tests.oracles.marks import first_always

NAMES = [
    "bloom",
    "codegen",
    "deberta-v2",
    "deberta-v3",
    "falcon-alibi",
    "falcon-grouped",
    "gpt_neo",
    "gptj",
    "luke",
    "mpnet",
    "mpt",
    "roformer-values",
    "sew-d",
    "speecht5",
    "swinv2",
    "vitdet",
    "wavlm",
    "xglm",
]


def gradients(model, inputs):
    """A loss that every output reaches, and the gradients of all weights."""
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**inputs)
    tensors = [
        value
        for value in output.values()
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    sum(tensor.square().mean() for tensor in tensors).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    assert found.keys() == expected.keys() and expected
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    assert distance(found, expected) <= 1e-5 * max(1.0, largest)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name):
    model, inputs = MODELS[name]()
    expected = gradients(model, inputs)
    model_patches.serve(model)
    with reference():
        switch(model, NAME)
        assert_same(gradients(model, inputs), expected)


CHECKPOINTED = ["bloom", "falcon-alibi", "gpt_neo", "mpt"]
# Stock DeBERTa fails under reentrant checkpointing, stock WavLM comes to no end
PAIRS = [(name, reentrant) for name in CHECKPOINTED for reentrant in (False, True)]
PAIRS += [("deberta-v3", False), ("wavlm", False)]


@pytest.mark.parametrize("name, reentrant", PAIRS)
def test_gradient_checkpointing(name, reentrant):
    model, inputs = MODELS[name]()
    expected = gradients(model, inputs)
    model_patches.serve(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attn_dropout_p", "hidden_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    for field in ("hidden_dropout", "attention_dropout"):
        if hasattr(model.config, field):
            setattr(model.config, field, 0.0)
    model.config.apply_spec_augment = False
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    model.train()
    with reference() as calls:
        switch(model, NAME)
        found = gradients(model, inputs)
    layers = len(list(model_patches.hosts(model)))
    assert len(calls) == 2 * layers, "each layer runs once more in the backward pass"
    assert_same(found, expected)


@pytest.mark.parametrize(
    "name", ["bloom", "deberta-v2", "falcon-alibi", "gpt_neo", "mpnet", "mpt", "xglm"]
)
def test_dropout_reaches_the_implementation(name):
    """In training the call carries the family's own probability, in evaluation none."""
    model = TEXT[name]()
    for field in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"):
        if hasattr(model.config, field):
            setattr(model.config, field, 0.25)
    model = type(model)(model.config)
    if name == "mpt":  # its config takes whole numbers only
        for block in model.transformer.blocks:
            block.attn.attn_dropout_p = 0.25
    model_patches.serve(model)
    seen = []
    with reference():
        inner = AttentionInterface._global_mapping[NAME]

        def recording(*args, dropout=0.0, **kwargs):
            seen.append(dropout)
            return inner(*args, **kwargs)

        AttentionInterface.register(NAME, recording)
        switch(model, NAME)
        model.train()(**ids())
        assert set(seen) == {0.25}
        seen.clear()
        model.eval()(**ids())
    assert set(seen) == {0.0}


@pytest.mark.parametrize(
    "name, target",
    [
        ("bloom", "query_key_value"),
        ("deberta-v2", "key_proj"),
        ("wavlm", "v_proj"),
        ("gptj", "q_proj"),
    ],
)
def test_adapters_inside_the_projections(name, target):
    """LoRA before or after serving; WavLM's original passes over adapters, our route does not."""
    model, inputs = MODELS[name]()
    expected = outputs(model, inputs)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=[target], init_lora_weights=False)
    )
    adapted = outputs(wrapped, inputs)
    model_patches.serve(wrapped)
    with reference() as calls:
        switch(model, NAME)
        found = outputs(wrapped, inputs)
        assert calls and distance(found, expected) > 1e-3
        if name != "wavlm":
            assert distance(found, adapted) <= TOLERANCE
        wrapped.merge_and_unload()
        assert distance(outputs(model, inputs), found) <= TOLERANCE


@pytest.mark.parametrize("first", ["hooks", "serve"])
@pytest.mark.parametrize(
    "name, offload",
    [("bloom", True), ("mpt", True), ("gptj", True), ("deberta", False), ("wavlm", False)],
)
def test_hooks_of_accelerate(name, offload, first):
    """Hooks keep the method they wrap; it has to be the routed one, whichever came first.

    DeBERTa and WavLM have weights in the attention module itself, so it is hooked even where nothing is offloaded;
    offloaded, the originals fail.
    """
    model, inputs = MODELS[name]()
    expected = outputs(model, inputs)
    model_patches.serve(model)
    names = dict(model_patches.hosts(model))
    if first == "hooks":
        model_patches.unserve(model)
    if offload:
        cpu_offload(model, execution_device="cpu")
    else:
        add_hook_to_module(model.get_submodule(next(iter(names))), AlignDevicesHook("cpu"))
    if first == "hooks":
        model_patches.serve(model)
    with reference() as calls:
        before = switch(model, NAME)
        assert distance(outputs(model, inputs), expected) <= TOLERANCE
        assert len(calls) == len(list(model_patches.hosts(model)))
    switch(model, before)
    model_patches.unserve(model)
    assert distance(outputs(model, inputs), expected) == 0
    remove_hook_from_submodules(model)
    assert distance(outputs(model, inputs), expected) == 0


@first_always("name", ["bloom", "deberta-v2", "falcon-alibi", "gpt_neo", "mpnet"])
def test_compiles_into_one_graph(name):
    model = TEXT[name]()
    inputs = padded("right")
    model_patches.serve(model)
    switch(model, "sdpa")
    expected = outputs(model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert distance(outputs(compiled, inputs), expected, inputs["attention_mask"]) <= TOLERANCE
