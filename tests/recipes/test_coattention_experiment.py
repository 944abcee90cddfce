"""recipes/experiments coattention: questions, attention against its definition, two steps of every kind, the page."""

from __future__ import annotations

import json

import pytest
import torch
from experiments import coattention, coattention_tables, draw, store
from experiments.coattention import Words
from experiments.wordnet import read_glosses, read_parents

from hf_hyperattn.functional import trilinear_attention

from .nouns import write_nouns


def some_nouns(*_) -> coattention.Nouns:
    """Six kinds with three nouns each; the first number of a word is the kind, the second the noun."""

    def words(*shape: int) -> Words:
        states = torch.randn(*shape, 5, generator=torch.Generator().manual_seed(len(shape)))
        states[..., 0] = torch.arange(6).view(-1, *[1] * (len(shape) - 1))
        if len(shape) == 3:
            states[..., 1] = torch.arange(3)[:, None]
        mask = torch.ones(shape, dtype=torch.bool)
        mask[..., -1] = False
        return Words(states * mask[..., None], mask)

    return coattention.Nouns(words(6, 3), words(6, 3, 3), words(6, 3, 4))


def test_glosses_are_those_of_the_same_nouns(tmp_path):
    write_nouns(tmp_path / "data.noun")
    glosses = read_glosses(tmp_path / "data.noun")
    assert glosses.keys() == read_parents(tmp_path / "data.noun").keys()
    assert set(glosses.values()) == {"a gloss with @ 00000000 in it"}


def test_only_one_answer_is_of_the_kind_and_described():
    nouns, draw_ = some_nouns(), torch.Generator().manual_seed(0)
    question, context, answers, right = coattention.questions(
        nouns, torch.tensor([0, 2, 3, 5]), 50, draw_
    )
    places = set()
    for row in range(50):
        asked = question.states[row, 0, 0].item()
        described = {tuple(context.states[row, place, :2].tolist()) for place in (0, 4)}
        offered = [tuple(answers.states[row, i, 0, :2].tolist()) for i in range(4)]
        assert len(set(offered)) == 4 and sorted(kind == asked for kind, _ in offered) == [
            False,
            False,
            True,
            True,
        ]
        assert len({kind for kind, _ in offered}) == 2 and described < set(offered)
        fits = [i for i, answer in enumerate(offered) if answer in described and answer[0] == asked]
        assert fits == [right[row].item()]
        places.add((fits[0], context.states[row, 0, 0].item() == asked))
        assert asked in (0, 2, 3, 5)
    assert len(places) == 8  # every place of the answer, described first and last


def inputs(seed: int = 0):
    draw_ = torch.Generator().manual_seed(seed)
    parts = [torch.randn(2, 3, n, 4, generator=draw_) for n in (2, 5, 5, 4, 4)]
    words, words2 = torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool)
    words[1, 3:], words2[0, 2:] = False, False
    return *parts, words, words2


@pytest.mark.parametrize("kind", coattention.SETTINGS["kinds"])
def test_attention_by_loops(kind):
    query, key, value, key2, value2, words, words2 = inputs()
    found = coattention.attend(kind, query, key, value, key2, value2, words, words2)
    for b, h, i in ((0, 0, 0), (1, 2, 1), (0, 1, 1)):
        q = query[b, h, i] / 2  # 1/sqrt(4)
        js, ks = words[b].nonzero()[:, 0].tolist(), words2[b].nonzero()[:, 0].tolist()
        joint = {}
        for j in js:
            for k in ks:
                if kind == "pairwise":
                    joint[j, k] = q @ key[b, h, j] + q @ key2[b, h, k]
                elif kind == "means":
                    joint[j, k] = torch.tensor(0.0)
                else:
                    joint[j, k] = (q * key[b, h, j] * key2[b, h, k]).sum()
        if kind == "pairwise, chained":
            of = {
                j: torch.stack([key[b, h, j] @ key2[b, h, k] / 2 for k in ks]).softmax(0)
                for j in js
            }
            first = torch.stack([q @ key[b, h, j] for j in js]).softmax(0)
            weights = [first[x] * of[j][y] for x, j in enumerate(js) for y in range(len(ks))]
        else:
            weights = torch.stack([joint[j, k] for j in js for k in ks]).softmax(0)
        pairs = [value[b, h, j] * value2[b, h, k] for j in js for k in ks]
        torch.testing.assert_close(found[b, h, i], sum(w * p for w, p in zip(weights, pairs)))


