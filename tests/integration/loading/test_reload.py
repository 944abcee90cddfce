"""A patched checkpoint comes back exactly, with nothing but plain Transformers calls and one import."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import hf_hyperattn as ha
from tests.integration.models import (
    FAMILIES,
    bert,
    difference,
    llama,
    perturb,
    run,
    set_implementation,
    text_inputs,
)
from tests.integration.patches import CONE, added, patched


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
    set_implementation(model, implementation)
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


BERT_HEADS = (
    "BertModel",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForMaskedLM",
)


@pytest.mark.parametrize("source", BERT_HEADS)
@pytest.mark.parametrize("target", BERT_HEADS)
def test_any_head_class_from_any_head_class(source, target, tmp_path):
    model, inputs = ha.patch_model(bert(getattr(hf, source)), CONE, layers=[0, 3]), text_inputs()
    perturb(model)
    model.save_pretrained(tmp_path)
    again, report = getattr(hf, target).from_pretrained(tmp_path, output_loading_info=True)
    assert not [
        key
        for keys in (report["missing_keys"], report["unexpected_keys"])
        for key in keys
        if "hyper" in key
    ]
    bodies = [run(getattr(m, "bert", m), inputs)[".last_hidden_state"] for m in (model, again)]
    assert torch.equal(*bodies)
    assert again.config.hyperattn["hosts"] == [
        n for n, m in again.named_modules() if "hyper" in m._modules
    ]


@pytest.mark.parametrize(
    "auto", ["AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"]
)
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
    assert {t.dtype for t in load_file(tmp_path / "2" / "model.safetensors").values()} == {
        torch.bfloat16
    }
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


@pytest.mark.parametrize(
    "options", [{}, dict(dtype=torch.bfloat16), dict(device_map="auto")], ids=str
)
def test_a_fresh_patch_is_zeros_and_never_garbage(options, tmp_path):
    """The weights of the base beside the config of the patched model: the identity."""
    model, inputs = llama(), text_inputs()
    model.save_pretrained(tmp_path / "base")
    plain_config = (tmp_path / "base" / "config.json").read_text()
    ha.patch_model(model, CONE).save_pretrained(tmp_path / "patched")
    shutil.copy(tmp_path / "patched" / "config.json", tmp_path / "base" / "config.json")
    with ha.fresh_patch():
        again, report = type(model).from_pretrained(
            tmp_path / "base", output_loading_info=True, **options
        )
    assert len(report["missing_keys"]) == len(added(again)) == 12
    assert not any(p.any() or not p.isfinite().all() for p in added(again).values())
    (tmp_path / "base" / "config.json").write_text(plain_config)
    plain = type(model).from_pretrained(tmp_path / "base", **options)
    assert difference(run(plain, inputs), run(again, inputs)) == 0


def test_keys_of_another_size_start_afresh_where_the_user_asked_for_it(tmp_path):
    model, _, _ = patched("llama")
    model.save_pretrained(tmp_path)
    halves = dict(num_attention_heads=2, head_dim=16, num_key_value_heads=1)
    with pytest.raises(
        ValueError, match=r"hyper.cone.gate' with shape \(4,\), and its config asks for \(2,\)"
    ):
        type(model).from_pretrained(tmp_path, ignore_mismatched_sizes=True, **halves)
    with ha.fresh_patch():
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
