"""recipes/experiments/adaptation: every row starts as the model it adapts, two steps of each, and the page."""

from __future__ import annotations

import json

import pytest
import torch
from experiments import adaptation, adaptation_tables, draw, recovered, store
from experiments.tables import NOT_DONE

from tests.integration.models import llama
from tests.registries import restored


@pytest.fixture
def small(monkeypatch):
    """Settings for a tiny Llama of four layers and text of random tokens."""

    def tokens(part):
        return torch.randint(5, 90, (200,), generator=torch.Generator().manual_seed(len(part)))

    monkeypatch.setattr(adaptation, "pretrained", lambda: torch.manual_seed(0) and llama())
    monkeypatch.setattr(adaptation, "tokens", tokens)
    monkeypatch.setattr(adaptation, "device", lambda: "cpu")
    for cached in (adaptation.lower_part, adaptation.states_below):
        cached.cache_clear()
    recovered.own_scores.cache_clear()
    with restored():
        yield small_settings()
    recovered.own_scores.cache_clear()


def small_settings() -> dict:
    search = {"seed": 9, "steps": 1, "rates": [1e-3, 1e-2], "added_rates": [1e-2, 0.1]}
    return adaptation.SETTINGS | {
        "first_layer": 2,
        "seeds": [0, 1],
        "window": 16,
        "steps": 2,
        "held_out_windows": {"search": 1, "test": 2},
        "search": search,
    }


def test_every_row_starts_as_the_model_and_with_the_same_lora(small):
    stock, matrices = adaptation.read_stock(small), []
    for name, row in small["rows"].items():
        model = adaptation.model_of(small, name, 3)
        found = adaptation.held_out(small, model, "test")
        assert found["held_out"] == pytest.approx(stock["held_out"], abs=1e-5), name
        names = {n for n, _ in adaptation.trained(model)}
        assert all(".layers.2." in n or ".layers.3." in n for n in names)
        assert any(".hyper." in n for n in names) == (name != adaptation.ALONE)
        if row["rank"] == 8:
            matrices.append(
                {n.split("layers.")[1]: p for n, p in adaptation.trained(model) if "lora_A" in n}
            )
    for other in matrices[1:]:
        assert other.keys() == matrices[0].keys()
        assert all(torch.equal(other[n], p) for n, p in matrices[0].items())


def test_what_layers_below_make_once_is_what_the_whole_model_makes(small):
    ids = adaptation.window("test", 16, 16)
    whole = adaptation.pretrained()(input_ids=ids, use_cache=False).logits[0, :-1]
    upper = adaptation.upper_part(small, adaptation.pretrained())
    assert adaptation.mean_loss(small, upper, "test", 16) == torch.nn.functional.cross_entropy(
        whole, ids[0, 1:]
    )


@pytest.mark.slow
def test_two_steps_of_every_row_of_the_plan(small, tmp_path):
    experiment = store.Experiment("adaptation", small, adaptation.runs)
    assert store.perform(experiment, tmp_path)
    runs = store.load("adaptation", tmp_path)["runs"]
    lora = adaptation.best_rate(small, runs, adaptation.ALONE)
    for name in small["rows"]:
        run = runs[f"{name}, seed 1"]
        assert run["rates"]["lora"] == lora and run["held_out"] != runs["stock"]["held_out"]
        assert bool(run["added"]) == (name != adaptation.ALONE) and len(run["windows"]) == 2
        assert name == adaptation.ALONE or max(run["largest_added"].values(), default=1) > 0
    page = tmp_path / "page.md"
    page.write_text(adaptation_tables.PAGE.read_text())
    adaptation_tables.draw(tmp_path, page, tmp_path)
    drawn = page.read_text()
    assert not any(draw.put(drawn, mark, NOT_DONE) == drawn for mark in adaptation_tables.TABLES)
    assert "| head_fusion |" in drawn
    assert (tmp_path / "adaptation.svg").read_bytes().startswith(b"<?xml")


def test_what_would_be_found_is_found_four_times_in_five():
    draw_, found = torch.Generator().manual_seed(0), 0
    from scipy.stats import ttest_1samp

    for _ in range(
        400
    ):  # the deviation of differences is 1, of ten seeds: (2.262 + 0.883) / sqrt(10)
        found += (
            ttest_1samp(torch.randn(10, generator=draw_).numpy() + 3.145 / 10**0.5, 0).pvalue < 0.05
        )
    assert 0.72 < found / 400 < 0.88
    differences = [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
    expected = 3.145 * (10 / 9) ** 0.5 / 10**0.5
    assert adaptation_tables.detectable(differences, [0.0] * 10) == pytest.approx(
        expected, rel=1e-3
    )


def test_committed_results_are_of_these_settings_and_on_the_page():
    page, path = adaptation_tables.PAGE.read_text(), store.FOLDER / "adaptation.json"
    if not path.exists():
        assert all(draw.put(page, mark, NOT_DONE) == page for mark in adaptation_tables.TABLES)
        return
    results = store.load("adaptation")
    assert results["settings"] == json.loads(json.dumps(adaptation.SETTINGS))
    assert set(results["runs"]) <= {key for key, _ in adaptation.runs(adaptation.SETTINGS, {})}
    sizes = [run["parameters"] for run in results["runs"].values() if "parameters" in run]
    assert max(abs(size - 307_200) for size in sizes) < 0.011 * 307_200
    for name, make in adaptation_tables.TABLES.items():
        assert draw.put(page, name, make(results)) == page, name
