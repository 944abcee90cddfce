"""Hosts with mechanism configs of their own: in the model, in its records, and through every way to save and load."""

import copy
import json

import pytest
import torch
import transformers as hf
from peft import get_peft_model
from transformers.utils import logging as hf_logging

import hf_hyperattn as ha
from hf_hyperattn.mechanisms.sparse import Window
from hub_cards.spec import read_spec
from hyperattn_cli import main
from tests.integration.models import (
    FAMILIES,
    State,
    difference,
    llama,
    llava,
    perturb,
    run,
    text_inputs,
)

CONE, OWN = ha.ConeConfig(), ha.ConeConfig(variant="penumbral", gamma=2.0, radius=3.0)
ONE = "model.layers.1.self_attn"
#: family -> (a host with configs of its own, the class of the bare model, how names differ there)
HOSTS = {
    "llama": (ONE, hf.LlamaModel, lambda n: n.removeprefix("model.")),
    "gpt2": ("transformer.h.1.attn", hf.GPT2Model, lambda n: n.removeprefix("transformer.")),
    "bert": ("encoder.layer.2.attention.self", hf.BertForMaskedLM, lambda n: f"bert.{n}"),
    "t5": ("encoder.block.1.layer.0.SelfAttention", hf.T5EncoderModel, lambda n: n),
}


def patched(family="llama", mode="replace"):
    factory, inputs = FAMILIES[family]
    torch.manual_seed(0)
    model = factory()
    ha.patch_model(
        model, ha.HyperAttnConfig([CONE], mode=mode, overrides={HOSTS[family][0]: [OWN]})
    )
    return model, inputs()


def record(model) -> ha.HyperAttnConfig:
    return ha.HyperAttnConfig.from_dict(model.config.hyperattn)


@pytest.mark.parametrize("family", HOSTS)
def test_the_host_runs_its_own_and_the_others_what_holds_for_all(family):
    model, inputs = patched(family)
    name = HOSTS[family][0]
    alike, other = (copy.deepcopy(model) for _ in range(2))
    for changed, config in ((alike, CONE), (other, OWN)):
        ha.patch_model(ha.unpatch_model(changed), config, mode="replace")
    assert difference(run(model, inputs), run(alike, inputs)) > 0
    alike.get_submodule(name).hyper = other.get_submodule(name).hyper
    assert difference(run(model, inputs), run(alike, inputs)) == 0


@pytest.mark.parametrize("family", HOSTS)
def test_it_comes_back_as_the_same_class_and_as_its_neighbour(family, tmp_path):
    model, inputs = patched(family, "blend")
    name, neighbour, renamed = HOSTS[family]
    perturb(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert difference(run(model, inputs), run(again, inputs)) == 0
    assert record(again) == record(model) and record(again).overrides == {name: (OWN,)}
    bare = neighbour.from_pretrained(tmp_path)
    assert record(bare).overrides == {renamed(name): (OWN,)}
    assert bare.get_submodule(renamed(name)).hyper.mechanisms() == (OWN,)
    bare.save_pretrained(tmp_path / "bare")
    back = type(model).from_pretrained(tmp_path / "bare")
    assert back.get_submodule(name).hyper.mechanisms() == (OWN,)


def test_a_decoder_that_the_class_lacks_keeps_its_overrides_to_itself(tmp_path):
    factory, _ = FAMILIES["t5"]
    name = "decoder.block.0.layer.0.SelfAttention"
    model = ha.patch_model(factory(), ha.HyperAttnConfig([CONE], overrides={name: [OWN]}))
    model.save_pretrained(tmp_path)
    assert record(hf.T5EncoderModel.from_pretrained(tmp_path)).overrides is None


def test_unpatching_leaves_nothing():
    model = llama()
    before = State(model)
    ha.patch_model(model, ha.HyperAttnConfig([CONE], overrides={ONE: [OWN]}))
    assert not before.differences(State(ha.unpatch_model(model)))


def test_the_record_of_a_part_names_hosts_as_the_part_does():
    model = llava()
    name = "model.language_model.layers.1.self_attn"
    ha.patch_model(model, ha.HyperAttnConfig([CONE], overrides={name: [OWN]}))
    assert record(model).overrides == {name: (OWN,)}
    assert record(model.model.language_model).overrides == {"layers.1.self_attn": (OWN,)}
    assert record(model.model.vision_tower).overrides is None


def test_the_config_by_itself_patches_another_model_alike(tmp_path):
    model, inputs = patched()
    record(model).save_pretrained(tmp_path)
    again = ha.unpatch_model(copy.deepcopy(model))
    ha.patch_model(again, ha.HyperAttnConfig.from_pretrained(tmp_path))
    assert difference(run(model, inputs), run(again, inputs)) == 0


def test_beside_an_adapter(tmp_path):
    model, _ = patched(mode="blend")
    get_peft_model(model, ha.lora_config(model)).save_pretrained(tmp_path)
    assert ha.HyperAttnConfig.from_pretrained(tmp_path).overrides == {ONE: (OWN,)}


def test_describe_and_the_card_tell_of_both():
    model, _ = patched()
    assert ha.describe(model)["mechanisms"] == [CONE.to_dict(), OWN.to_dict()]
    ((name, shown),) = read_spec(model.config.hyperattn).mechanisms
    assert name == "cone" and shown.endswith("other settings at 1 of the modules (overrides)")


def test_an_export_runs_them_as_remote_code(tmp_path):
    model, inputs = patched("gpt2", "blend")
    perturb(model)
    model.save_pretrained(tmp_path / "model")
    assert main(["export", "--remote-code", str(tmp_path / "model"), str(tmp_path / "export")]) == 0
    assert (tmp_path / "export" / "hyperattn_config.py").is_file()
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True)
    assert difference(run(model, inputs), run(again, inputs)) == 0


