"""What `ha.describe` and `hyperattn describe` say of a model."""

import json

import pytest
import torch

import hf_hyperattn as ha
from hyperattn_cli import main
from tests.integration.models import FAMILIES, State, llama, llava, perturb

CONE = ha.ConeConfig()


def test_a_patched_model_host_by_host():
    model = ha.patch_model(llama(), CONE, layers=[1, 3], heads=[0])
    with torch.no_grad():
        model.model.layers[3].self_attn.hyper.cone.gate.copy_(torch.tensor([-0.25, 0.0, 0.5, 0.0]))
    found = ha.describe(model)
    assert (found["model"], found["mode"], found["patched"]) == ("LlamaForCausalLM", "blend", 2)
    assert found["mechanisms"] == [CONE.to_dict()]
    assert found["parameters_added"] == 2 * 3 * 4
    assert found["parameters"] + 24 == sum(p.numel() for p in model.parameters())
    assert [h["mechanisms"] for h in found["hosts"]] == [[], ["cone"], [], ["cone"]]
    assert found["hosts"][3] == {
        "name": "model.layers.3.self_attn",
        "family": "llama",
        "heads": 4,
        "kv_heads": 2,
        "kind": "causal",
        "attn_implementation": "hf_hyperattn",
        "beneath": "sdpa",
        "mechanisms": ["cone"],
        "active": True,
        "parameters_added": 12,
        "gates": {"cone.gate": (-0.25, 0.5)},
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_before_and_after(family):
    model = FAMILIES[family][0]()
    state = State(model)
    before = ha.describe(model)
    assert state.differences(State(model)) == []
    assert (
        before["hosts"]
        and before["patched"] == before["parameters_added"] == 0
        and before["mode"] is None
    )
    ha.patch_model(model, CONE, include_cross_attention=True)
    after = ha.describe(model)
    assert after["patched"] == len(after["hosts"]) == len(before["hosts"])
    assert after["parameters"] == before["parameters"]
    assert after["parameters_added"] == sum(
        p.numel() for n, p in model.named_parameters() if ".hyper." in n
    )
    json.dumps(after, allow_nan=False)


def test_kinds_of_hosts():
    found = ha.describe(FAMILIES["bart"][0]())
    kinds = {h["name"].split(".", 1)[1]: h["kind"] for h in found["hosts"]}
    assert kinds["encoder.layers.0.self_attn"] == "bidirectional"
    assert kinds["decoder.layers.0.self_attn"] == "causal"
    assert kinds["decoder.layers.0.encoder_attn"] == "cross"


def test_parts_patched_in_different_ways():
    model = llava()
    ha.patch_model(model.model.language_model, CONE)
    ha.patch_model(model.model.vision_tower, ha.ConeConfig(gamma=2.0), mode="replace")
    found = ha.describe(model)
    assert found["mode"] == "blend and replace"
    assert sorted(m["gamma"] for m in found["mechanisms"]) == [1.0, 2.0]
    assert {h["family"] for h in found["hosts"]} == {"llama", "clip_vision_model"}


def test_gates_of_an_adapter_are_those_in_use():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["hyper"])
    model = peft.get_peft_model(ha.patch_model(llama(), CONE), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name and name.endswith("gate"):
                parameter.fill_(0.5)
    assert {h["gates"]["cone.gate"] for h in ha.describe(model)["hosts"]} == {(0.5, 0.5)}
    with model.disable_adapter():
        assert {h["gates"]["cone.gate"] for h in ha.describe(model)["hosts"]} == {(0.0, 0.0)}


def test_offloaded_gates():
    accelerate = pytest.importorskip("accelerate")
    model = ha.patch_model(llama(), CONE)
    accelerate.cpu_offload(model, execution_device="cpu")
    found = ha.describe(model)
    assert found["hosts"][0]["gates"] == {"cone.gate": None} and "cone.gate offloaded" in str(found)


def test_the_table():
    model = ha.patch_model(llama(), CONE, layers=[0])
    lines = str(ha.describe(model)).splitlines()
    assert lines[0].split() == "attention layer family heads kind patched added gates".split()
    assert lines[2].split() == [
        "model.layers.0.self_attn",
        *"llama 4/2 causal cone 12 cone.gate 0 to 0".split(),
    ]
    assert lines[3].split() == [
        "model.layers.1-3.self_attn",
        "(3)",
        *"llama 4/2 causal - 0 -".split(),
    ]
    assert len(lines) == 5 and set(lines[1]) == {"-", " "}
    assert lines[-1].startswith(
        "LlamaForCausalLM: 1 of 4 attention layers patched (blend), 12 parameters added to "
    )


def test_equal_rows_are_folded_and_no_others():
    model = ha.patch_model(llama(), CONE, layers=[1])
    assert str(ha.describe(model)).splitlines()[2].startswith("model.layers.0,2-3.self_attn (3) ")
    ha.unpatch_model(model)
    ha.patch_model(model, CONE)
    with torch.no_grad():
        model.model.layers[2].self_attn.hyper.cone.gate.fill_(0.5)
    names = [line.split()[0] for line in str(ha.describe(model)).splitlines()[2:-1]]
    assert names == ["model.layers.0-1,3.self_attn", "model.layers.2.self_attn"]


def test_two_stacks_are_not_one_row():
    names = [line.split()[0] for line in str(ha.describe(FAMILIES["bart"][0]())).splitlines()[2:-1]]
    assert len(names) == 3 and {name.split(".")[1] for name in names} == {"encoder", "decoder"}


def test_values_by_head():
    model = ha.patch_model(llama(), CONE, layers=[1])
    gate = [-0.25, 0.0, 0.5, 0.125]
    with torch.no_grad():
        model.model.layers[1].self_attn.hyper.cone.gate.copy_(torch.tensor(gate))
    described = ha.describe(model, heads=True)
    assert (
        "by_head" not in ha.describe(model)["hosts"][1] and described["hosts"][0]["by_head"] == {}
    )
    assert described["hosts"][1]["by_head"] == {
        "cone.gate": gate,
        "cone.log_gamma": [0] * 4,
        "cone.log_radius": [0] * 4,
    }
    lines = [line.split() for line in str(described).splitlines()]
    assert ["model.layers.1.self_attn", "0", "1", "2", "3"] in lines
    assert ["cone.gate", "-0.25", "0", "0.5", "0.125"] in lines


@pytest.mark.parametrize("patched", [True, False])
def test_the_command(patched, tmp_path, capsys):
    model = llama()
    if patched:
        ha.patch_model(model, CONE, layers="last-half")
        perturb(model)
    model.save_pretrained(tmp_path)
    assert main(["describe", str(tmp_path)]) == 0
    assert capsys.readouterr().out.rstrip() == str(ha.describe(model))
    assert main(["describe", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(ha.describe(model)))


def test_a_family_that_has_to_be_routed(tmp_path, capsys):
    FAMILIES["falcon"][0]().save_pretrained(tmp_path)
    assert main(["describe", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["hosts"]) == 4


@pytest.mark.parametrize(
    "text", [None, "{", '{"model_type": "no_such_type"}', '{"hyperattn": 5, "model_type": "llama"}']
)
def test_what_is_no_model(text, tmp_path, capsys):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert main(["describe", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("hyperattn describe: error: ")


def test_a_path_that_is_not_there(capsys):
    assert main(["describe", "/no/such/place"]) == 2
    assert "/no/such/place: no such folder" in capsys.readouterr().err


def test_it_says_what_runs():
    """A patch that another implementation hides is no effect, and a mechanism by name is one."""
    model = ha.patch_model(llama(), CONE, layers=[1])
    model.config._attn_implementation_internal = "eager"
    found = ha.describe(model)
    assert [h["active"] for h in found["hosts"]] == [False] * 4
    assert str(found).endswith(
        "not active: the patched layers run attn_implementation='eager', without what was added"
    )
    model = llama()
    model.set_attn_implementation("cone")
    found = ha.describe(model)
    assert found["patched"] == 0 and {h["attn_implementation"] for h in found["hosts"]} == {"cone"}
    assert str(found).endswith("by name: attention is 'cone'")
    model.set_attn_implementation("hyper_dot")
    assert str(ha.describe(model)).endswith("by name: attention is 'hyper_dot'")
    ha.patch_model(model, CONE, layers=[1])
    assert [h["beneath"] for h in ha.describe(model)["hosts"]] == [None, "hyper_dot", None, None]
    assert str(ha.describe(model)).endswith(
        "beneath: what is not changed is computed by 'hyper_dot'"
    )