def test_three_way_is_the_packages_own():
    """Where context and question are the same words, which is what `trilinear_attention` takes."""
    query, key, value, *_ = inputs()
    _, key2, value2, *_ = inputs(1)
    shown = torch.ones(2, 5, dtype=torch.bool)
    expected = trilinear_attention(query, key, value, key2, value2)
    torch.testing.assert_close(
        coattention.attend("three-way", query, key, value, key2, value2, shown, shown), expected
    )


def test_what_is_left_out_changes_nothing():
    torch.manual_seed(0)
    nouns, kinds = some_nouns(), torch.arange(6)
    question, context, answers, _ = coattention.questions(
        nouns, kinds, 8, torch.Generator().manual_seed(1)
    )
    other = lambda words: Words(torch.randn_like(words.states), words.mask)
    for kind in coattention.SETTINGS["kinds"]:
        model = coattention.Coattention(kind, 5, 8, 2)
        plain = model(question, context, answers)
        assert torch.equal(model(other(question), context, answers), plain) == (
            kind == "without question"
        )
        assert torch.equal(model(question, other(context), answers), plain) == (
            kind == "without context"
        )
        hidden = Words(context.states + (~context.mask)[..., None], context.mask)
        torch.testing.assert_close(model(question, hidden, answers), plain)


def test_what_is_read_is_never_trained_on():
    settings = coattention.SETTINGS | {"hypernyms": 50, "read": {"search": 10, "test": 8}}
    searched = set(coattention.split(settings, 100, "search")[1].tolist())
    for seed in range(3):
        known, read = (set(x.tolist()) for x in coattention.split(settings, seed, "test"))
        assert len(searched) == 10 and len(read) == 8 and len(known) == 32
        assert not known & read and not searched & (known | read)
    assert not searched & set(coattention.split(settings, 100, "search")[0].tolist())


def test_two_steps_of_every_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(coattention, "nouns_of", some_nouns)
    small = {
        "hypernyms": 6,
        "read": {"search": 2, "test": 2},
        "questions": 100,
        "width": 8,
        "heads": 2,
        "steps": 2,
    }
    small |= {"batch": 2, "seeds": [0, 1], "search": {"seed": 9, "rates": [0.1, 0.2]}}
    experiment = store.Experiment("coattention", coattention.SETTINGS | small, coattention.runs)
    assert store.perform(experiment, tmp_path)
    runs = store.load("coattention", tmp_path)["runs"]
    assert (
        len({runs[f"{kind}, seed 0"]["parameters"] for kind in coattention.SETTINGS["kinds"]}) == 1
    )
    page = tmp_path / "page.md"
    page.write_text(coattention_tables.PAGE.read_text())
    coattention_tables.draw(tmp_path, page)
    assert "| pairwise, chained |" in page.read_text()


def test_committed_results_are_of_these_settings_and_on_the_page():
    page = coattention_tables.PAGE.read_text()
    if not (store.FOLDER / "coattention.json").exists():
        assert page.count("The runs are not done yet.") == len(coattention_tables.TABLES)
        return
    results = store.load("coattention")
    assert results["settings"] == json.loads(json.dumps(coattention.SETTINGS))
    for mark, make in coattention_tables.TABLES.items():
        assert draw.put(page, mark, make(results)) == page, mark
