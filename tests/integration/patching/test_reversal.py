"""`unpatch_model` gives back the original: classes, attributes, hooks, configs, parameters and outputs, bit for bit."""

import copy
import pickle

import pytest
import torch

import hf_hyperattn as ha
from tests.integration.models import (
    FAMILIES,
    State,
    difference,
    llama,
    perturb,
    run,
    tensors,
    text_inputs,
    train,
)

CONE = ha.ConeConfig()


def make(family: str):
    model, inputs = FAMILIES[family]
    model, inputs = model(), inputs()
    tensors(model(**inputs))  # Transformers puts its own hooks into some models in their first call
    return model, inputs


def configs(model):
    return {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatching_leaves_no_trace(family):
    model, inputs = make(family)
    before, state, dicts = run(model, inputs), State(model), [c.to_dict() for c in configs(model)]
    ha.patch_model(model, CONE, include_cross_attention=True)
    perturb(model)
    run(model, inputs)
    assert State(model).differences(state) != []
    assert ha.unpatch_model(model) is model
    assert state.differences(State(model)) == []
    assert [c.to_dict() for c in configs(model)] == dicts
    after = run(model, inputs)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("family", ["llama", "bart", "t5", "clip"])
def test_the_implementation_from_before_comes_back(family, implementation):
    model, inputs = make(family)
    if implementation == "flex_attention" and not model._supports_flex_attn:
        pytest.skip(f"{family} has no flex_attention in Transformers")
    model.set_attn_implementation(implementation)
    state = State(model)
    ha.patch_model(model, CONE)
    perturb(model)
    run(model, inputs)
    ha.unpatch_model(model)
    assert state.differences(State(model)) == []


def test_implementations_that_differ_between_parts_come_back():
    model, inputs = make("llava")
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    before, state = run(model, inputs), State(model)
    ha.patch_model(model, CONE)
    perturb(model)
    run(model, inputs)
    ha.unpatch_model(model)
    assert state.differences(State(model)) == []
    assert difference(before, run(model, inputs)) == 0


@pytest.mark.parametrize("family", ["llama", "llava", "falcon"])
def test_unpatching_after_training_keeps_what_the_model_itself_learned(family):
    model, inputs = make(family)
    twin = copy.deepcopy(model)
    ha.patch_model(model, CONE)
    train(model, inputs)
    learned = {n: p.detach().clone() for n, p in model.named_parameters() if ".hyper." not in n}
    ha.unpatch_model(model)
    left = dict(model.named_parameters())
    assert left.keys() == learned.keys() == dict(twin.named_parameters()).keys()
    assert all(torch.equal(left[n], learned[n]) for n in left)
    twin.load_state_dict(model.state_dict())
    assert difference(run(twin, inputs), run(model, inputs)) == 0


@pytest.mark.parametrize("family", ["llama", "clip", "t5", "falcon", "deberta-v2"])
def test_unpatching_after_saving_and_after_reloading(family, tmp_path):
    model, inputs = make(family)
    model.save_pretrained(tmp_path / "plain")
    plain = type(model).from_pretrained(tmp_path / "plain")
    before, dicts = run(model, inputs), [c.to_dict() for c in configs(plain)]
    state = State(model)
    ha.patch_model(model, CONE)
    perturb(model)
    model.save_pretrained(tmp_path / "patched")
    ha.unpatch_model(model)
    assert state.differences(State(model)) == []
    again = type(model).from_pretrained(tmp_path / "patched")
    ha.unpatch_model(again)
    assert difference(before, run(again, inputs)) == 0
    assert list(again.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in again.modules()] == [type(m) for m in plain.modules()]
    found, expected = (
        [without_path(d) for d in ds] for ds in ([c.to_dict() for c in configs(again)], dicts)
    )
    assert found == expected
    names = [[c._attn_implementation for c in configs(m)] for m in (again, plain)]
    assert names[0] == names[1]
    again.save_pretrained(tmp_path / "patched")
    plain.save_pretrained(tmp_path / "plain")
    texts = [(tmp_path / name / "config.json").read_text() for name in ("patched", "plain")]
    assert texts[0] == texts[1] and "hyperattn" not in texts[0]


def without_path(values: dict) -> dict:
    return {
        k: without_path(v) if isinstance(v, dict) else v
        for k, v in values.items()
        if k != "_name_or_path"
    }


def test_an_eager_model_is_eager_after_reload_and_unpatch(tmp_path):
    model, inputs = make("llama")
    model.set_attn_implementation("eager")
    before = run(model, inputs)
    ha.patch_model(model, CONE).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert difference(before, run(again, inputs)) == 0
    assert ha.unpatch_model(again).config._attn_implementation == "eager"


def test_a_deep_copy_is_patched_and_unpatched_by_itself():
    model, inputs = make("llama")
    stock = run(model, inputs)
    ha.patch_model(model, CONE)
    perturb(model)
    patched = run(model, inputs)
    twin = copy.deepcopy(model)
    assert difference(patched, run(twin, inputs)) == 0
    ha.unpatch_model(twin)
    assert difference(stock, run(twin, inputs)) == 0
    assert difference(patched, run(model, inputs)) == 0


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_a_whole_model_survives_pickle(family):
    make, inputs = FAMILIES[family]
    model, inputs = ha.patch_model(make(), CONE), inputs()
    perturb(model)
    twin = pickle.loads(pickle.dumps(model))
    assert difference(run(model, inputs), run(twin, inputs)) == 0
    stock = [run(ha.unpatch_model(m), inputs) for m in (model, twin)]
    assert difference(*stock) == 0
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]


def test_the_state_of_a_patched_model_survives_pickle():
    model, inputs = llama(), text_inputs()
    ha.patch_model(model, CONE, heads="first-half")
    perturb(model)
    expected = run(model, inputs)
    state = pickle.loads(pickle.dumps(model.state_dict()))
    twin = ha.patch_model(llama(), CONE, heads="first-half")
    twin.load_state_dict(state)
    assert difference(expected, run(twin, inputs)) == 0


def test_patching_again_after_unpatching_starts_afresh():
    model, inputs = make("llama")
    before, state = run(model, inputs), State(model)
    for variant in ("umbral", "penumbral"):
        ha.patch_model(model, ha.ConeConfig(variant=variant))
        assert difference(before, run(model, inputs)) <= 1e-5
        perturb(model)
        ha.unpatch_model(model)
    assert state.differences(State(model)) == []
