"""recipes/experiments graphs: the graph of a list of packages, two steps of every kind, and the page."""

from __future__ import annotations

import json

import pytest
import torch
from experiments import draw, graphs, graphs_tables, store

#: Sections a and b, of which the packages of each depend on the one before; one package of a section too small.
LIST = (
    "\n\n".join(
        f"Package: {s}{i}\nSection: {s}\nDepends: libc6, {s}{(i + 1) % 9} (>= 1) | other, b{i}:any\n"
        f"Description: word{s} again"
        for s in "ab"
        for i in range(9)
    )
    + "\n\nPackage: c\nSection: c\nDescription: alone\n"
)
SMALL = graphs.SETTINGS | {"packages": [5, 20], "words": 8, "labelled": 2, "read": {"search": 4, "test": 6}}
SMALL |= {"width": 8, "steps": 2, "seeds": [0, 1], "search": {"seed": 9, "rates": [0.1, 0.2]}}


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    graphs.made.cache_clear()
    monkeypatch.setattr(graphs, "available", lambda: LIST)
    yield
    graphs.made.cache_clear()


def test_packages_of_a_list_become_a_graph():
    graph = graphs.graph_of(SMALL)
    assert graph.sections == ("a", "b") and graph.labels.bincount().tolist() == [9, 9]
    edges = set(map(tuple, graph.edges.T.tolist()))
    assert all((i, i) in edges for i in range(18)) and all((j, i) in edges for i, j in edges)
    # 9 in each ring, and 9 between the rings
    assert len(edges) == 18 + 2 * (9 + 9 + 9) and graph.homophily == pytest.approx(2 / 3)
    torch.testing.assert_close(graph.words.norm(dim=1), torch.ones(18))


def test_what_is_read_is_not_known_and_the_search_is_kept_apart():
    graph, read = graphs.graph_of(SMALL), set()
    for seed in range(3):
        known, others = graphs.split(graph, SMALL, seed, "test")
        assert graph.labels[known].bincount().tolist() == [2, 2] and not set(known.tolist()) & set(others.tolist())
        read |= set(others.tolist()) | set(known.tolist())
    known, others = graphs.split(graph, SMALL, 9, "search")
    assert not set(others.tolist()) & (read | set(known.tolist()))


def test_a_mean_of_neighbours_is_one():
    torch.manual_seed(0)
    layer, graph = graphs.Layer("mean of neighbours", 8, 6, 2), graphs.graph_of(SMALL)
    value = layer.projections(graph.words).unflatten(-1, (3, 2, 3))[:, 2]
    source, target = graph.edges
    expected = torch.stack([value[source[target == i]].mean(0) for i in range(18)])
    torch.testing.assert_close(layer(graph.words, graph.edges), expected)


def test_two_steps_of_every_kind(tmp_path):
    experiment = store.Experiment("graphs", SMALL, graphs.runs)
    assert store.perform(experiment, tmp_path)
    runs = store.load("graphs", tmp_path)["runs"]
    assert runs["graph"]["nodes"] == 18 and 0 <= runs["hyperbolic distance, seed 1"]["accuracy"] <= 1
    page = tmp_path / "page.md"
    page.write_text(graphs_tables.PAGE.read_text())
    graphs_tables.draw(tmp_path, page)
    assert "not done yet" not in page.read_text() and "| umbral cone, psi |" in page.read_text()


def test_committed_results_are_of_these_settings_and_on_the_page():
    page = graphs_tables.PAGE.read_text()
    if not (store.FOLDER / "graphs.json").exists():
        assert page.count("The runs are not done yet.") == len(graphs_tables.TABLES)
        return
    results = store.load("graphs")
    assert results["settings"] == json.loads(json.dumps(graphs.SETTINGS))
    assert set(results["runs"]) == {key for key, _ in graphs.runs(graphs.SETTINGS, {})}
    for mark, make in graphs_tables.TABLES.items():
        assert draw.put(page, mark, make(results)) == page, mark
