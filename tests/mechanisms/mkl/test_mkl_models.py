"""Multiple kernel learning in models: how they start, learn, are saved and taken back; caches, padding, refusals."""

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.mkl import MklConfig
from tests.integration.attention.test_families import generate, logits, model_of
from tests.integration.models import FAMILIES, State, llama, perturb, run
from tests.mechanisms.hype.hype_models import ids_of

FORMS = {
    "global": (MklConfig(), "blend"),
    "conditional": (MklConfig(kind="conditional"), "blend"),
    "combined": (MklConfig(kind="conditional", combine=True), "replace"),
}
every_form = pytest.mark.parametrize("form", FORMS)


def learned(family, form, others=(), **changes):
    """A tiny model in which the mechanism decides."""
    config, mode = FORMS[form]
    model = ha.patch_model(model_of(family, "eager", **changes), config, *others, mode=mode)
    perturb(model, 0.5)
    return model


# Caches, padding, generation.


def test_global_weights_and_key_tying():
    """Weights are one factor of all logits of a head; with everything near nothing is tied."""
    near = learned("llama", "global", [ha.HsaConfig(windows=(2,), near=100)])
    alone = learned("llama", "global")
    perturb(near, 0.5)
    for one, other in zip(near.model.layers, alone.model.layers):
        other.self_attn.hyper.mkl.load_state_dict(one.self_attn.hyper.mkl.state_dict())
    inputs = {"input_ids": ids_of(near)}
    torch.testing.assert_close(logits(near, **inputs), logits(alone, **inputs), atol=1e-5, rtol=0)
    tied = ha.patch_model(
        model_of("llama", "eager"),
        MklConfig(),
        ha.HsaConfig(windows=(2,), near=2, sinks=1, refine_top_k=1),
        mode="replace",
    )
    perturb(tied, 0.5)
    plain = generate(tied, inputs, use_cache=False)
    assert torch.equal(generate(tied, inputs), plain)
    assert torch.equal(generate(tied, inputs, past_key_values=ha.HierarchicalCache(tied)), plain)


# Precision, compilation, adapters.


# Refusals.


def test_refused_settings():
    model = llama()
    state = State(model)
    for config, how, said in (
        (
            MklConfig(combine=True),
            {},
            "mode='blend' is not allowed; allowed: mode='replace', or combine=False",
        ),
        (
            MklConfig(combine=True),
            dict(mode="replace", heads=[0, 1]),
            "heads=... chooses some; allowed: heads=None",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            ha.patch_model(model, config, **how)
    for config in (MklConfig(kind="conditional"), MklConfig(combine=True)):
        with pytest.raises(ValueError, match="mkl and hsa have no meaning together"):
            ha.patch_model(model, config, ha.HsaConfig(), mode="replace")
    assert state.differences(State(model)) == []
    with pytest.raises(ValueError, match="allowed: 'global', 'conditional'"):
        MklConfig(kind="local")
    with pytest.raises(ValueError, match="MklConfig.combine"):
        MklConfig(combine=1)
    bart = FAMILIES["bart"][0]()
    with pytest.raises(
        ValueError, match="cross-attention has none of .*include_cross_attention=False"
    ):
        ha.patch_model(bart, MklConfig(kind="conditional"), include_cross_attention=True)
    ha.patch_model(bart, MklConfig(), include_cross_attention=True)
    sinks = ha.patch_model(FAMILIES["gpt_oss"][0](), MklConfig(combine=True), mode="replace")
    with pytest.raises(
        ValueError, match="attention sinks, which differ between heads; allowed: combine=False"
    ):
        run(sinks, FAMILIES["gpt_oss"][1]())
