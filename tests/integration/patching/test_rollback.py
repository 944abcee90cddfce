"""A patch, an unpatch and a conversion happen as a whole or not at all, wherever they fail."""

import pytest
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.integration.architectures.collaborative import conversion
from hf_hyperattn.integration.attention import hidden
from hf_hyperattn.integration.patching import attach, checkpoint_config, hierarchical
from hf_hyperattn.integration.patching import patch as patching
from tests.integration.architectures.collaborative import make, quiet
from tests.integration.models import FAMILIES, State, difference, llama, run

HSA = ha.HsaConfig(windows=(2, 4))
BOTH = (HSA, ha.HeadFusionConfig())

#: What patching calls: where, its name, and which call of it fails.
STEPS = [
    (patching, "route_families", 1),
    (patching, "select_hosts", 1),
    (patching, "check_parts", 1),
    (patching, "resolve_overrides", 1),
    (attach, "find_eager", 1),
    (attach, "Hyper", 2),
    (attach, "new_hyper", 2),
    (attach, "note_hidden", 1),
    (hidden, "HiddenStates", 2),
    (attach, "write_records", 1),
    (checkpoint_config, "_write_record", 1),
    (checkpoint_config, "_mark_patched", 1),
    (attach, "accept_hierarchy", 1),
    (hierarchical, "swap_class", 2),
]


class Failure(BaseException):
    """What no code of ours expects, as a keyboard interrupt is."""


def fail(monkeypatch, module, name, call, late):
    """Let one call of a function fail, before it does its work or after."""
    original, count = getattr(module, name), iter(range(1, 1000))

    def failing(*args, **kwargs):
        number = next(count)
        if number == call and not late:
            raise Failure
        result = original(*args, **kwargs)
        if number == call:
            raise Failure
        return result

    monkeypatch.setattr(module, name, failing)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step[1])
@pytest.mark.parametrize("family", ["llama", "t5", "gptj"])
def test_a_patch_that_fails(family, step, late, monkeypatch):
    factory, inputs = FAMILIES[family]
    model, inputs = factory(), inputs()
    mechanisms = BOTH
    state, before = State(model), run(model, inputs)
    with monkeypatch.context() as patches:
        fail(patches, *step, late)
        with pytest.raises(Failure):
            ha.patch_model(model, *mechanisms)
    assert state.differences(State(model)) == []
    assert difference(before, run(model, inputs)) == 0
    ha.patch_model(model, *mechanisms)
    patched = State(model)
    with monkeypatch.context() as patches:
        fail(patches, patching, "erase_records", 1, late)
        with pytest.raises(Failure):
            ha.unpatch_model(model)
    assert patched.differences(State(model)) == []
    ha.unpatch_model(model)
    assert state.differences(State(model)) == []


def test_a_host_that_a_mechanism_refuses_leaves_the_others_alone():
    """A refusal by the layer of the last host alone."""
    model = llama()
    state = State(model)
    own = {
        "model.layers.3.self_attn": [ha.TrilinearConfig(tensor="cp", rank=9)]
    }  # above the head dimension
    with pytest.raises(ValueError, match="rank=9"):
        ha.patch_model(model, ha.HyperAttnConfig([ha.TrilinearConfig()], overrides=own))
    assert state.differences(State(model)) == []


def test_parts_that_one_config_cannot_describe_are_refused_late():
    model = hf.BartModel(
        hf.BartConfig(
            vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4
        )
    )
    ha.patch_model(model.encoder, ha.ConeConfig())
    state = State(model)
    with pytest.raises(ValueError, match="patched"):
        ha.patch_model(model.decoder, ha.ConeConfig(gamma=2.0))
    assert state.differences(State(model)) == []


@pytest.mark.parametrize("name", ["build_filled", "attach_hypers", "keep_parts"])
@pytest.mark.parametrize("late", [False, True])
def test_a_conversion_that_fails(name, late, monkeypatch):
    model, inputs = make("bert")
    state, before = State(model), run(model, inputs)
    with monkeypatch.context() as patches, quiet():
        fail(patches, conversion, name, 1, late)
        with pytest.raises(Failure):
            ha.convert(model, ha.CollaborativeConfig(rank=12, steps=2), keep_original=True)
    assert state.differences(State(model)) == []
    assert difference(before, run(model, inputs)) == 0
