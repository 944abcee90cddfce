"""recipes/experiments: the relation of three tokens, its labels, models and table."""

import itertools
import json

import torch
from experiments import trilinear, trilinear_tables
from experiments.store import FOLDER
from experiments.three_way_model import Reader

TINY = trilinear.SETTINGS | {
    "kinds": {k: v | {"steps": 20} for k, v in trilinear.SETTINGS["kinds"].items()},
    "batch": 8,
    "test_sequences": 16,
    "seeds": [0, 1],
}


def test_labels_are_what_loops_find():
    tokens, labels = trilinear.batch(trilinear.SETTINGS, 40, torch.Generator().manual_seed(0))
    for row, found in zip(tokens.tolist(), labels.tolist()):
        for i, label in enumerate(found):
            others = [x for place, x in enumerate(row) if place != i]
            assert label == any(
                (row[i] + a + b) % 32 == 0 for a, b in itertools.combinations(others, 2)
            )
    assert (
        0.4
        < trilinear.batch(trilinear.SETTINGS, 2000, torch.Generator().manual_seed(1))[1]
        .float()
        .mean()
        < 0.6
    )


def test_a_repeated_token_is_another_one_only_in_another_place():
    row = torch.tensor([[0, 16, 5, 5, 22, 1]])  # 16 + 16 + 0, 5 + 5 + 22
    assert trilinear.completed(row, 32)[0].tolist() == [False, False, True, True, True, False]


def test_models_of_the_same_size():
    sizes = {}
    for kind, chosen in trilinear.SETTINGS["kinds"].items():
        model = Reader(32, **{k: v for k, v in chosen.items() if k != "steps"})
        sizes[kind] = sum(p.numel() for p in model.parameters())
        assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, 2)
    assert sizes["three-way"] == sizes["pairwise"] < sizes["pairwise, wider"]


def test_runs_tables_and_plots():
    runs = {}
    for key, do in trilinear.runs(TINY, runs):
        runs[key] = do() | {"seconds": {"cpu": 1.0}}
    assert len(runs) == 8 and all(len(run["curve"]) == 10 for run in runs.values())
    results = json.loads(json.dumps({"settings": TINY, "runs": runs}))
    assert trilinear_tables.accuracies(results).count("\n") == 5
    assert trilinear_tables.curves(results).axes
    del results["runs"]["pairwise, seed 1"]
    assert trilinear_tables.accuracies(results).count("±") == 3
    del results["runs"]["pairwise, seed 0"]
    assert trilinear_tables.accuracies(results).count("\n") == 4


def test_the_page_has_the_table_of_the_results():
    results = json.loads((FOLDER / "trilinear.json").read_text())
    assert results["settings"] == trilinear.SETTINGS
    assert trilinear_tables.accuracies(results) in trilinear_tables.PAGE.read_text()
