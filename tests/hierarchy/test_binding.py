"""A hierarchy belongs to one call of one model: nobody else hears it, in whatever way calls meet."""

import threading

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.utils import logging as hf_logging

import hf_hyperattn as ha
from hf_hyperattn.integration.attention.running_call import Accepting
from hf_hyperattn.integration.attention.stock import OURS
from tests.hierarchy import toy_listener
from tests.hierarchy.toy_listener import CALLS, ToyListenerConfig
from tests.integration.models import (
    FAMILIES,
    difference,
    llama,
    llava,
    llava_inputs,
    perturb,
    run,
    text_inputs,
)

MAKE = {name: FAMILIES[name][0] for name in ("llama", "bert", "bloom")}


@pytest.fixture(autouse=True)
def listener():
    toy_listener.register_listener()
    yield
    toy_listener.forget_listener()
    OURS.discard(toy_listener.NAME)


def patched(make=llama, seed=0, **how):
    torch.manual_seed(seed)
    model = ha.patch_model(make(**how), ToyListenerConfig())
    perturb(model, 3.0)
    CALLS.clear()
    return model


def ids_of_groups(seed=0, batch=2, length=11):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 3, (batch, length, 2), generator=generator)


def first_layer(model):
    return next(m for m in model.modules() if "hyper" in m._modules)


def shorter():
    return {name: t[:, :7] for name, t in text_inputs().items()}


@pytest.mark.parametrize("other", ["teacher", "itself", "part"])
@pytest.mark.parametrize("family", MAKE)
def test_a_model_called_by_a_hook_hears_nothing(family, other):
    """A teacher, the model itself again, and the running part of it."""
    model = patched(MAKE[family])
    inner = {
        "teacher": lambda: patched(llama, 1),
        "itself": lambda: model,
        "part": lambda: model.base_model,
    }[other]()
    shared = {"hierarchy": ids_of_groups()}
    expected = run(model, text_inputs() | shared)
    alone = run(inner, shorter())
    seen = []

    def hook(module, args, output):
        handle.remove()
        start = len(CALLS)
        seen.append(run(inner, shorter()))
        nested.extend(CALLS[start:])

    nested = []
    handle = first_layer(model).register_forward_hook(hook)
    CALLS.clear()
    assert difference(run(model, text_inputs() | shared), expected) == 0
    assert difference(seen[0], alone) == 0
    assert nested and all(hierarchy is None for hierarchy, *_ in nested)
    outer = [call for call in CALLS if not any(call is n for n in nested)]
    assert outer and all(hierarchy is shared["hierarchy"] for hierarchy, *_ in outer)


def test_two_models_that_share_a_config():
    """By name, so that one config serves both: the second, run by a hook of the first, hears nothing."""
    model = llama()
    model.set_attn_implementation(toy_listener.NAME)
    twin = type(model).stock_class(model.config)
    expected, seen = run(twin, text_inputs()), []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(run(twin, text_inputs())))
    run(model, text_inputs() | {"hierarchy": ids_of_groups()})
    assert difference(seen[0], expected) == 0


class Calls(LogitsProcessor):
    """Calls a model on other rows at every step."""

    def __init__(self, model):
        self.model, self.found = model, []

    def __call__(self, input_ids, scores):
        start = len(CALLS)
        with torch.no_grad():
            self.model(**shorter())
        self.found += [hierarchy for hierarchy, *_ in CALLS[start:]]
        return scores


@pytest.mark.parametrize("which", ["itself", "part", "teacher"])
def test_a_model_called_by_a_logits_processor_hears_nothing(which):
    model = patched()
    calls = Calls({"itself": model, "part": model.model, "teacher": patched(llama, 1)}[which])
    inputs = text_inputs() | dict(
        max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0
    )
    hierarchy = ids_of_groups()
    expected = model.generate(**inputs, hierarchy=hierarchy)
    got = model.generate(
        **inputs, hierarchy=hierarchy, logits_processor=LogitsProcessorList([calls])
    )
    assert torch.equal(got, expected)
    assert calls.found and not any(h is not None for h in calls.found)


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_the_pass_of_guidance_without_the_prompt_hears_nothing(family):
    """Its rows are others: it gets what a call without hierarchy gets."""
    model = patched(MAKE[family])
    ids, hierarchy = torch.randint(5, 90, (2, 11)), ids_of_groups()
    how = dict(max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    out = model.generate(
        ids,
        hierarchy=hierarchy,
        guidance_scale=2.0,
        output_scores=True,
        return_dict_in_generate=True,
        **how,
    )
    with torch.no_grad():
        told = model(ids, hierarchy=hierarchy).logits[:, -1].log_softmax(-1)
        free = model(ids[:, -1:]).logits[:, -1].log_softmax(-1)
    expected = 2 * (told - free) + free
    assert torch.allclose(
        out.scores[0].clamp_min(-1e3),
        expected.masked_fill(out.scores[0].isneginf(), -1e3),
        atol=1e-4,
    )
    without = {keys for hierarchy, keys, _ in CALLS if hierarchy is None}
    assert without == {1, 2, 3}


def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    return lambda: (thread.join(), found[0])[1]


def wait_after_first_layer(model, wait):
    """A hook that lets calls of the model go on only when `wait` returns."""
    return first_layer(model).register_forward_hook(lambda *_: None if wait() else None)


@pytest.mark.parametrize("family", MAKE)
def test_threads_of_one_model(family):
    """Two calls of one model at a time, with hierarchies of their own, and one without."""
    model = patched(MAKE[family])
    calls = [
        text_inputs() | ({} if seed is None else {"hierarchy": ids_of_groups(seed)})
        for seed in (0, 1, None)
    ]
    expected = [run(model, inputs) for inputs in calls]
    assert difference(expected[0], expected[1]) > 1e-3
    barrier = threading.Barrier(3, timeout=60)
    handle = wait_after_first_layer(model, barrier.wait)
    got = [join() for join in [in_thread(lambda i=inputs: run(model, i)) for inputs in calls]]
    handle.remove()
    assert all(difference(a, b) == 0 for a, b in zip(got, expected, strict=True))


def test_a_compiled_model_hears_nothing_of_a_model_in_another_thread():
    eager, other = patched(), patched(llama, 1, num_hidden_layers=1)
    plain, short = ({**inputs, "use_cache": False} for inputs in (text_inputs(), shorter()))
    expected = run(other, plain), run(other, short)
    inside, go_on = threading.Event(), threading.Event()
    handle = wait_after_first_layer(eager, lambda: inside.set() or go_on.wait(60))
    join = in_thread(lambda: run(eager, text_inputs() | {"hierarchy": ids_of_groups(1)}))
    assert inside.wait(60)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="eager")
    assert (
        difference(run(compiled, plain), expected[0]) <= 1e-5
    )  # compiled while the other model runs
    assert (
        difference(run(compiled, short), expected[1]) <= 1e-5
    )  # compiled again, for another length
    go_on.set()
    join()
    handle.remove()
    assert difference(in_thread(lambda: run(compiled, plain))(), expected[0]) <= 1e-5


