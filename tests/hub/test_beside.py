"""Writing cards beside weights: whose README.md is replaced, whose is kept, and what survives a crash."""

import json
import os

import pytest
from huggingface_hub import ModelCard, ModelCardData

import hub_cards
from hub_cards import beside

from .samples import ADAPTER, SPEC

STUB_NOTE = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
    "automatically generated."
)


def saved_model(directory):
    """A directory as ``save_pretrained`` leaves it, with a safetensors header that counts."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hyperattn": SPEC}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {
        "__metadata__": {"format": "pt"},
        "model.layers.3.self_attn.hyper.cone.gate": {
            "dtype": "F32",
            "shape": [9],
            "data_offsets": [0, 36],
        },
        "model.layers.3.self_attn.q_proj.weight": {
            "dtype": "F32",
            "shape": [2, 3],
            "data_offsets": [36, 60],
        },
    }
    header = json.dumps(tensors).encode()
    (directory / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(60)
    )
    return directory


def stub(**header) -> ModelCard:
    """Transformers' placeholder, with header entries that somebody added on the Hub."""
    card = ModelCard.from_template(
        ModelCardData(library_name="transformers"), model_description=STUB_NOTE
    )
    for key, value in header.items():
        card.data[key] = value
    return card


def test_the_card_of_a_directory_is_made_of_its_files(tmp_path):
    path = hub_cards.write_card(saved_model(tmp_path))
    card = ModelCard.load(path)
    assert card.data.pipeline_tag == "text-generation"
    assert "AutoModelForCausalLM.from_pretrained" in card.text
    assert "| Parameters added | 9 of 15 in the files |" in card.text


def test_our_own_card_is_replaced_until_a_person_edits_it(tmp_path):
    path = hub_cards.write_card(saved_model(tmp_path))
    assert hub_cards.write_card(tmp_path, license="mit") == path
    assert ModelCard.load(path).data.license == "mit"
    path.write_text(path.read_text().replace("## Measured", "## Measured by me"))
    edited = path.read_bytes()
    assert hub_cards.write_card(tmp_path) is None and path.read_bytes() == edited


def test_an_edited_header_counts_as_an_edit_but_tags_do_not(tmp_path):
    path = hub_cards.write_card(saved_model(tmp_path))
    card = ModelCard.load(path)
    card.data.tags.append("mine")
    card.save(path)
    assert hub_cards.write_card(tmp_path) == path and "mine" in ModelCard.load(path).data.tags
    card.data.license = "gemma"
    card.save(path)
    assert hub_cards.write_card(tmp_path) is None and ModelCard.load(path).data.license == "gemma"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"# Mine\n",
        b"---\nlicense: mit\n---\nshort\n",
        b"---\n- not\n- a mapping\n---\n",
        b"\xff\xfe broken",
        b"---\n{unclosed\n---\n",
        b"\r\nwindows\r\n",
    ],
)
def test_any_other_readme_is_kept_byte_for_byte(content, tmp_path):
    (saved_model(tmp_path) / "README.md").write_bytes(content)
    assert hub_cards.write_card(tmp_path) is None
    assert (tmp_path / "README.md").read_bytes() == content


def test_a_placeholder_is_replaced_and_its_header_kept(tmp_path):
    card = stub(license="mit", tags=["mine"], base_model="org/base", language="de")
    card.save(saved_model(tmp_path) / "README.md")
    written = ModelCard.load(hub_cards.write_card(tmp_path))
    assert (written.data.license, written.data.base_model, written.data.language) == (
        "mit",
        "org/base",
        "de",
    )
    assert "mine" in written.data.tags and "`org/base`" in written.text
    assert hub_cards.write_card(tmp_path) is not None


def test_a_placeholder_with_one_word_changed_is_a_persons(tmp_path):
    card = stub()
    card.text = card.text.replace("## Uses", "## My uses")
    card.save(saved_model(tmp_path) / "README.md")
    assert hub_cards.write_card(tmp_path) is None


def test_an_adapter_and_a_config_have_cards_of_their_own(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    card = hub_cards.card_for_directory(tmp_path, config=SPEC)
    assert (card.data.library_name, card.data.base_model) == ("peft", "org/base")
    assert "| `target_modules` | `q_proj, v_proj` |" in card.text
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "hyperattn_config.json").write_text(json.dumps(SPEC))
    assert "HyperAttnConfig.from_pretrained" in hub_cards.card_for_directory(tmp_path).text


def test_a_path_is_never_published_as_a_base_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "local").mkdir(parents=True)
    names = [
        None,
        "",
        "out",
        "/home/me/model",
        "C:\\models\\x",
        "org/local",
        "runs/checkpoint-500",
        "../x/y",
        3,
    ]
    assert [hub_cards.hub_id_or_none(name) for name in names] == [None] * len(names)
    assert hub_cards.hub_id_or_none("org/base") == "org/base"


def test_an_interrupted_write_leaves_the_old_card(tmp_path, monkeypatch):
    path = hub_cards.write_card(saved_model(tmp_path))
    before = path.read_bytes()

    def crash(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(beside.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        hub_cards.write_card(tmp_path, license="mit")
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["README.md", "config.json", "model.safetensors"]


def test_own_card_kept_restores_a_persons_readme_even_after_an_error(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# Mine\n")
    with pytest.raises(RuntimeError), hub_cards.own_card_kept(tmp_path):
        path.write_text(str(stub()))
        raise RuntimeError("the push failed")
    assert path.read_text() == "# Mine\n"
    path.unlink()
    with hub_cards.own_card_kept(tmp_path):
        path.write_text("new")
    assert path.read_text() == "new"
