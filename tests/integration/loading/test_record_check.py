"""Record and added tensors belong together: a load with one of the two is an error, except for a fresh patch."""

import json
import logging
import shutil

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import hf_hyperattn as ha
from tests.integration.architectures.collaborative import make, quiet
from tests.integration.models import bert, clip, difference, llama, llava, perturb, run, text_inputs
from tests.integration.patches import CONE, added, patched

MISSING = r"lacks {} of the 12 added tensors .* cone\) asks for, such as '.*\.hyper\.cone\.\w+'; .*fresh_patch"
STRANGE = r"holds 12 added tensors, such as '.*\.hyper\.cone\.gate', that no record .*fresh_patch"


def filtered(source, target, keep, record=True):
    """A copy of a checkpoint with the tensors that `keep` wants, and with or without its record."""
    shutil.copytree(source, target)
    kept = {n: t for n, t in load_file(source / "model.safetensors").items() if keep(n)}
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    for key in ("hyperattn", "hyperattn_stock", "attn_implementation") if not record else ():
        del config[key]
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "llama"
    patched("llama")[0].save_pretrained(folder)
    return folder


NAMES = {
    "all of them": (12, lambda n: ".hyper." not in n),
    "one layer's": (3, lambda n: "layers.2.self_attn.hyper" not in n),
    "one": (1, lambda n: not n.endswith("layers.0.self_attn.hyper.cone.log_radius")),
}


