"""A save into a folder with any README.md: the weights are saved, the file is not lost, one warning says why."""

import json
import os
import random
import time
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

import hf_hyperattn as ha
import hub_cards
from tests.integration.models import llama

LEFT = "was left as it is"
VALUES = (None, True, 5, 1.5, "x", "2026-01-01", [], [2024], [None], [[1]], {}, {"a": 5}, {5: [6]})
KEYS = (
    "tags",
    "license",
    "language",
    "library_name",
    "base_model",
    "base_model_relation",
    "datasets",
    "metrics",
    "model-index",
    "model_name",
    "pipeline_tag",
    "eval_results",
    "ignore_metadata_errors",
    "self",
    "of_my_own",
    5,
)


@pytest.fixture(scope="module")
def model():
    return ha.patch_model(llama(), ha.ConeConfig())


@pytest.fixture(scope="module")
def adapter():
    return get_peft_model(
        ha.patch_model(llama(), ha.ConeConfig()), LoraConfig(r=2, target_modules=["q_proj"])
    )


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> Path:
    """A folder that this model was saved into."""
    folder = tmp_path_factory.mktemp("made")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(saved) -> str:
    """The card that a save of this model writes."""
    return (saved / "README.md").read_text()


def placeholder() -> str:
    """The card that PEFT and Transformers write for every model."""
    return str(ModelCard.from_template(ModelCardData(library_name="transformers")))


def with_header(card: str, lines: str) -> str:
    """The card with other lines in front of those of its header."""
    return card.replace("---\n", f"---\n{lines}\n", 1)


def check_saved(model, folder: Path) -> None:
    """The folder holds the model's weights and config."""
    saved = load_file(folder / "model.safetensors")
    state = model.state_dict()
    assert all(torch.equal(saved[name], state[name]) for name in saved)
    assert json.loads((folder / "config.json").read_text())["hyperattn"]["mechanisms"]


def header(name: str) -> str:
    """A YAML header that nobody would write."""
    return {
        "broken": "tags: [unclosed",
        "two-documents": "a: 1\n---\nb: 2\n--- x",
        "list": "- 1\n- 2",
        "flow": "x: " + "[" * 5000 + "]" * 5000,
        "maps": "x: " + "{a: " * 5000 + "1" + "}" * 5000,
        "block": "- " * 5000 + "1",
        "keys": "? " * 5000 + "1",
        "long": "x: " + "[], " * 20_000,
        "aliases": "a: &a [1]\nb: [*a, *a]",
        "numbers-as-keys": "5: 6",
        "object": "x: !!python/object/apply:os.system [true]",
        "date": "date: 9999-99-99",
    }[name]


HEADERS = (
    "broken",
    "list",
    "flow",
    "maps",
    "block",
    "keys",
    "long",
    "aliases",
    "numbers-as-keys",
    "object",
    "date",
)


@pytest.mark.parametrize("start", ["own", "ours", "placeholder"])
@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_cannot_be_read(name, start, model, made, tmp_path, caplog):
    card = {"own": "---\n---\nmine\n", "ours": made, "placeholder": placeholder()}[start]
    content = with_header(card, header(name)).encode()
    (tmp_path / "README.md").write_bytes(content)
    before = time.process_time()
    model.save_pretrained(tmp_path)
    assert time.process_time() - before < 5
    check_saved(model, tmp_path)
    assert (tmp_path / "README.md").read_bytes() == content
    assert caplog.text.count(LEFT) == 1


@pytest.mark.parametrize(
    ("content", "warnings"),
    [
        (b"\xff\xfe broken", 1),
        (b"---\n\xff: 1\n---\n", 1),
        (bytes(range(256)) * 10, 1),
        (b"---\na: 1\n---\n\0", 1),
        (b"---\nlicense: mit\n---\n" + b"x" * 10_000_000, 1),
        (b"\n" * 190_000, 0),
        (b"---" + b"\n" * 190_000, 0),
        (
            b"---\n---\na: [" + b"x," * 60_000 + b"]\n---\nhello\n",
            1,
        ),  # the first two lines are no header
        (b"---\nlicense: mit\n---\n# Mine\n", 0),
        (b"# Mine\n", 0),
        (b"", 0),
    ],
    ids=[
        "utf-16",
        "latin-1",
        "binary",
        "zero",
        "huge",
        "newlines",
        "dashes",
        "two dashes",
        "own",
        "plain",
        "empty",
    ],
)
def test_a_file_of_any_content(content, warnings, model, tmp_path, caplog):
    (tmp_path / "README.md").write_bytes(content)
    before = time.process_time()
    model.save_pretrained(tmp_path)
    assert time.process_time() - before < 5
    check_saved(model, tmp_path)
    assert (tmp_path / "README.md").read_bytes() == content
    assert caplog.text.count(LEFT) == warnings


def test_a_folder_of_this_name(model, tmp_path, caplog):
    (tmp_path / "README.md").mkdir()
    (tmp_path / "README.md" / "mine").write_text("mine")
    model.save_pretrained(tmp_path)
    check_saved(model, tmp_path)
    assert (tmp_path / "README.md" / "mine").read_text() == "mine"
    assert caplog.text.count(LEFT) == 1


