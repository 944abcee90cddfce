"""The committed results are whole, name no place on anybody's machine, and are what the docs say."""

from __future__ import annotations

import json

import pytest
from finetuning.settings import read_settings

from .tiny import ROOT, write

FOLDER = ROOT / "recipes" / "smollm2"
RUNS = {
    path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "results").glob("*.json"))
}


@pytest.mark.parametrize("name", RUNS)
def test_results_belong_to_the_recipe_beside_them(name, tmp_path):
    results = RUNS[name]
    assert results["recipe"]["launch"] == {"processes": 1}
    recorded = {group: values for group, values in results["recipe"].items() if group != "launch"}
    recipe = read_settings(
        FOLDER / f"{name}.yaml", [f"trainer.output={recorded['trainer']['output']}"]
    )
    assert read_settings(write(tmp_path / "recipe.yaml", recorded)) == recipe
    assert results["difference_at_start"] <= 1e-5
    assert results["after"]["perplexity"] < results["before"]["perplexity"]
    assert len(results["loss_curve"]) == 1 + results["recipe"]["trainer"]["steps"] // 2
    assert not any(
        place in json.dumps(results) for place in ("/home", "/root", "/tmp", "/work", "/Users")
    )


def test_the_two_runs_saw_the_same_text():
    first, second = RUNS["cone"], RUNS["control"]
    assert first["data"] == second["data"]
    assert first["before"]["perplexity"] == pytest.approx(second["before"]["perplexity"], rel=1e-5)
    assert second["gates"]["highest"] == 0 < first["gates"]["highest"]


def test_the_docs_say_what_was_measured():
    docs = (ROOT / "docs" / "results" / "recipes.md").read_text(encoding="utf-8")
    cells = {
        line.split(" | ")[0].strip("| "): line
        for line in docs.splitlines()
        if line.startswith("| ")
    }
    runs = [RUNS["cone"], RUNS["control"]]
    for moment in ("before", "after"):
        for number, form in (("perplexity", "{:.3f}"), ("next_token_accuracy", "{:.4f}")):
            assert " | ".join(form.format(run[moment][number]) for run in runs) in docs
    assert (
        " | ".join(f"{run['parameters']['trained']:,}" for run in runs)
        in cells["parameters trained"]
    )
    assert " | ".join(f"{run['seconds']['total']:.0f}" for run in runs) in cells["all, seconds"]
