"""A patched checkpoint comes back exactly, with nothing but plain Transformers calls and one import."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import hf_hyperattn as ha
from hf_hyperattn.integration.records import patched_hosts
from tests.integration.models import (
    FAMILIES,
    State,
    bert,
    difference,
    llama,
    llava,
    perturb,
    run,
    tensors,
    text_inputs,
)
from tests.zoo.tiny import tiny

CONE = ha.ConeConfig(gamma=0.5, radius=2.0)
ROOT = Path(__file__).parents[2]


def patched(family: str, **options):
    """A patched model that has learned something, its inputs, and what it computes."""
    make, inputs = FAMILIES[family]
    model, inputs = ha.patch_model(make(), CONE, **options), inputs()
    perturb(model)
    return model, inputs, run(model, inputs)


def added(model) -> dict:
    return {n: p for n, p in model.named_parameters() if ".hyper." in n}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_and_is_saved_again_without_loss(family, tmp_path):
    model, inputs, expected = patched(family, include_cross_attention=True)
    model.save_pretrained(tmp_path / "1")
    for number in (1, 2):
        model = type(model).from_pretrained(tmp_path / str(number))
        assert difference(expected, run(model, inputs)) == 0
        model.save_pretrained(tmp_path / str(number + 1))
    files = [load_file(tmp_path / str(n) / "model.safetensors") for n in (1, 3)]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][k], files[1][k]) for k in files[0])
    configs = [json.loads((tmp_path / str(n) / "config.json").read_text()) for n in (2, 3)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "llava", "t5"])
def test_whatever_ran_before(family, implementation, tmp_path):
    make, inputs = FAMILIES[family]
    model, inputs = make(), inputs()
    model.set_attn_implementation(implementation)
    ha.patch_model(model, CONE, layers="last-half")
    perturb(model)
    expected = run(model, inputs)
    model.save_pretrained(tmp_path)
    assert difference(expected, run(type(model).from_pretrained(tmp_path), inputs)) == 0


def test_only_safetensors_and_json_are_written(tmp_path):
    model, _, _ = patched("llama")
    model.save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} <= {".json", ".safetensors", ".md"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["attn_implementation"] == "hf_hyperattn"
    assert config["hyperattn"]["format"] == 1
    assert config["hyperattn"]["mechanisms"] == [CONE.to_dict()]


def test_shards(tmp_path):
    model, inputs, expected = patched("llama")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 10
    assert difference(expected, run(type(model).from_pretrained(tmp_path), inputs)) == 0
    model.save_pretrained(tmp_path)  # one file over many: none of the many may be left
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert difference(expected, run(type(model).from_pretrained(tmp_path), inputs)) == 0


BERT_HEADS = ("BertModel", "BertForSequenceClassification", "BertForTokenClassification", "BertForMaskedLM")


@pytest.mark.parametrize("source", BERT_HEADS)
@pytest.mark.parametrize("target", BERT_HEADS)
def test_any_head_class_from_any_head_class(source, target, tmp_path):
    model, inputs = ha.patch_model(bert(getattr(hf, source)), CONE, layers=[0, 3]), text_inputs()
    perturb(model)
    model.save_pretrained(tmp_path)
    again, report = getattr(hf, target).from_pretrained(tmp_path, output_loading_info=True)
    assert not [
        key for keys in (report["missing_keys"], report["unexpected_keys"]) for key in keys if "hyper" in key
    ]
    bodies = [run(getattr(m, "bert", m), inputs)[".last_hidden_state"] for m in (model, again)]
    assert torch.equal(*bodies)
    assert again.config.hyperattn["hosts"] == [n for n, m in again.named_modules() if "hyper" in m._modules]


@pytest.mark.parametrize("auto", ["AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"])
def test_auto_classes(auto, tmp_path):
    model, inputs, _ = patched("llama")
    model.save_pretrained(tmp_path)
    again = getattr(hf, auto).from_pretrained(tmp_path)
    bodies = [run(getattr(m, "model", m), inputs)[".last_hidden_state"] for m in (model, again)]
    assert torch.equal(*bodies)


def loaded_as(dtype, directory: Path):
    """A plain model loaded in a dtype; `model.to` would also turn buffers that stay in float32 when loading."""
    llama().save_pretrained(directory)
    return hf.LlamaForCausalLM.from_pretrained(directory, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto", torch.float64])
def test_dtypes(dtype, tmp_path):
    model, inputs, _ = patched("llama")
    model.save_pretrained(tmp_path / "1")
    again = type(model).from_pretrained(tmp_path / "1", dtype=dtype)
    wanted = torch.float32 if dtype == "auto" else dtype
    assert {p.dtype for p in again.parameters()} == {wanted}
    plain = ha.patch_model(loaded_as(wanted, tmp_path / "2"), CONE)
    plain.load_state_dict({n: t.to(wanted) for n, t in model.state_dict().items()})
    assert difference(run(plain, inputs), run(again, inputs)) == 0


def test_a_checkpoint_in_half_precision(tmp_path):
    model, inputs = ha.patch_model(loaded_as(torch.bfloat16, tmp_path / "1"), CONE), text_inputs()
    perturb(model)
    expected = run(model, inputs)
    model.save_pretrained(tmp_path / "2")
    assert {t.dtype for t in load_file(tmp_path / "2" / "model.safetensors").values()} == {torch.bfloat16}
    assert difference(expected, run(type(model).from_pretrained(tmp_path / "2"), inputs)) == 0


PLACES = {f"model.layers.{i}": ("cpu", "disk")[i % 2] for i in range(4)} | {
    "model.embed_tokens": "cpu",
    "model.norm": "disk",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.mark.parametrize(
    "device_map", ["auto", "cpu", {"": "cpu"}, PLACES], ids=["auto", "cpu", "one", "disk"]
)
def test_device_maps(device_map, tmp_path):
    model, inputs, expected = patched("llama")
    model.save_pretrained(tmp_path / "1")
    again = type(model).from_pretrained(
        tmp_path / "1", device_map=device_map, offload_folder=tmp_path / "disk"
    )
    assert difference(expected, run(again, inputs)) == 0
    again.save_pretrained(tmp_path / "2")
    assert difference(expected, run(type(model).from_pretrained(tmp_path / "2"), inputs)) == 0


@pytest.mark.parametrize("low", [True, False])
def test_low_cpu_mem_usage(low, tmp_path):
    model, inputs, expected = patched("llama")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, low_cpu_mem_usage=low)
    assert difference(expected, run(again, inputs)) == 0


@pytest.mark.parametrize("options", [{}, dict(dtype=torch.bfloat16), dict(device_map="auto")], ids=str)
def test_missing_keys_are_zeros_and_never_garbage(options, tmp_path):
    """The weights of the base beside the config of the patched model: the identity."""
    model, inputs = llama(), text_inputs()
    model.save_pretrained(tmp_path / "base")
    plain_config = (tmp_path / "base" / "config.json").read_text()
    ha.patch_model(model, CONE).save_pretrained(tmp_path / "patched")
    shutil.copy(tmp_path / "patched" / "config.json", tmp_path / "base" / "config.json")
    again, report = type(model).from_pretrained(tmp_path / "base", output_loading_info=True, **options)
    assert len(report["missing_keys"]) == len(added(again)) == 12
    assert not any(p.any() or not p.isfinite().all() for p in added(again).values())
    (tmp_path / "base" / "config.json").write_text(plain_config)
    plain = type(model).from_pretrained(tmp_path / "base", **options)
    assert difference(run(plain, inputs), run(again, inputs)) == 0


def test_keys_of_another_size_start_afresh_where_the_user_asked_for_it(tmp_path):
    model, _, _ = patched("llama")
    model.save_pretrained(tmp_path)
    halves = dict(num_attention_heads=2, head_dim=16, num_key_value_heads=1)
    again = type(model).from_pretrained(tmp_path, ignore_mismatched_sizes=True, **halves)
    assert {p.shape for p in added(again).values()} == {(2,)}
    assert not any(p.any() for p in added(again).values())


def test_from_a_config_alone(tmp_path):
    model, inputs, _ = patched("llama", layers=[1])
    model.save_pretrained(tmp_path)
    config = hf.AutoConfig.from_pretrained(tmp_path)
    for again in (hf.AutoModelForCausalLM.from_config(config), hf.LlamaForCausalLM(config)):
        assert ha.describe(again)["patched"] == 1
        assert not any(p.any() for p in added(again).values())


def test_loading_as_eager_warns_and_can_be_put_right(tmp_path, caplog):
    model, inputs, expected = patched("llama")
    model.save_pretrained(tmp_path / "1")
    with caplog.at_level("WARNING"):
        hf.logging.enable_propagation()
        again = type(model).from_pretrained(tmp_path / "1", attn_implementation="eager")
    assert "saved patched by hf_hyperattn, and is loaded with attn_implementation='eager'" in caplog.text
    stock = run(ha.unpatch_model(model), inputs)
    assert difference(stock, run(again, inputs)) <= 1e-5
    again.save_pretrained(tmp_path / "2")  # saved again, the method is not lost
    assert difference(expected, run(type(model).from_pretrained(tmp_path / "2"), inputs)) == 0
    again.set_attn_implementation("hf_hyperattn")
    assert difference(expected, run(again, inputs)) == 0


def test_one_part_of_a_composite_as_eager(tmp_path, caplog):
    model, _, _ = patched("llava")
    model.save_pretrained(tmp_path)
    with caplog.at_level("WARNING"):
        again = type(model).from_pretrained(tmp_path, attn_implementation={"text_config": "eager"})
    assert "loaded with attn_implementation='eager'" in caplog.text
    assert again.config.text_config._attn_implementation == "eager"
    assert again.config.vision_config._attn_implementation == "hf_hyperattn"


def test_two_models_that_share_a_config(tmp_path):
    """Saving the one that is not patched neither records a patch nor takes it from the other."""
    model, inputs = llama(), text_inputs()
    twin = type(model)(model.config).eval()
    stock = run(twin, inputs)
    ha.patch_model(model, CONE)
    perturb(model)
    expected = run(model, inputs)
    assert difference(stock, run(twin, inputs)) == 0
    twin.save_pretrained(tmp_path / "twin")
    assert "hyperattn" not in (tmp_path / "twin" / "config.json").read_text()
    assert difference(stock, run(type(model).from_pretrained(tmp_path / "twin"), inputs)) == 0
    assert difference(expected, run(model, inputs)) == 0
    model.save_pretrained(tmp_path / "model")
    assert difference(expected, run(type(model).from_pretrained(tmp_path / "model"), inputs)) == 0


#: sam sets the names of its parts from the one at the top, groupvit's parts have none, data2vec-vision picks classes by
#: name, mpt's routed class is one of a whole model, lightglue's config has a name of its own.
ODD = ("sam", "sam3", "groupvit", "data2vec-vision", "mpt", "lightglue")


@pytest.mark.parametrize("model_type", ODD)
def test_models_that_handle_names_in_ways_of_their_own(model_type, tmp_path):
    one, _ = tiny("base", model_type)
    model, inputs = one.model, one.inputs
    model.save_pretrained(tmp_path / "plain")
    plain, state = type(model).from_pretrained(tmp_path / "plain"), State(model)
    names = [c._attn_implementation for c in configs(plain)]
    ha.patch_model(model, CONE)
    perturb(model)
    with torch.no_grad():
        expected = tensors(model(**inputs))
        model.save_pretrained(tmp_path / "patched")
        again = type(model).from_pretrained(tmp_path / "patched")
        assert {host.config._attn_implementation for _, host in patched_hosts(again)} == {"hf_hyperattn"}
        assert difference(expected, tensors(again(**inputs))) <= 1e-6
    for one in (model, again):
        ha.unpatch_model(one)
        assert [type(m).__name__ for m in one.modules()] == [type(m).__name__ for m in plain.modules()]
    assert state.differences(State(model)) == []
    assert [c._attn_implementation for c in configs(again)] == names


def configs(model) -> list:
    return [m.config for m in model.modules() if hasattr(m, "config")]


# parts


def test_only_the_text_part_of_a_composite_is_patched(tmp_path):
    model, inputs, expected = patched("llava", layers=lambda host: "language_model" in host.name)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert difference(expected, run(again, inputs)) == 0
    assert again.config.vision_config._attn_implementation == "sdpa"
    assert "hyper" not in " ".join(n for n, _ in again.model.vision_tower.named_modules())


@pytest.mark.parametrize(
    "family, part",
    [
        ("llava", "model.language_model"),
        ("clip", "vision_model"),
        ("t5", "encoder"),
        ("bart", "model.encoder"),
    ],
)
def test_a_part_patched_by_itself(family, part, tmp_path):
    make, inputs = FAMILIES[family]
    model, inputs = make(), inputs()
    ha.patch_model(model.get_submodule(part), CONE, layers=[0])
    perturb(model)
    expected = run(model, inputs)
    for number in ("1", "2"):
        model.save_pretrained(tmp_path / number)
        model = type(model).from_pretrained(tmp_path / number)
        assert difference(expected, run(model, inputs)) == 0
        assert ha.describe(model)["patched"] == 1


def test_parts_patched_in_different_ways(tmp_path):
    model, inputs = llava(), FAMILIES["llava"][1]()
    ha.patch_model(model.model.language_model, CONE, heads=[0])
    ha.patch_model(model.model.vision_tower, ha.ConeConfig(variant="penumbral"), mode="replace")
    perturb(model)
    expected = run(model, inputs)
    for number in ("1", "2"):
        model.save_pretrained(tmp_path / number)
        model = type(model).from_pretrained(tmp_path / number)
        assert difference(expected, run(model, inputs)) == 0
    ha.unpatch_model(model.model.vision_tower)
    expected = run(model, inputs)
    model.save_pretrained(tmp_path / "3")
    assert difference(expected, run(type(model).from_pretrained(tmp_path / "3"), inputs)) == 0


def test_parts_that_one_config_cannot_tell_apart_are_not_saved(tmp_path):
    model = FAMILIES["bart"][0]()
    ha.patch_model(model.model.encoder, CONE)
    with pytest.raises(ValueError, match="patched already; call unpatch_model.* or patch all in one call"):
        ha.patch_model(model.model.decoder, ha.ConeConfig())


@pytest.mark.parametrize(
    "family, part, name",
    [
        ("clip", "text_model", "CLIPTextModel"),
        ("clip", "vision_model", "CLIPVisionModel"),
        ("t5", "encoder", "T5EncoderModel"),
    ],
)
def test_a_part_is_loaded_out_of_the_whole(family, part, name, tmp_path):
    model, inputs, _ = patched(family)
    model.save_pretrained(tmp_path)
    again, report = getattr(hf, name).from_pretrained(tmp_path, output_loading_info=True)
    assert not [key for key in report["missing_keys"] if "hyper" in key]
    wanted = {"pixel_values"} if "Vision" in name else {"input_ids", "attention_mask"}
    inputs = {k: v for k, v in inputs.items() if k in wanted}
    assert difference(run(model.get_submodule(part), inputs), run(again, inputs)) == 0


def test_a_part_is_saved_by_itself(tmp_path):
    model, _, _ = patched("llava")
    model.model.language_model.save_pretrained(tmp_path)
    again, inputs = hf.AutoModel.from_pretrained(tmp_path), text_inputs()
    assert difference(run(model.model.language_model, inputs), run(again, inputs)) == 0


def test_a_model_without_the_recorded_layers_is_refused(tmp_path):
    model, _, _ = patched("llama")
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="names the host 'model.layers.2.self_attn', which LlamaForCausalLM does not"
    ):
        type(model).from_pretrained(tmp_path, num_hidden_layers=2)


# other processes


def run_python(script: str, *arguments) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, cwd=ROOT)


OTHERS = ("llama", "llava", "clip", "t5", "whisper", "falcon", "deberta-v2")


def test_another_process_with_one_import_and_without(tmp_path):
    expected, directories = {}, [tmp_path / family for family in OTHERS]
    for family, directory in zip(OTHERS, directories, strict=True):
        model, inputs, _ = patched(family)
        model.save_pretrained(directory)
        torch.save(inputs, directory / "inputs.pt")
        with torch.no_grad():
            expected[family] = [t for t in model(**inputs).to_tuple() if isinstance(t, torch.Tensor)]
    answers = {}
    for how in ("without", "with"):
        done = run_python("loads.py", how, *directories)
        assert done.returncode == 0, done.stderr
        answers[how] = json.loads(done.stdout.splitlines()[-1])
    for family, directory in zip(OTHERS, directories, strict=True):
        assert answers["with"][str(directory)] == {"error": None, "ours": True}
        found = torch.load(directory / "outputs.pt")
        assert all(torch.equal(a, b) for a, b in zip(found, expected[family], strict=True)), family
        assert "hf_hyperattn" in (answers["without"][str(directory)]["error"] or "loaded, silently"), family


@pytest.mark.parametrize("moment, count", [("write", 1), ("write", 9), ("move", 0)])
def test_a_save_that_is_killed_leaves_the_previous_checkpoint(moment, count, tmp_path):
    model, inputs, expected = patched("llama")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    done = run_python("saves.py", tmp_path, moment, count)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    assert difference(expected, run(type(model).from_pretrained(tmp_path), inputs)) == 0
    model.save_pretrained(tmp_path, max_shard_size="10KB")  # what the killed one left is gone after the next
    assert {p.name for p in tmp_path.iterdir()} == before.keys()


def test_a_save_that_fails_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    model, inputs, expected = patched("llama")
    model.save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf.modeling_utils, "safe_save_file", full)
    perturb(model, 2.0)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert difference(expected, run(type(model).from_pretrained(tmp_path), inputs)) == 0
