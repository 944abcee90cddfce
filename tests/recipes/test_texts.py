"""Text for recipes: nothing held out is trained on, and every token is where the text has it."""

from __future__ import annotations

import json

import pytest
from finetuning.groups import Data
from finetuning.texts import documents, prepare
from transformers import AutoTokenizer

from .tiny import ROOT, save_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_model(tmp_path_factory.mktemp("model")))


def of_file(path, **options) -> Data:
    return Data(source="file", name=str(path), **options)


def test_a_file_is_cut_at_a_line_and_nothing_is_lost(tokenizer):
    path = ROOT / "LICENSE"
    train, held_out = documents(of_file(path), 10**6)
    (first,), (last,) = train["text"], held_out["text"]
    whole = path.read_text(encoding="utf-8")
    assert (first + last).rstrip("\n") == whole.rstrip("\n") and first.endswith("\n")
    assert 0.05 * len(whole) < len(last) < 0.15 * len(whole)
    text = prepare(of_file(path, length=16, held_out_tokens=64), tokenizer, 160, seed=0)
    assert text.rows.num_rows == 10 and text.rows["labels"][:] == text.rows["input_ids"][:]
    assert tokenizer.decode(sum(text.rows["input_ids"][:], [])) == whole[:160]
    assert tokenizer.decode(text.held_out) == last[:64]
    assert text.facts["train"]["tokens"] == 160 and text.facts["held_out"]["tokens"] == 64


def test_python_has_a_text_and_a_tenth_of_its_modules_are_held_out(tokenizer):
    train, held_out = documents(Data(), 10**6)
    assert not set(train["name"]) & set(held_out["name"])
    assert 0.03 < len(held_out) / (len(train) + len(held_out)) < 0.2
    assert "argparse" in {*train["name"], *held_out["name"]}
    again = prepare(Data(length=32), tokenizer, 320, seed=1)
    assert again.facts == prepare(Data(length=32), tokenizer, 320, seed=1).facts
    assert again.facts["train"] != prepare(Data(length=32), tokenizer, 320, seed=2).facts["train"]


@pytest.mark.parametrize("split", [None, "validation"])
def test_a_data_set_in_a_folder_is_read_like_one_on_the_hub(tokenizer, tmp_path, split):
    for name, count in (("train", 40), ("validation", 5)):
        rows = (json.dumps({"words": f"{name} {i} " * 9}) for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    data = Data(source="hub", name=str(tmp_path), column="words", held_out_split=split, length=16)
    train, held_out = documents(data, 10**6)
    if split:
        assert (len(train), len(held_out)) == (40, 5) and held_out["text"][0].startswith(
            "validation 0"
        )
    else:
        assert (len(train), len(held_out)) == (36, 4) and held_out["text"][0].startswith("train 9")
    few, _ = documents(data, 500)
    assert len(few) < 36
    with pytest.raises(ValueError, match=r"^data.column='text' is not in .*; allowed: words$"):
        documents(Data(source="hub", name=str(tmp_path), length=16), 100)


def test_documents_end_with_eos(tokenizer, tmp_path):
    rows = (json.dumps({"text": "ab" * 20}) for _ in range(20))
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    text = prepare(Data(source="hub", name=str(tmp_path), length=41), tokenizer, 82, seed=0)
    assert [row[-1] for row in text.rows["input_ids"]] == [tokenizer.eos_token_id] * 2


@pytest.mark.parametrize(
    "content, message",
    [
        (b"\xff\xfe\x00", r"allowed: a text file in UTF-8$"),
        (b"short", r"allowed: at least 512 and 32$"),
    ],
)
def test_texts_that_cannot_be_used(content, message, tokenizer, tmp_path):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ValueError, match=r"^data.name='.*/text': .*" + message) as caught:
        prepare(of_file(tmp_path / "text"), tokenizer, 1000, seed=0)
    assert "\n" not in str(caught.value)
