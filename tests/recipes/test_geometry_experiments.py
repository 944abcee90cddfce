"""recipes/experiments hyperbolicity, starts: two steps of every kind, what they read, and the page."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from experiments import (
    ball,
    ball_tables,
    depth,
    draw,
    hyperbolicity,
    hyperbolicity_tables,
    operations,
    operations_tables,
    starts,
    starts_tables,
    store,
)
from experiments.lca_task import LcaTask

TASK = hyperbolicity.SETTINGS["task"] | {
    "leaves": 32,
    "width": 8,
    "steps": 2,
    "batch": 4,
    "test_pairs": 20,
}


@pytest.fixture
def task(monkeypatch):
    """A tree of two children for every node, in place of WordNet."""

    def paths(level):
        return [
            tuple(f"{leaf:0{level}b}"[: i + 1] for i in range(level)) for leaf in range(2**level)
        ]

    made = {level: LcaTask(paths(level), 2) for level in (4, 5)}
    monkeypatch.setattr(depth, "task_of", lambda level, *rest: made[level])


def test_two_steps_of_hyperbolicity(task, tmp_path, monkeypatch):
    monkeypatch.setattr(
        hyperbolicity, "frequencies", lambda: Counter({f"w{i}": i % 7 for i in range(30)})
    )
    monkeypatch.setattr(hyperbolicity, "table_of", lambda name: torch.randn(30, 4).requires_grad_())
    monkeypatch.setattr(hyperbolicity, "last_states", lambda name, ids: torch.randn(len(ids), 4))
    tree = {"all.0": None} | {
        f"w{i}.{i + 1}": "all.0" if i < 3 else f"w{i // 3}.{i // 3 + 1}" for i in range(30)
    }
    monkeypatch.setattr(hyperbolicity, "parents_of", lambda source: tree)
    lengths = lambda texts, name: [torch.zeros(1 + i % 3) for i, _ in enumerate(texts)]
    monkeypatch.setattr(hyperbolicity, "ids_of", lengths)
    words = ([f"w{i}" for i in range(30)], torch.arange(30), [i % 5 for i in range(30)])
    monkeypatch.setattr(hyperbolicity, "nouns", lambda name, most: words)
    small = {
        "size": 8,
        "draws": 2,
        "quadruples": 50,
        "words": 30,
        "depths": [4, 5],
        "seeds": [0, 1],
        "task": TASK,
    }
    kinds, rates = hyperbolicity.SETTINGS["kinds"], depth.SETTINGS["search"]["learning_rates"]
    keys = [
        depth.key_of_search(kind, level, "full", rate)
        for kind in kinds
        for level in (4, 5)
        for rate in rates
    ]
    results = {"settings": depth.SETTINGS, "runs": {key: {"accuracy": 0.5} for key in keys}}
    monkeypatch.setattr(hyperbolicity, "load", lambda name: results)
    experiment = store.Experiment(
        "hyperbolicity", hyperbolicity.SETTINGS | small, hyperbolicity.runs
    )
    assert store.perform(experiment, tmp_path)
    run = store.load("hyperbolicity", tmp_path)["runs"]["depth 4, hyperbolic distance, seed 1"]
    assert (
        len(run["after"]["keys"]) == TASK["heads"] == len(run["before"]["keys"])
        and "points" in run["after"]
    )
    page = tmp_path / "page.md"
    page.write_text(hyperbolicity_tables.PAGE.read_text())
    hyperbolicity_tables.draw(tmp_path, page, tmp_path)
    assert (
        "depth 5, hyperbolic distance" in page.read_text()
        and "| MiniLM: phenotypes |" in page.read_text()
    )
    names = store.load("hyperbolicity", tmp_path)["runs"]["SmolLM2, ICD-10"]
    assert (
        names["count"] == 30
        and {"points", "norm and depth"} <= names["last hidden states, ICD-10"].keys()
    )
    assert (tmp_path / "hyperbolicity.svg").read_bytes().startswith(b"<?xml")


def test_orders_read_the_keys_of_nodes_at_one_place(task):
    torch.manual_seed(0)
    made = depth.task_of(4)
    model = depth.model_of(TASK, made, "Euclidean distance", 8)
    attention, rows = model.blocks[0][1], []
    expected = [[], []]
    for node in range(2, made.vocabulary):
        ids = torch.zeros(1, made.length, dtype=torch.long)
        ids[0, 1] = node
        x = model.blocks[0][0](model.tokens(ids) + model.places.weight)
        for head, key in enumerate(attention.qkv(x).unflatten(-1, (3, 2, -1))[0, 1, 1]):
            expected[head].append(key.norm().item())
        rows.append(
            next(i + 1 for path in made.paths for i, other in enumerate(path) if other == node)
        )
    found = hyperbolicity.orders({}, model, made)["keys"]
    for head, values in enumerate(expected):
        other = hyperbolicity.correlated(torch.tensor(values), torch.tensor(rows).double())
        assert found[head]["value"] == pytest.approx(other["value"], abs=0.02)


def test_the_level_of_a_noun_counts_what_is_above_it():
    assert hyperbolicity.level_of({"a": None, "b": "a", "c": "b"}, "c") == 2


def test_two_steps_of_every_start(task, tmp_path, monkeypatch):
    made = (
        depth.SETTINGS
        | TASK
        | {"seeds": [0, 1, 2], "depths": [4], "kinds": starts.SETTINGS["kinds"]}
    )
    kinds, rates = made["kinds"], made["search"]["learning_rates"]
    runs = {
        depth.key_of_search(kind, 4, "full", rate): {"accuracy": rate}
        for kind in kinds
        for rate in rates
    }
    runs |= {
        depth.key_of(kind, 4, "full", seed): {"accuracy": 0.5 + seed / 9}
        for kind in kinds
        for seed in range(3)
    }
    (tmp_path / "depth.json").write_text(json.dumps({"settings": made, "runs": runs}))
    monkeypatch.setattr(starts, "load", lambda name: store.load(name, tmp_path))
    experiment = store.Experiment("starts", starts.SETTINGS | {"depth": 4}, starts.runs)
    assert store.perform(experiment, tmp_path)
    run = store.load("starts", tmp_path)["runs"]["umbral cone, psi, gamma 0.1, seed 0"]
    assert run["learning_rate"] == max(rates) and run["learned"]["gamma"][0][0] == pytest.approx(
        0.1, rel=0.2
    )
    page = tmp_path / "page.md"
    page.write_text(starts_tables.PAGE.read_text())
    starts_tables.draw(tmp_path, page)
    assert page.read_text().count("p = ") + page.read_text().count("p < ") >= 12


def test_a_start_changes_what_it_says(task):
    model = depth.model_of(TASK, depth.task_of(4), "hyperbolic distance", 8)
    before = model.blocks[1][1].qkv.weight.clone()
    starts.begin(model, gamma=0.4, projections=4.0)
    after, attend = model.blocks[1][1].qkv.weight, model.blocks[1][1].attend
    assert torch.equal(after[:16], 4 * before[:16]) and torch.equal(after[16:], before[16:])
    torch.testing.assert_close(attend.logs["temperature"].exp(), torch.full((2,), 2.5))
    assert not attend.logs["curvature"].any()


def test_two_steps_in_the_ball(tmp_path, monkeypatch):
    parents = {"top.0": None, "m.1": "top.0"} | {
        f"w{i}.2": "m.1" if i < 3 else f"w{i - 3}.2" for i in range(9)
    }
    monkeypatch.setattr(ball, "read_parents", lambda path: parents)
    monkeypatch.setattr(ball, "wordnet_nouns", lambda: None)
    ball.closure.cache_clear()
    above, levels = ball.closure("m")
    assert above.shape == (10, 10) and levels.tolist() == [0, *[1] * 3, *[2] * 3, *[3] * 3]
    small = ball.SETTINGS | {"root": "m", "steps": 2, "batch": 8, "others": 3, "seeds": [0, 1]}
    assert store.perform(store.Experiment("ball", small, ball.runs), tmp_path)
    page = tmp_path / "page.md"
    page.write_text(ball_tables.PAGE.read_text())
    ball_tables.draw(tmp_path, page)
    assert "| 5 dimensions | " in page.read_text()
    ball.closure.cache_clear()


def test_precision_and_rank_of_a_line():
    """Words on a line, each after the one above it: those near it on the other side come between."""
    model = ball.Points(ball.FLAT, 4, 1, 0.0)
    model.rows.data = torch.tensor([[0.0], [1.0], [2.1], [3.3]])
    above = torch.ones(4, 4).tril(-1).bool()
    found = ball.read(model, above, above.sum(1))
    # word 1: 0 first; word 2: 1, then 3, then 0; word 3: all in order
    assert found["precision"] == pytest.approx((1 + (1 + 2 / 3) / 2 + 1) / 3, abs=1e-4)
    between = [1.0, (1 + 2) / 2, 1.0]
    distances = [
        sorted(range(4), key=lambda j: abs(model.rows[i] - model.rows[j]).item())[1:]
        for i in range(4)
    ]
    assert distances[2] == [1, 3, 0] and found["rank"] == pytest.approx(sum(between) / 3, abs=1e-3)
    assert found["norm and level"] == 1


def test_every_operation_is_timed(tmp_path):
    small = operations.SETTINGS | {"points": 10, "tokens": 8, "rounds": 1, "least_seconds": 1e-5}
    assert store.perform(store.Experiment("operations", small, operations.runs), tmp_path)
    page = tmp_path / "page.md"
    page.write_text(operations_tables.PAGE.read_text())
    operations_tables.draw(tmp_path, page)
    names = [*operations.OPERATIONS, *operations.ATTENTION]
    assert all(f"| {name} |" in page.read_text() for name in names)
    assert all(run["one"] > 0 for run in store.load("operations", tmp_path)["runs"].values())


@pytest.mark.parametrize(
    "name, tables",
    [
        ("hyperbolicity", hyperbolicity_tables),
        ("starts", starts_tables),
        ("operations", operations_tables),
    ],
)
def test_committed_results_are_of_these_settings_and_on_the_page(name, tables):
    page, module = (
        tables.PAGE.read_text(),
        {"hyperbolicity": hyperbolicity, "starts": starts, "operations": operations}[name],
    )
    if not (store.FOLDER / f"{name}.json").exists():
        assert "The runs are not done yet." in page
        return
    results = store.load(name)
    assert results["settings"] == json.loads(json.dumps(module.SETTINGS))
    assert set(results["runs"]) <= {key for key, _ in module.runs(module.SETTINGS, {})}
    if name not in ("hyperbolicity", "ball"):
        assert draw.put(page, name, getattr(tables, name)(results)) == page
        return
    for mark, make in tables.TABLES.items():
        assert draw.put(page, mark, make(results)) == page, mark