@pytest.mark.parametrize(
    "options", [{}, dict(device_map="auto"), dict(dtype=torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("names", NAMES)
def test_a_record_without_its_tensors_is_refused(names, options, saved, tmp_path):
    count, keep = NAMES[names]
    folder = filtered(saved, tmp_path / "filtered", keep)
    for auto in (hf.AutoModelForCausalLM, hf.AutoModel, hf.AutoModelForSequenceClassification):
        with pytest.raises(ValueError, match=MISSING.format(count)) as error:
            auto.from_pretrained(folder, **options)
        assert str(error.value).count("\n") == 0 and str(folder) in str(error.value)
    with ha.fresh_patch():
        again = hf.AutoModelForCausalLM.from_pretrained(folder, **options)
    zero = [n for n, p in added(again).items() if not p.any()]
    assert len(zero) == count and len(added(again)) == 12
    with pytest.raises(ValueError, match=MISSING.format(count)):  # the context has ended
        hf.AutoModelForCausalLM.from_pretrained(folder)


def roads(model, folder, tensors):
    """Every way in which `from_pretrained` gets at weights, as a call without arguments."""
    cls = type(model)
    yield "state dict", lambda: cls.from_pretrained(None, config=model.config, state_dict=tensors)
    torch.save(tensors, folder / "pytorch_model.bin")
    yield "bin", lambda: cls.from_pretrained(folder, use_safetensors=False)
    save_file(tensors, folder / "model.fp32.safetensors", {"format": "pt"})
    yield "variant", lambda: cls.from_pretrained(folder, variant="fp32")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in halves.items():
        save_file({n: tensors[n] for n in some}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: file for file, some in halves.items() for n in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    yield "shards", lambda: cls.from_pretrained(folder)
    mapped = {name: "cpu" for name, _ in model.named_children()} | {"model": "disk"}
    yield (
        "offload",
        lambda: cls.from_pretrained(folder, device_map=mapped, offload_folder=folder / "offload"),
    )


def test_by_every_road_with_and_without(tmp_path):
    model, inputs, expected = patched("llama")
    model.config.save_pretrained(tmp_path)
    tensors = {n: t.clone() for n, t in model.state_dict().items()}
    for road, load in roads(model, tmp_path, tensors):
        assert difference(expected, run(load(), inputs)) <= 1e-6, road
    stock = {n: t for n, t in tensors.items() if ".hyper." not in n}
    for _, load in roads(model, tmp_path, stock):
        with pytest.raises(ValueError, match=MISSING.format(12)):
            load()


def test_a_merge_that_drops_unknown_names_is_refused(tmp_path):
    """As merging tools do it: names of the stock class only, averaged, and the first model's config."""
    for seed in (1, 2):
        torch.manual_seed(seed)
        patched("llama")[0].save_pretrained(tmp_path / str(seed))
    left, right = (load_file(tmp_path / n / "model.safetensors") for n in "12")
    names = [n for n in llama().state_dict() if n in left]
    merged = tmp_path / "merged"
    merged.mkdir()
    save_file(
        {n: (left[n] + right[n]) / 2 for n in names}, merged / "model.safetensors", {"format": "pt"}
    )
    shutil.copy(tmp_path / "1" / "config.json", merged)
    with pytest.raises(ValueError, match=MISSING.format(12)):
        hf.AutoModelForCausalLM.from_pretrained(merged)
    shutil.copy(tmp_path / "1" / "model.safetensors", merged)
    assert ha.describe(hf.AutoModelForCausalLM.from_pretrained(merged))["patched"] == 4


def test_tensors_without_their_record_are_refused(saved, tmp_path):
    folder = filtered(saved, tmp_path / "1", lambda n: True, record=False)
    for cls in (hf.AutoModelForCausalLM, hf.AutoModel):
        with pytest.raises(ValueError, match=STRANGE) as error:
            cls.from_pretrained(folder)
        assert str(error.value).count("\n") == 0
    with ha.fresh_patch():
        again = hf.AutoModelForCausalLM.from_pretrained(folder)
    assert ha.describe(again)["patched"] == 0


def test_tensors_of_hosts_and_mechanisms_that_the_record_does_not_name_are_refused(saved, tmp_path):
    config = json.loads((saved / "config.json").read_text())
    config["hyperattn"]["hosts"] = config["hyperattn"]["hosts"][:3]
    folder = shutil.copytree(saved, tmp_path / "1")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"holds 3 added tensors, such as 'model.layers.3.self_attn.hyper"
    ):
        hf.AutoModelForCausalLM.from_pretrained(folder)


def test_a_config_that_lost_only_its_record_is_refused(saved, tmp_path):
    folder = filtered(saved, tmp_path / "1", lambda n: ".hyper." not in n)
    config = json.loads((folder / "config.json").read_text())
    del config["hyperattn"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"hyperattn_stock.* has no record"):
        hf.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("part", ["text_model", "vision_model"])
def test_parts_of_a_composite_model(part, tmp_path):
    """A part that was not patched loads out of the whole; the one that was needs its tensors."""
    model = clip()
    ha.patch_model(getattr(model, part), CONE)
    model.save_pretrained(tmp_path / "1")
    for cls in (hf.CLIPTextModel, hf.CLIPVisionModel, hf.CLIPModel):
        cls.from_pretrained(tmp_path / "1")
    bare = filtered(tmp_path / "1", tmp_path / "2", lambda n: ".hyper." not in n)
    own = hf.CLIPTextModel if part == "text_model" else hf.CLIPVisionModel
    for cls in (own, hf.CLIPModel):
        with pytest.raises(ValueError, match="lacks .* added tensors"):
            cls.from_pretrained(bare)


def test_the_text_model_of_a_vision_language_model(tmp_path):
    model = llava()
    ha.patch_model(model.model.language_model, CONE)
    perturb(model)
    model.save_pretrained(tmp_path / "1")
    again = type(model).from_pretrained(tmp_path / "1")
    assert all(torch.equal(p, added(again)[n]) for n, p in added(model).items())
    bare = filtered(tmp_path / "1", tmp_path / "2", lambda n: ".hyper." not in n)
    with pytest.raises(ValueError, match="lacks 12 of the 12 added tensors"):
        type(model).from_pretrained(bare)


@pytest.mark.parametrize(
    "lost", ["hyper.collaborative.mixing", "query.shared.weight", "content.weight"]
)
def test_a_converted_model(lost, tmp_path):
    model, _ = make("bert")
    with quiet():
        ha.convert(model, ha.CollaborativeConfig(rank=12, steps=3))
    model.save_pretrained(tmp_path / "1")
    type(model).from_pretrained(tmp_path / "1")
    bare = filtered(tmp_path / "1", tmp_path / "2", lambda n: not n.endswith(lost))
    with pytest.raises(ValueError, match=rf"lacks \d+ of the \d+ added tensors .*{lost}"):
        type(model).from_pretrained(bare)


def test_models_from_a_config_are_fresh(saved):
    config = hf.AutoConfig.from_pretrained(saved)
    for model in (hf.AutoModelForCausalLM.from_config(config), hf.LlamaForCausalLM(config)):
        assert ha.describe(model)["patched"] == 4


def test_state_dicts_that_are_loaded_loosely_are_not_silent(caplog):
    model, _, _ = patched("llama")
    before = {n: p.clone() for n, p in added(model).items()}
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        model.load_state_dict(llama().state_dict(), strict=False)
        assert "lacks 12 added tensors" in caplog.text and "they stay as they are" in caplog.text
        assert all(torch.equal(p, before[n]) for n, p in added(model).items())
        caplog.clear()
        llama().load_state_dict(model.state_dict(), strict=False)
        assert (
            "the state dict holds 12 added tensors" in caplog.text
            and "patch it first" in caplog.text
        )
        caplog.clear()
        model.load_state_dict(model.state_dict(), strict=False)
        model.load_state_dict(
            {"model.norm.weight": torch.ones(32)}, strict=False
        )  # nothing of the patched layers
        llama().load_state_dict(llama().state_dict(), strict=False)
        assert not caplog.text


def test_models_of_others_are_left_alone(tmp_path):
    """A name of ours in a checkpoint that has nothing to do with us, in a place where no attention is."""
    model = bert()
    model.save_pretrained(tmp_path / "1")
    tensors = load_file(tmp_path / "1" / "model.safetensors") | {
        "pooler.hyper.cone.gate": torch.ones(4)
    }
    save_file(tensors, tmp_path / "1" / "model.safetensors", {"format": "pt"})
    assert (
        difference(
            run(model, text_inputs()),
            run(hf.BertModel.from_pretrained(tmp_path / "1"), text_inputs()),
        )
        == 0
    )
