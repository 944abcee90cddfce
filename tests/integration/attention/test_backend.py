"""`set_backend`: one engine for a whole model."""

import copy

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.engines import dispatch
from tests.integration.models import State, difference, llama, perturb, run, text_inputs


def patched():
    model = ha.patch_model(llama(), ha.ConeConfig(), ha.HypeConfig())
    perturb(model)
    return model


def by_name():
    model = llama()
    model.set_attn_implementation("cone")
    return model


def engines(model) -> set[str]:
    """Which engines a call of the model asks for."""
    dispatch.RESOLVED.clear()
    run(model, text_inputs())
    return {kind[0] for kind in dispatch.RESOLVED}


@pytest.mark.parametrize("make", [patched, by_name])
@pytest.mark.parametrize("backend", ["reference", "blockwise", "cpu"])
def test_every_engine_computes_the_same_model(make, backend):
    model, inputs = make(), text_inputs()
    expected = run(model, inputs)
    assert ha.set_backend(model, backend) is model
    assert difference(expected, run(model, inputs)) <= 1e-5


def test_it_is_a_setting_of_the_running_model(tmp_path):
    model = patched()
    before = State(model)
    ha.set_backend(model, "reference")
    ha.set_backend(model, "auto")
    assert not before.differences(State(model))
    ha.set_backend(model, "reference")
    assert engines(model) == {"reference"}
    assert engines(copy.deepcopy(model)) == {"reference"}
    model.save_pretrained(tmp_path)
    assert engines(type(model).from_pretrained(tmp_path)) == {"auto"}
    assert engines(ha.set_backend(model, "auto")) == {"auto"}


def test_it_outlives_patching():
    model = ha.set_backend(llama(), "reference")
    assert engines(ha.patch_model(model, ha.ConeConfig(), mode="replace")) == {"reference"}


def test_unknown_engines_are_refused_and_change_nothing():
    model = patched()
    with pytest.raises(
        ValueError, match="backend='cuda' is unknown; allowed: auto, reference, blockwise"
    ):
        ha.set_backend(model, "cuda")
    assert torch.isfinite(model(**text_inputs()).logits).all()


def test_a_family_that_is_rerouted_is_told_after_the_patch():
    config = hf.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4)
    model = hf.BloomForCausalLM(config).eval()
    with pytest.raises(
        ValueError,
        match="BloomForCausalLM has no attention that could be told of an engine; call it af",
    ):
        ha.set_backend(model, "reference")
    assert ha.set_backend(model, "auto") is model  # there is nothing to take back
    ha.set_backend(ha.patch_model(model, ha.ConeConfig(), mode="replace"), "reference")
    assert engines(model) == {"reference"}


def test_engines_that_a_mechanism_does_not_run_on_are_named(caplog):
    model = ha.set_backend(ha.patch_model(llama(), ha.TrilinearConfig(), mode="replace"), "cpu")
    with pytest.raises(
        ValueError, match="backend='cpu' is unknown; allowed: 'auto', 'reference', 'blockwise'"
    ):
        run(model, text_inputs())
    model = ha.set_backend(
        ha.patch_model(llama(), ha.HsaConfig((4, 16)), mode="replace"), "reference"
    )
    for _ in range(2):
        run(model, text_inputs())
    (said,) = (r.getMessage() for r in caplog.records if "set_backend" in r.getMessage())
    assert "set_backend(model, 'reference') does not reach the tied attention of hsa" in said
