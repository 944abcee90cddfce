"""Patches, conversions and adapters that are made inside a mode of torch are those that are made outside of it."""

import contextlib

import peft
import pytest
import torch
import transformers as hf
from accelerate import init_empty_weights

import hf_hyperattn as ha
from tests.integration.models import (
    State,
    bert,
    llama,
    perturb,
    run,
    skip_without_native_adapters,
    text_inputs,
)
from tests.integration.patching.test_meta import PATCHES


@contextlib.contextmanager
def default_device(name: str):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "meta": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
}
ON_CPU = ("inference_mode", "no_grad")


def made(build, mode=contextlib.nullcontext):
    """What a function of a model makes of the same model in every call, while a mode is set."""
    torch.manual_seed(0)
    model = MODELS[build]()
    with mode():
        return BUILDS[build](model)


def gradients(model) -> dict:
    model.zero_grad()
    model(**text_inputs())[0].square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def adapted(model, **options):
    options = {"r": 4, "init_lora_weights": False} | options
    return peft.get_peft_model(
        model, ha.HyperLoraConfig(mechanisms=[ha.MklConfig(), ha.HypeConfig()], **options)
    )


def with_adapter():
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, init_lora_weights=False))


def added_natively(model):
    skip_without_native_adapters()
    model.add_adapter(ha.HyperLoraConfig(mechanisms=[ha.MklConfig()], r=4, init_lora_weights=False))
    return model


#: What is built, by name: the model, and what is made of it.
MODELS = {name: make for name, (make, *_) in PATCHES.items()}
BUILDS = {
    name: lambda model, configs=configs: ha.patch_model(model, *configs)
    for name, (_, *configs) in PATCHES.items()
}
FURTHER = {
    "sparse": (llama, lambda model: ha.patch_model(model, ha.SparseConfig())),
    "replace": (llama, lambda model: ha.patch_model(model, ha.HeadFusionConfig(), mode="replace")),
    "HAT": (bert, lambda model: ha.convert(model, ha.HatConfig(segment_length=8))),
    "collaborative, rank": (bert, lambda model: ha.convert(model, ha.CollaborativeConfig(rank=16))),
    "collaborative, examples": (
        bert,
        lambda model: ha.convert(model, ha.CollaborativeConfig(rank=16), examples=[ON_THE_CPU]),
    ),
    "adapter": (llama, adapted),
    "adapter without LoRA": (llama, lambda model: adapted(model, r=0)),
    "adapter, then patch": (with_adapter, lambda model: ha.patch_model(model, ha.MklConfig())),
    "native adapter": (llama, added_natively),
}
ON_THE_CPU = text_inputs()
MODELS |= {name: make for name, (make, _) in FURTHER.items()}
BUILDS |= {name: build for name, (_, build) in FURTHER.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("build", BUILDS)
def test_what_is_built_in_a_mode_is_what_is_built_outside(build, mode):
    expected = made(build)
    model = made(build, MODES[mode])
    assert not any(p.is_inference() or p.is_meta for p in model.parameters())
    if mode in ON_CPU:  # what was computed in it must not stay behind
        with MODES[mode]():
            model(**text_inputs())
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name
    known, found = gradients(expected), gradients(model)
    assert any(gradient is not None for gradient in known.values())
    for name, gradient in known.items():
        assert (gradient is None) == (found[name] is None), name
        if gradient is not None:
            assert torch.allclose(gradient, found[name], atol=1e-6), name


@pytest.mark.parametrize("mode", MODES)
def test_a_model_is_unpatched_and_patched_again(mode):
    model = llama()
    before = State(model)
    ha.patch_model(model, ha.MklConfig(), ha.HeadFusionConfig())
    with MODES[mode]():
        ha.describe(model)
        ha.unpatch_model(model)
        assert not State(model).differences(before)
        ha.patch_model(model, ha.MklConfig())
    assert all(
        p.grad is not None for n, p in model.named_parameters() if gradients(model)[n] is not None
    )
    assert not any(p.is_inference() or p.is_meta for p in model.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_a_conversion_is_undone(mode):
    model = bert()
    before = State(model)
    ha.convert(model, ha.CollaborativeConfig(rank=16), keep_original=True)
    with MODES[mode]():
        ha.unpatch_model(model)
    assert not State(model).differences(before)


@pytest.mark.parametrize("mode", ON_CPU)
@pytest.mark.parametrize("fresh", [False, True], ids=["saved", "fresh"])
def test_a_checkpoint_is_loaded(mode, fresh, tmp_path):
    model = llama()
    if not fresh:
        ha.patch_model(model, ha.MklConfig(), ha.HypeConfig())
        perturb(model)
    model.save_pretrained(tmp_path)
    expected = run(model, text_inputs())
    config = model.config
    if fresh:
        config = ha.patch_model(llama(), ha.MklConfig(), ha.HypeConfig()).config
    with MODES[mode](), ha.fresh_patch() if fresh else contextlib.nullcontext():
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    found = run(loaded, text_inputs())
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    assert not any(p.is_inference() for p in loaded.parameters())
    grads = gradients(loaded.train())
    assert all(grads[n] is not None for n in grads)


@pytest.mark.parametrize("mode", MODES)
def test_a_patched_config_builds_a_model_where_the_mode_says(mode):
    """As Transformers does with the stock weights."""
    config = ha.patch_model(llama(), ha.MklConfig(), ha.HypeConfig()).config
    with MODES[mode]():
        model = hf.AutoModelForCausalLM.from_config(config)
    assert {p.is_meta for p in model.parameters()} == {mode not in ON_CPU}


@pytest.mark.parametrize("build", ["cone", "HAT", "collaborative, rank"])
def test_empty_weights_for_a_model_in_memory_are_refused(build):
    model = MODELS[build]()
    before = State(model)
    with init_empty_weights(), pytest.raises(ValueError, match="init_empty_weights.*outside of it"):
        BUILDS[build](model)
    assert not State(model).differences(before)