@pytest.mark.parametrize("target", ["absent", "mine.md", "README.md", "folder", "/dev/zero"])
def test_a_link_of_this_name(target, model, tmp_path, caplog):
    (tmp_path / "mine.md").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "README.md").symlink_to(target)
    model.save_pretrained(tmp_path)
    check_saved(model, tmp_path)
    assert (
        os.readlink(tmp_path / "README.md") == target
        and (tmp_path / "mine.md").read_text() == "mine"
    )
    assert caplog.text.count(LEFT) == (target != "mine.md")


def test_a_link_to_a_card_of_ours_leaves_its_target(model, made, tmp_path):
    (tmp_path / "elsewhere.md").write_text(made)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").symlink_to("../elsewhere.md")
    model.save_pretrained(tmp_path / "out")
    check_saved(model, tmp_path / "out")
    assert (tmp_path / "elsewhere.md").read_text() == made


def test_a_file_that_may_not_be_read(model, made, tmp_path, caplog, monkeypatch):
    (tmp_path / "README.md").write_text(made)
    read = Path.read_bytes

    def refuse(path):
        if path.name == "README.md":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    model.save_pretrained(tmp_path)
    check_saved(model, tmp_path)
    assert (tmp_path / "README.md").read_text() == made
    assert caplog.text.count(LEFT) == 1 and "Permission denied" in caplog.text


@pytest.mark.parametrize("start", ["ours", "placeholder"])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_other_types_at_every_key(key, start, saved, made):
    """What a save calls when the weights are written; with tags: [2024] it raised."""
    card = made if start == "ours" else placeholder()
    _, old, body = card.split("---\n", 2)
    for value in VALUES:
        entries = {**(yaml.safe_load(old) or {}), key: value}
        content = f"---\n{yaml.safe_dump(entries)}---\n{body}".encode()
        (saved / "README.md").write_bytes(content)
        hub_cards.write_card(saved)
        after = (saved / "README.md").read_bytes()
        if after != content:  # taken for a program's, and written anew
            again = ModelCard.load(saved / "README.md").data.to_dict()
            carried = start == "placeholder" and key not in ("base_model", "library_name", "tags")
            assert not carried or value in (None, [], {}) or key in again


@pytest.mark.parametrize(
    "line", ["tags: [2024]", "tags: 5", "license: [1]", "base_model: {a: 1}", "5: 6"]
)
def test_a_save_over_other_types(line, model, made, tmp_path):
    for card in (made, placeholder()):
        (tmp_path / "README.md").write_text(with_header(card, line))
        model.save_pretrained(tmp_path)
        check_saved(model, tmp_path)


@pytest.mark.parametrize(
    "name", ["tags: [2024]", "tags: 5", "base_model: [1]", "license: {a: 1}", "flow"]
)
def test_a_save_of_an_adapter(name, adapter, tmp_path):
    content = with_header(placeholder(), header(name) if name == "flow" else name)
    (tmp_path / "README.md").write_text(content)
    adapter.save_pretrained(tmp_path)
    assert load_file(tmp_path / "adapter_model.safetensors")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2
    assert PeftModel.from_pretrained(ha.patch_model(llama(), ha.ConeConfig()), tmp_path)


def test_damaged_cards(model, made, tmp_path):
    """Cards of ours and placeholders, with bytes changed, cut out, doubled or put in."""
    random.seed(20261127)
    pieces = [
        b"---\n",
        b"[",
        b"{",
        b"- ",
        b"\0",
        b"\xff",
        b": ",
        b"&a ",
        b"*a",
        b"!!x ",
        b"|\n",
        b"\n",
        b"\r\n",
        b"tags: 5\n",
    ]
    for turn in range(24):
        content = bytearray((made if turn % 2 else placeholder()).encode())
        for _ in range(random.randint(1, 4)):
            at = random.randrange(min(len(content), 600) if random.random() < 0.8 else len(content))
            piece = random.choice(pieces) * random.choice((1, 1, 2, 3000))
            content[at : at + random.choice((0, 1, 40))] = piece
        (tmp_path / "README.md").write_bytes(content)
        model.save_pretrained(tmp_path)
        check_saved(model, tmp_path)
        now = (tmp_path / "README.md").read_bytes()
        assert now == content or hub_cards.beside.is_ours_untouched(
            ModelCard.load(tmp_path / "README.md")
        )


def test_a_config_of_ones_own_and_a_push(model, tmp_path, caplog):
    """What `try_to_write_card` cannot do is a warning."""
    (tmp_path / "README.md").mkdir()
    assert hub_cards.try_to_write_card(tmp_path, config={"mechanisms": 5}) is None
    assert caplog.text.count(LEFT) == 1
    assert hub_cards.try_to_write_card(tmp_path / "absent", config=5) is None
    assert caplog.text.count("no card is written into") == 1
