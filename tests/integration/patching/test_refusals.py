"""What `patch_model` and `unpatch_model` refuse, with the model left as it was."""

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from tests.integration.models import (
    State,
    clip,
    difference,
    llama,
    llava,
    perturb,
    run,
    text_inputs,
)
from tests.integration.patches import VARIANTS, make
from tests.zoo.tiny import tiny

CONE = ha.ConeConfig()


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = llama()


REFUSED = {
    "nothing": (llama, (), {}, "got no mechanism"),
    "not a config": (llama, ("cone",), {}, "holds 'cone'"),
    "a class": (llama, (ha.ConeConfig,), {}, "holds"),
    "twice the same stage": (llama, (CONE, VARIANTS["penumbral"]), {}, "both change the score"),
    "an unknown layer": (llama, (CONE,), dict(layers=[0, 9]), "layers names layer 9.* 0 to 3"),
    "no layer": (llama, (CONE,), dict(layers=[]), "chooses no attention module"),
    "a function without a layer": (
        llama,
        (CONE,),
        dict(layers=lambda host: False),
        "chooses no attention module",
    ),
    "an unknown name": (
        llama,
        (CONE,),
        dict(layers="last-fifth"),
        "layers='last-fifth' is not allowed",
    ),
    "an unknown head": (llama, (CONE,), dict(heads=[1, 4]), "names head 4"),
    "a head beyond the start": (llama, (CONE,), dict(heads=[-5]), "names head -5"),
    "no head": (llama, (CONE,), dict(heads=[]), "at least one head"),
    "an unknown mode": (
        llama,
        (CONE,),
        dict(mode="mix"),
        "mode='mix' is not allowed; allowed: 'blend', 'replace'",
    ),
    "a config and more": (
        llama,
        (ha.HyperAttnConfig([CONE]),),
        dict(heads=[1]),
        "one or the other",
    ),
    "layers that are a number with a point": (
        llama,
        (CONE,),
        dict(layers=1.5),
        "layers=1.5 is not allowed",
    ),
    "heads that differ": (clip, (CONE,), dict(heads="every-9th"), "names no head"),
    "something that is no model": (
        lambda: torch.nn.Linear(2, 2),
        (CONE,),
        {},
        "Linear is no Transformers model; allowed: a PreTrainedModel, also inside",
    ),
    "a module around a model": (
        Plain,
        (CONE,),
        {},
        r"it holds LlamaForCausalLM as 'inner', so pass that instead: model.get_submodule\('inner'\)",
    ),
    "a model that has no attention": (
        lambda: hf.AutoModel.from_config(
            hf.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9)
        ),
        (CONE,),
        {},
        "'mamba' has no attention",
    ),
    "a function in a config that is saved": (
        llama,
        (ha.HyperAttnConfig([CONE], heads=lambda head: head > 3),),
        {},
        "names no head",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_no_trace(case):
    make_model, mechanisms, options, message = REFUSED[case]
    model = make_model()
    state = State(model)
    with pytest.raises(ValueError, match=message) as caught:
        ha.patch_model(model, *mechanisms, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert state.differences(State(model)) == []


def test_a_refused_patch_of_a_served_family_leaves_no_trace():
    model, _ = make("falcon")
    state = State(model)
    with pytest.raises(ValueError, match="names head 99"):
        ha.patch_model(model, CONE, heads=[99])
    assert state.differences(State(model)) == []


@pytest.mark.parametrize("family", ["llama", "clip", "falcon"])
def test_patching_twice_is_refused(family):
    model, inputs = make(family)
    ha.patch_model(model, CONE)
    perturb(model)
    before, state = run(model, inputs), State(model)
    with pytest.raises(ValueError, match="patched already; call unpatch_model"):
        ha.patch_model(model, VARIANTS["penumbral"], mode="replace")
    assert state.differences(State(model)) == []
    assert difference(before, run(model, inputs)) == 0


def test_patching_what_holds_a_patched_part_is_refused():
    model = llava()
    ha.patch_model(model.model.language_model, CONE)
    state = State(model)
    with pytest.raises(ValueError, match="patched already"):
        ha.patch_model(model, CONE)
    assert state.differences(State(model)) == []


def test_unpatching_what_is_not_patched_is_refused():
    with pytest.raises(
        ValueError, match="LlamaForCausalLM is not patched, so there is no patch to undo"
    ):
        ha.unpatch_model(llama())
    model = llama()
    model.set_attn_implementation("cone")
    with pytest.raises(
        ValueError, match="runs attn_implementation='cone' by name.*set_attn_implementation"
    ):
        ha.unpatch_model(model)


@pytest.mark.parametrize("how", ["patch", "name"])
@pytest.mark.parametrize(
    "dynamo, message", [(False, "use .*dynamo=True"), (True, "engine 'blockwise'.*set_backend")]
)
def test_what_onnx_cannot_hold_is_refused_in_one_line(how, dynamo, message, monkeypatch):
    model = llama()
    ha.patch_model(model, CONE) if how == "patch" else model.set_attn_implementation("cone")
    ha.set_backend(model, "blockwise")
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: dynamo)
    with pytest.raises(ValueError, match=message) as caught:
        run(model, text_inputs())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cone", "hf_hyperattn"])
def test_a_model_that_runs_a_name_of_ours_is_refused(name):
    model = llama()
    model.set_attn_implementation(name)
    state = State(model)
    with pytest.raises(ValueError, match=f"runs attn_implementation='{name}'"):
        ha.patch_model(model, CONE)
    assert state.differences(State(model)) == []


def test_parameters_of_mechanisms_used_by_name_are_not_overwritten():
    model = llama()
    model.config.hyperattn = ha.HyperAttnConfig([ha.ConeConfig(gamma=0.5)]).to_dict()
    state = State(model)
    with pytest.raises(ValueError, match="del model.config.hyperattn"):
        ha.patch_model(model, CONE)
    assert state.differences(State(model)) == []


POOLING = (
    "cannot tell the positions of queries that .*blocks.1.attn .Sam2MultiScaleAttention. pools"
)
#: By model type: mechanisms, and why `patch_model` refuses them, or None where it leaves the odd host out.
KNOWN_BEFORE = {
    "sam2": [
        (ha.HypeConfig(max_length=64), POOLING),
        (ha.HsaConfig(), POOLING),
        (ha.TrilinearConfig(), POOLING),
    ],
    "sam": [
        (ha.HypeConfig(max_length=64), None),
        (ha.HsaConfig(), None),
        (ha.TrilinearConfig(), None),
    ],
    "videoprism": [(ha.HypeConfig(max_length=64), None), (ha.TrilinearConfig(), None)],
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", KNOWN_BEFORE)
def test_what_is_known_before_the_first_call_is_refused_by_the_patch(model_type):
    """Queries of another sequence than the keys, and pooled ones, have no place among the keys."""
    made, _ = tiny("base", model_type)
    for mechanism, message in KNOWN_BEFORE[model_type]:
        state = State(made.model)
        if message:
            with pytest.raises(ValueError, match=message):
                ha.patch_model(made.model, mechanism)
        else:
            ha.patch_model(made.model, mechanism)
            perturb(made.model)
            run(made.model, made.inputs)
            ha.unpatch_model(made.model)
        assert state.differences(State(made.model)) == []
