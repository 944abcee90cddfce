"""The experiment with HAT on long reviews: data, models; and that the page says what the results say."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
import transformers as hf
from experiments import hat_imdb, hat_tables, store
from experiments.draw import put

SETTINGS = hat_imdb.SETTINGS


@pytest.fixture
def rows(monkeypatch):
    """Reviews of 20 to 59 tokens, each id once."""
    made = [([101, *range(1000 * i, 1000 * i + 18 + i % 40), 102], i % 2) for i in range(500)]
    monkeypatch.setattr(hat_imdb, "encoded", lambda least, most: made)
    return made


def test_reviews_of_a_seed_are_balanced_and_its_own(rows):
    seen = []
    for seed in range(2):
        train, test = hat_imdb.long_reviews(SETTINGS, seed)
        long = SETTINGS["long"]
        assert (len(train), len(test)) == (long["train"], long["test"])
        for part in (train, test):
            assert sum(label for _, label in part) * 2 == len(part)
        seen += [ids[1] for ids, _ in train + test]
        assert hat_imdb.long_reviews(SETTINGS, seed) == (train, test)
    assert len(set(seen)) == len(seen)


def test_batches_hold_each_review_once_and_are_of_about_one_length(rows):
    found = hat_imdb.batches(rows, 8)
    assert sorted(ids[1] for batch in found for ids, _ in batch) == sorted(
        ids[1] for ids, _ in rows
    )
    assert all(
        max(len(i) for i, _ in batch) - min(len(i) for i, _ in batch) <= 1 for batch in found
    )


def test_what_is_cut_off_keeps_its_end():
    given = hat_imdb.inputs([([101, 5, 6, 7, 8, 102], 1), ([101, 9, 102], 0)], 4)
    assert given["input_ids"].tolist() == [[101, 5, 6, 102], [101, 9, 102, 0]]
    assert given["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert given["labels"].tolist() == [1, 0]


def classifier():
    config = hf.BertConfig(
        vocab_size=200,
        hidden_size=16,
        num_hidden_layers=6,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(config).eval()


def test_a_longer_table_of_positions_changes_no_short_text():
    model, ids = classifier(), torch.randint(200, (1, 128))
    expected = model(ids).logits
    long = hat_imdb.with_positions(model, 300)
    assert torch.equal(long(ids).logits, expected)
    table = long.bert.embeddings.position_embeddings.weight
    assert table.shape == (300, 16) and torch.equal(table[256:], table[:44])
    assert long(torch.randint(200, (1, 300))).logits.shape == (1, 2)


@pytest.mark.parametrize("name", SETTINGS["models"])
def test_runs(name, monkeypatch):
    made = [([101, *range(i % 90, i % 90 + 60 + i % 4), 102], i % 2) for i in range(24)]
    monkeypatch.setattr(hat_imdb, "long_reviews", lambda *_: (made[:8], made[8:]))
    monkeypatch.setattr(hat_imdb, "short_classifier", lambda *_: classifier())
    found = hat_imdb.train(SETTINGS, name, 0)
    assert len(found["right"]) == 16 and found["accuracy"] == round(
        found["right"].count("1") / 16, 4
    )
    again = hat_imdb.train(SETTINGS, name, 0)
    assert {k: again[k] for k in ("accuracy", "loss", "right")} == {
        k: found[k] for k in ("accuracy", "loss", "right")
    }
    kind = type(hat_imdb.made_long(SETTINGS, name, classifier())).__name__
    assert kind.startswith("Hat" if "hat" in SETTINGS["models"][name] else "Bert")


def test_the_committed_results_are_of_these_settings():
    experiment = importlib.import_module("experiments.hat_imdb").EXPERIMENT
    results = store.load("hat_imdb")
    assert results["settings"] == json.loads(json.dumps(experiment.settings))
    assert set(results["runs"]) <= {key for key, _ in experiment.runs(experiment.settings, {})}


def test_the_page_says_what_the_results_say():
    text = hat_tables.PAGE.read_text()
    for name, (results, make) in hat_tables.TABLES.items():
        assert put(text, name, make(store.load(results))) == text, name
    if hat_tables.SPEED.exists():
        assert (
            put(text, "hat-speed", hat_tables.speed(json.loads(hat_tables.SPEED.read_text())))
            == text
        )
