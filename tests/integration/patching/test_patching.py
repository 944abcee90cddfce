"""A patched model is the model it was, until something is learned."""

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.rules import Window
from tests.integration.models import (
    FAMILIES,
    State,
    bert,
    difference,
    llama,
    perturb,
    real,
    run,
    set_implementation,
    tensors,
    text_inputs,
)
from tests.integration.patches import VARIANTS, make

CONE = ha.ConeConfig()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patch_starts_as_the_identity(family):
    model, inputs = make(family)
    before = run(model, inputs)
    assert ha.patch_model(model, CONE, include_cross_attention=True) is model
    assert difference(before, run(model, inputs)) <= 1e-5
    patched = run(model, inputs)
    with torch.enable_grad():  # gradients wanted: the mechanism is computed, with gates of zero
        computed = real(tensors(model(**inputs)), inputs)
    assert difference(patched, computed) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_added_parameter_learns(family):
    model, inputs = make(family)
    before = run(model, inputs)
    ha.patch_model(model, CONE, include_cross_attention=True)
    perturb(model)
    assert difference(before, run(model, inputs)) > 0
    output = real({n: t for n, t in tensors_with_grad(model(**inputs)).items()}, inputs)
    sum(t.double().square().sum() for t in output.values()).backward()
    added = {n: p for n, p in model.named_parameters() if ".hyper." in n}
    assert added
    for name, parameter in added.items():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("family", ["llama", "t5", "falcon"])
def test_gradients_at_the_start_are_those_of_the_mechanism(family):
    """There the output is the stock's, bit for bit; the gradients must not be."""

    def gradients(moved: bool):
        model, inputs = make(family)
        ha.patch_model(model, CONE)
        for module in model.modules():
            if "moved" in module.__dict__:
                module.moved = moved  # as after the first step: the mechanism's own output is taken
        torch.manual_seed(0)
        output = model(**inputs)[0][:, -1]
        (output * torch.randn_like(output)).sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    torch.manual_seed(3)
    start = gradients(False)
    torch.manual_seed(3)
    assert difference(start, gradients(True)) <= 2e-5
    assert all(grad.any() for name, grad in start.items() if name.endswith("gate"))


def tensors_with_grad(output) -> dict:
    return {
        str(i): t
        for i, t in enumerate(output.to_tuple())
        if isinstance(t, torch.Tensor) and t.requires_grad
    }


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["llama", "t5", "clip", "falcon"])
def test_every_variant_starts_as_the_identity(family, variant):
    model, inputs = make(family)
    before = run(model, inputs)
    ha.patch_model(model, VARIANTS[variant])
    assert difference(before, run(model, inputs)) <= 1e-5
    with torch.enable_grad():
        assert difference(before, real(tensors(model(**inputs)), inputs)) <= 1e-5


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", "gpt_oss", "bert", "t5", "bart", "clip", "bloom"]
)
def test_the_identity_holds_with_eager_attention_and_its_weights(family):
    model, inputs = make(family)
    set_implementation(model, "eager")
    before = run(model, inputs | dict(output_attentions=True))
    assert any("attention" in name for name in before)
    ha.patch_model(model, CONE, include_cross_attention=True)
    assert difference(before, run(model, inputs | dict(output_attentions=True))) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_added_parameters_have_the_model_s_dtype(dtype):
    model, inputs = llama().to(dtype), text_inputs()
    before = run(model, inputs)
    ha.patch_model(model, CONE)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert difference(before, run(model, inputs)) == 0
    with torch.enable_grad():
        computed = real(tensors(model(**inputs)), inputs)
    tolerance = {torch.float64: 1e-12}.get(dtype, 20 * torch.finfo(dtype).eps)
    assert difference(before, computed) <= tolerance


@pytest.mark.parametrize("family", ["llama", "gpt2", "bart", "t5", "falcon"])
def test_generation_with_a_cache_equals_that_without(family):
    model, inputs = make(family)
    inputs = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
    ha.patch_model(model, CONE, include_cross_attention=True)
    perturb(model)
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        cached = model.generate(**inputs, **settings)
        assert torch.equal(cached, model.generate(**inputs, **settings, use_cache=False))


def test_a_frozen_model_in_training_mode_stays_what_it_is():
    model = (
        bert(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
        .train()
        .requires_grad_(False)
    )
    state = State(model)
    ha.patch_model(model, CONE)
    assert all(m.training for m in model.modules())
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        n for n, _ in model.named_parameters() if ".hyper." in n
    ]
    ha.unpatch_model(model)
    assert state.differences(State(model)) == []


# parts of composite models


@pytest.mark.parametrize(
    "family, part", [("llava", "model.language_model"), ("clip", "text_model"), ("t5", "encoder")]
)
def test_a_part_is_patched_by_itself(family, part):
    model, inputs = make(family)
    before, state = run(model, inputs), State(model)
    inner = model.get_submodule(part)
    ha.patch_model(inner, CONE)
    patched = {h["name"] for h in ha.describe(model)["hosts"] if h["mechanisms"]}
    assert patched and all(name.startswith(part + ".") for name in patched)
    assert difference(before, run(model, inputs)) <= 1e-5
    perturb(model)
    assert difference(before, run(model, inputs)) > 0
    ha.unpatch_model(inner)
    assert state.differences(State(model)) == []


def test_parts_are_patched_in_different_ways_and_unpatched_together():
    model, inputs = make("llava")
    before, state = run(model, inputs), State(model)
    ha.patch_model(model.model.language_model, CONE)
    ha.patch_model(model.model.vision_tower, VARIANTS["penumbral"], mode="replace")
    assert difference(before, run(model, inputs)) > 0
    ha.unpatch_model(model)
    assert state.differences(State(model)) == []


def test_a_part_of_a_model_patched_as_a_whole_cannot_be_unpatched_alone():
    model, _ = make("bart")
    ha.patch_model(model, CONE)
    state = State(model)
    with pytest.raises(ValueError, match="BartEncoder was patched as a part of a larger model"):
        ha.unpatch_model(model.model.encoder)
    assert state.differences(State(model)) == []


def test_layers_beside_hosts_are_refused():
    record = ha.patch_model(llama(), ha.ConeConfig()).config.hyperattn
    both = ha.HyperAttnConfig.from_dict(record | {"layers": [1]})
    with pytest.raises(
        ValueError, match="HyperAttnConfig has layers and hosts; allowed: one of them"
    ):
        ha.patch_model(llama(), both)


@pytest.mark.parametrize("key_heads", [32, 3])
@pytest.mark.parametrize(
    "config", [ha.HsaConfig(windows=(2, 4)), ha.SparseConfig(Window(3, 1)), ha.ConeConfig()]
)
@torch.no_grad()
def test_key_heads_that_do_not_divide_the_query_heads_are_refused(config, key_heads):
    """More key heads than query heads ended the process in the kernels of HSA and of sparse rules."""
    model = llama(num_hidden_layers=1)
    layer = model.model.layers[0].self_attn
    for name in ("k_proj", "v_proj"):
        setattr(layer, name, torch.nn.Linear(32, key_heads * layer.head_dim))
    ha.patch_model(model, config, mode="replace")
    with pytest.raises(
        ValueError, match=f"{key_heads} key heads; allowed: a number of key heads .* that divides"
    ):
        model(torch.arange(5, 21)[None], use_cache=False)
