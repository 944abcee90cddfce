"""recipes/experiments hypernyms: questions, two steps of every kind, and the page."""

from __future__ import annotations

import json

import pytest
import torch
from experiments import draw, hypernyms, hypernyms_tables, store


def some_tree(*_) -> hypernyms.Tree:
    """All nodes of four levels, two children each; the first numbers of a word are its path."""
    paths, words, number = [], [], {}
    for leaf in range(16):
        path = []
        for level in range(1, 5):
            name = f"{leaf:04b}"[:level]
            if name not in number:
                number[name] = len(number)
                words.append([2.0 * int(c) - 1 for c in name] + [0.0] * (4 - level))
            path.append(number[name])
        paths.append(path)
    return hypernyms.Tree(torch.tensor(words), torch.tensor(paths))


def test_one_word_of_those_in_the_race_is_above():
    tree, levels = some_tree(), set()
    for seed in range(20):
        leaves = torch.randperm(16, generator=torch.Generator().manual_seed(seed))[:8]
        nouns, offered, race = hypernyms.questions(
            tree, leaves, torch.Generator().manual_seed(seed)
        )
        for i, leaf in enumerate(leaves.tolist()):
            path = tree.paths[leaf].tolist()
            assert nouns[i] == path[-1] and offered[i] in path[:-1]
            above = [j for j in range(8) if offered[j] in path]
            assert [j for j in above if race[i, j]] == [i]
            assert all(race[i, j] for j in range(8) if j not in above)
            levels.add(path.index(offered[i].item()))
    assert levels == {0, 1, 2}


def test_what_is_read_is_never_trained_on():
    settings = hypernyms.SETTINGS | {"nouns": 50, "read": {"search": 10, "test": 8}}
    searched = set(hypernyms.split(settings, 100, "search")[1].tolist())
    for seed in range(3):
        known, read = (set(x.tolist()) for x in hypernyms.split(settings, seed, "test"))
        assert len(searched) == 10 and len(read) == 8 and len(known) == 32
        assert not known & read and not searched & (known | read)


@pytest.mark.parametrize("kind", hypernyms.KINDS)
def test_scores_by_loops(kind):
    torch.manual_seed(0)
    model, words = hypernyms.Score(kind, 4, 6), some_tree().words
    found, q, k = model(words[:3], words[:5]), model.query(words[:3]), model.key(words[:5])
    cosine = lambda a, b: (a @ b / (a.norm() * b.norm())).item()
    expected = {
        "no adapter": cosine,
        "dot product": lambda a, b: (a @ b).item() / 6**0.5,
        "normalised dot product": lambda a, b: (
            torch.tensor(5.0 * 5 - 5).log2().item() * cosine(a, b)
        ),
        "Euclidean distance": lambda a, b: -(a - b).norm().item(),
    }
    assert found.shape == (3, 5)
    if kind in expected:
        values = torch.tensor([[expected[kind](a, b) for b in k] for a in q])
        torch.testing.assert_close(found, values, atol=1e-5, rtol=1e-4)


def test_two_steps_of_every_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(hypernyms, "tree_of", some_tree)
    small = {
        "nouns": 16,
        "read": {"search": 5, "test": 5},
        "questions": 10,
        "width": 6,
        "batch": 4,
        "steps": 2,
    }
    small |= {"seeds": [0, 1], "search": {"seed": 9, "rates": [0.1, 0.2]}}
    experiment = store.Experiment("hypernyms", hypernyms.SETTINGS | small, hypernyms.runs)
    assert store.perform(experiment, tmp_path)
    runs = store.load("hypernyms", tmp_path)["runs"]
    assert runs["no adapter, seed 0"]["parameters"] == 0 < runs["dot product, seed 0"]["parameters"]
    page = tmp_path / "page.md"
    page.write_text(hypernyms_tables.PAGE.read_text())
    hypernyms_tables.draw(tmp_path, page)
    assert (
        page.read_text().count("| penumbral cone, psi |") == 6
    )  # two tables for each of three sources


def test_committed_results_are_of_these_settings_and_on_the_page():
    results, page = store.load("hypernyms"), hypernyms_tables.PAGE.read_text()
    assert results["settings"] == json.loads(json.dumps(hypernyms.SETTINGS))
    assert set(results["runs"]) == {key for key, _ in hypernyms.runs(hypernyms.SETTINGS, {})}
    for mark, make in hypernyms_tables.TABLES.items():
        assert draw.put(page, mark, make(results)) == page, mark