def test_a_host_may_run_another_mechanism_of_the_stage(tmp_path):
    hsa, window = ha.HsaConfig((4,), near=2, sinks=0, refine_top_k=0), ha.SparseConfig(Window(3, 1))
    own = llama()
    both, alike, other = (copy.deepcopy(own) for _ in range(3))
    ha.patch_model(both, ha.HyperAttnConfig([hsa], mode="replace", overrides={ONE: [window]}))
    ha.patch_model(alike, hsa, mode="replace")
    ha.patch_model(other, window, mode="replace")
    alike.get_submodule(ONE).hyper = other.get_submodule(ONE).hyper
    ids = torch.arange(1, 17)[None]
    assert torch.equal(both(ids).logits, alike(ids).logits)
    both.save_pretrained(tmp_path)
    assert torch.equal(hf.LlamaForCausalLM.from_pretrained(tmp_path)(ids).logits, both(ids).logits)
    with pytest.raises(
        ValueError, match="holds hype, which is not among the mechanisms; allowed: hsa, and others"
    ):
        ha.HyperAttnConfig([hsa], overrides={ONE: [ha.HypeConfig()]})


def test_json_has_the_key_only_where_it_is_needed():
    plain, own = (ha.HyperAttnConfig([CONE], overrides=o) for o in ({}, {ONE: [OWN]}))
    assert "overrides" not in plain.to_dict() and plain == ha.HyperAttnConfig([CONE])
    data = json.loads(json.dumps(own.to_dict()))
    assert data["overrides"] == {ONE: [OWN.to_dict()]} and ha.HyperAttnConfig.from_dict(data) == own
    assert hash(own) == hash(plain) and copy.deepcopy(own) == own != plain


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([ONE], "names of at most"),
        ({3: [OWN]}, "names of at most"),
        ({ONE: OWN}, "a list of mechanism configs"),
        ({ONE: ["cone"]}, "a list of mechanism configs"),
        ({ONE: []}, "at least one mechanism"),
        ({ONE: [OWN, CONE]}, "every one once"),
        ({ONE: [ha.HyperAttnConfig([CONE])]}, "a list of mechanism configs"),
    ],
)
def test_what_a_config_refuses(overrides, says):
    with pytest.raises(ValueError, match=says) as caught:
        ha.HyperAttnConfig([CONE], overrides=overrides)
    assert "\n" not in str(caught.value) and "overrides" in str(caught.value)


def test_only_mechanisms_and_hosts_in_use():
    with pytest.raises(ValueError, match="cone, which is not among the mechanisms; allowed: none"):
        ha.HyperAttnConfig([], overrides={ONE: [OWN]})
    with pytest.raises(ValueError, match="which is not in hosts"):
        ha.HyperAttnConfig([CONE], hosts=["model.layers.0.self_attn"], overrides={ONE: [OWN]})


@pytest.mark.parametrize(
    ("host", "layers"), [("model.layers.9.self_attn", None), ("nonsense", None), (ONE, [0])]
)
def test_a_host_that_is_not_patched_is_refused_and_the_model_left_alone(host, layers):
    model = llama()
    before = State(model)
    config = ha.HyperAttnConfig(
        [CONE], layers=layers, overrides={host: [OWN], "model.layers.0.self_attn": [OWN]}
    )
    with pytest.raises(
        ValueError, match=f"overrides names the host '{host}', which is not patched"
    ):
        ha.patch_model(model, config)
    assert not before.differences(State(model))


@pytest.mark.parametrize(
    "overrides",
    [
        7,
        "x" * 10**6,
        [[ONE, []]],
        {ONE: {"mechanism": "cone"}},
        {ONE: [{"mechanism": "os.system"}]},
        {ONE: [{"mechanism": "cone", "gamma": 1e400}]},
        {ONE: [{"mechanism": "cone", "gamma": -1}]},
        {ONE: [{"mechanism": "cone", "shell": "rm"}]},
        {ONE: [[[[]]]]},
        {ONE: [{"mechanism": "cone"}] * 3},
        {ONE: [{"mechanism": "cone"}] * 20_000},
        {f"h{i}": [] for i in range(20_000)},
        {ONE: []},
        {ONE: None},
    ],
)
def test_hostile_json_is_refused_in_one_short_line(overrides):
    data = ha.HyperAttnConfig([CONE]).to_dict() | {"overrides": overrides}
    with pytest.raises(ValueError) as caught:
        ha.HyperAttnConfig.from_dict(data)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "name, value", [("overrides", {ONE: [OWN]}), ("heads", [0]), ("layers", "last-half")]
)
def test_a_mechanism_used_by_name_cannot_honour_what_is_for_some_hosts(name, value):
    config = FAMILIES["llama"][0]().config
    config.hyperattn = ha.HyperAttnConfig([CONE], **{name: value}).to_dict()
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="cone")
    with pytest.raises(
        ValueError, match=f"^config.hyperattn has {name}, which cone used by name cannot honour"
    ):
        model(**text_inputs())


def test_parameters_of_mechanisms_that_a_name_does_not_run_are_warned_of_once(caplog):
    hf_logging.warning_once.cache_clear()
    config = FAMILIES["llama"][0]().config
    config.hyperattn = ha.HyperAttnConfig(
        [ha.ConeConfig(gamma=0.7), ha.HeadFusionConfig()]
    ).to_dict()
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="cone_penumbral")
    for _ in range(2):
        model(**text_inputs())
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "config.hyperattn holds parameters of head_fusion, which cone used by name"
    )
