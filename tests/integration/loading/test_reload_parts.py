"""Checkpoints that come back as another class, in part, or under another attention implementation."""

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.integration.attention.hyper import patched_hosts
from tests.integration.models import (
    FAMILIES,
    State,
    difference,
    llama,
    llava,
    perturb,
    run,
    tensors,
    text_inputs,
)
from tests.integration.patches import CONE, patched
from tests.zoo.tiny import tiny


def test_one_part_of_a_composite_with_eager_beneath(tmp_path):
    model, inputs, expected = patched("llava")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation={"text_config": "eager"})
    text, vision = again.config.text_config, again.config.vision_config
    assert (text.hyperattn_stock, vision.hyperattn_stock) == ("eager", "sdpa")
    assert text._attn_implementation == vision._attn_implementation == "hf_hyperattn"
    assert difference(expected, run(again, inputs)) <= 1e-5


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
        assert {host.config._attn_implementation for _, host in patched_hosts(again)} == {
            "hf_hyperattn"
        }
        assert difference(expected, tensors(again(**inputs))) <= 1e-6
    for one in (model, again):
        ha.unpatch_model(one)
        assert [type(m).__name__ for m in one.modules()] == [
            type(m).__name__ for m in plain.modules()
        ]
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
    with pytest.raises(
        ValueError, match="patched already; call unpatch_model.* or patch all in one call"
    ):
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
