"""recipes/experiments graphs and graph_trees: the graph of a list of packages, two steps of every kind, the page."""

from __future__ import annotations

import json

import pytest
import torch
from experiments import draw, graph_trees, graph_trees_tables, graphs, graphs_tables, store

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
SMALL = graphs.SETTINGS | {
    "packages": [5, 20],
    "words": 8,
    "labelled": 2,
    "read": {"search": 4, "test": 6},
}
SMALL |= {"width": 8, "steps": 2, "seeds": [0, 1], "search": {"seed": 9, "rates": [0.1, 0.2]}}
SMALL_TREES = graph_trees.SETTINGS | {
    key: SMALL[key] for key in SMALL if key in graph_trees.SETTINGS
}
SMALL_TREES |= {
    "kinds": graph_trees.SETTINGS["kinds"],
    "neighbours": [2, 3],
    "drawings": 2,
    "heads": 2,
}
EXPERIMENTS = {"graphs": (graphs, graphs_tables), "graph_trees": (graph_trees, graph_trees_tables)}


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
        assert graph.labels[known].bincount().tolist() == [2, 2] and not set(known.tolist()) & set(
            others.tolist()
        )
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


def test_neighbours_are_drawn_from_the_edges_and_a_package_without_any_is_its_own():
    edges = torch.tensor([[0, 1, 0, 2, 0, 1, 2, 3], [1, 0, 2, 0, 0, 1, 2, 3]])
    near, draw = graph_trees.Neighbours(edges, 4), torch.Generator().manual_seed(0)
    drawn = near.drawn(torch.tensor([[0, 1], [2, 3]]), 50, draw)
    assert [set(row.tolist()) for row in drawn.flatten(0, 1)] == [{1, 2}, {0}, {0}, {3}]
    assert near.count.tolist() == [2, 1, 1, 1]


def test_a_neighbourhood_is_a_tree_and_shuffled_holds_the_same_with_their_roles():
    graph, nodes = graphs.graph_of(SMALL_TREES), torch.arange(18)
    near, kinds = graph_trees.Neighbours(graph.edges, 18), (graph_trees.TREE, graph_trees.SHUFFLED)
    draws = {kind: graph_trees.Draws(0) for kind in kinds}
    edges = set(map(tuple, graph.edges.T.tolist()))
    for _ in range(3):  # every drawing is the same for both
        (found, roles), (shuffled, others) = (
            graph_trees.surroundings(SMALL_TREES, kind, near, nodes, draws[kind]) for kind in kinds
        )
        families = found[:, 1:].unflatten(1, (2, 4))  # a neighbour, and three of its own
        for node, ones in zip(nodes.tolist(), families.tolist()):
            assert all(
                (node, one) in edges and all((one, other) in edges for other in rest)
                for one, *rest in ones
            )
        assert torch.equal(shuffled[:, 0], nodes) and not torch.equal(shuffled, found)
        pairs = [
            (3 * tokens + role).sort().values
            for tokens, role in ((found, roles), (shuffled, others))
        ]
        assert torch.equal(*pairs) and (roles[0].bincount() == torch.tensor([1, 2, 6])).all()
    (tree,) = graph_trees.hierarchy(2, 3).trees
    assert tree.parents.tolist() == [11, *[9] * 4, *[10] * 4, 11, 11, -1]


@pytest.mark.parametrize(
    "name, small, row",
    [("graphs", SMALL, "| umbral cone, psi |"), ("graph_trees", SMALL_TREES, "| shuffled tree |")],
)
def test_two_steps_of_every_kind(name, small, row, tmp_path):
    experiment, drawn = EXPERIMENTS[name]
    assert store.perform(store.Experiment(name, small, experiment.runs), tmp_path)
    runs = store.load(name, tmp_path)["runs"]
    assert all(
        0 <= run["accuracy"] <= 1
        for key, run in runs.items()
        if key not in ("graph", "neighbourhoods")
    )
    assert runs["graph"]["nodes"] == 18
    page = tmp_path / "page.md"
    page.write_text(drawn.PAGE.read_text())
    drawn.draw(tmp_path, page)
    text = page.read_text().split(f"<!-- {name}-graph -->")[1].split(f"<!-- /{name}-made -->")[0]
    assert "not done yet" not in text and row in text


@pytest.mark.parametrize("name", ["graphs", "graph_trees"])
def test_committed_results_are_of_these_settings_and_on_the_page(name):
    experiment, drawn = EXPERIMENTS[name]
    page = drawn.PAGE.read_text()
    results = store.load(name)
    assert results["settings"] == json.loads(json.dumps(experiment.SETTINGS))
    assert set(results["runs"]) == {key for key, _ in experiment.runs(experiment.SETTINGS, {})}
    for mark, make in drawn.TABLES.items():
        assert draw.put(page, mark, make(results)) == page, mark