@pytest.mark.parametrize("family", MAKE)
def test_after_an_error_a_call_without_hierarchy_is_one_without(family):
    model = patched(MAKE[family])
    expected = run(model, text_inputs()), run(model.base_model, text_inputs())

    def fail(*_):
        raise KeyError("in the middle")

    handle = first_layer(model).register_forward_hook(fail)
    for call in (model, model.base_model):
        with pytest.raises(KeyError):
            call(**text_inputs(), hierarchy=ids_of_groups())
    handle.remove()
    assert difference(run(model, text_inputs()), expected[0]) == 0
    assert difference(run(model.base_model, text_inputs()), expected[1]) == 0


@pytest.mark.parametrize("order", [(0, None), (None, 0), (0, 1)], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_that_are_checkpointed_before_any_is_computed_again(order, reentrant):
    """Two forward passes, then their backward passes: each layer gets again what its own call had."""
    model = patched().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    inputs = text_inputs() | {"use_cache": False}
    calls = [
        inputs | ({} if seed is None else {"hierarchy": ids_of_groups(seed)}) for seed in order
    ]

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    loss = lambda call: model(**call).logits.square().mean()
    expected = [gradients(loss(call)) for call in calls]
    losses = [loss(call) for call in calls]
    for found, want in zip(map(gradients, losses), expected, strict=True):
        assert found.keys() == want.keys() and difference(found, want) <= 1e-6


@pytest.mark.parametrize("way", ["cone, patched", "cone, by name", "sparse, patched"])
def test_a_hierarchy_that_no_mechanism_uses_is_warned_of_once(way, caplog):
    hf_logging.warning_once.cache_clear()
    model, (mechanism, way) = llama(), way.split(", ")
    if way == "by name":
        model.set_attn_implementation(mechanism)
    else:
        ha.patch_model(
            model,
            ha.ConeConfig() if mechanism == "cone" else ha.SparseConfig(),
            ha.HeadFusionConfig(),
        )
    for _ in range(2):
        run(model, text_inputs() | {"hierarchy": ids_of_groups()})
    (record,) = [r for r in caplog.records if r.name == "hf_hyperattn"]
    assert (
        f"attention that runs {mechanism}" in record.message
        and "which ignores it" in record.message
    )


def test_parts_by_name_take_hierarchies_beside_patched_parts(tmp_path):
    """The text runs HSA by name, the images are patched: before and after a save, and when the patch is off again."""
    model, inputs = llava(), llava_inputs() | {"hierarchy": ids_of_groups()}
    sharp = ha.HsaConfig(windows=(2, 4), near=0, sinks=0, refine_top_k=0)
    model.config.text_config.hyperattn = ha.HyperAttnConfig([sharp]).to_dict()
    model.set_attn_implementation({"text_config": "hsa"})
    expected = run(model, inputs)
    images = lambda host: "vision" in host.name
    ha.patch_model(model, ha.ConeConfig(), layers=images)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert difference(run(again, inputs), expected) <= 1e-5
    assert isinstance(again, Accepting) and isinstance(ha.unpatch_model(again), Accepting)
    assert difference(run(again, inputs), expected) <= 1e-5


def test_a_class_that_accepts_hierarchies_loads_models_that_do_not(tmp_path):
    cls = type(patched())
    ha.patch_model(llama(), ha.ConeConfig()).save_pretrained(tmp_path / "cone")
    llama().save_pretrained(tmp_path / "stock")
    for name in ("cone", "stock"):
        model = cls.from_pretrained(tmp_path / name)
        run(model, text_inputs())
        assert not isinstance(model, Accepting)
