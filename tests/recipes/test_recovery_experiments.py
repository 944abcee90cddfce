"""recipes/experiments recovered, injected_lora: what is replaced, two steps of every row, and the page."""

from __future__ import annotations

import json
import math

import pytest
import torch
from experiments import (
    adaptation,
    draw,
    injected_lora,
    injected_lora_tables,
    recovered,
    recovered_tables,
    store,
)
from experiments.tables import NOT_DONE

from hf_hyperattn.inject.retrieval import Example
from tests.integration.models import llama
from tests.registries import restored

PAGE = recovered_tables.PAGE


def text(*kind, **_) -> torch.Tensor:
    return torch.randint(5, 90, (400,), generator=torch.Generator().manual_seed(len(str(kind))))


def sharp() -> torch.nn.Module:
    """A tiny Llama of four layers whose attention is far from even."""
    torch.manual_seed(0)
    model = llama()
    for name, p in model.named_parameters():
        p.data *= 8 if "self_attn" in name else 1
    return model


@pytest.fixture
def small(monkeypatch):
    """Settings for it and for text of random tokens."""
    monkeypatch.setattr(recovered, "pretrained", sharp)
    monkeypatch.setattr(recovered, "tokens", text)
    monkeypatch.setattr(recovered, "tokenizer", lambda: None)
    monkeypatch.setattr(
        recovered, "mixture", lambda _, ids, length: Example("mixture", ids[:length], ((4, 7),))
    )
    recovered.teacher.cache_clear()
    recovered.own_scores.cache_clear()
    with restored():
        yield small_settings()
    recovered.teacher.cache_clear()
    recovered.own_scores.cache_clear()


def small_settings() -> dict:
    return recovered.SETTINGS | {
        "layers": {"1": [1], "2": [1, 2]},
        "seeds": [0, 1],
        "window": 16,
        "windows": {"train": 3, "search": 1},
        "steps": 2,
        "search": {"seed": 9, "steps": 1, "rates": [1e-3, 1e-2], "k": "2"},
        "held_out_window": 16,
        "copied_window": 16,
    }


@pytest.mark.parametrize("row", recovered.SETTINGS["rows"])
def test_only_what_is_replaced_is_another(small, row):
    """Above all the score itself: each row's attention over the untouched layer's input, by its definition."""
    stock, model = recovered.pretrained(), recovered.model_of(small, row, [1, 2], 3)
    same = {
        name
        for name, p in model.named_parameters()
        if name in stock.state_dict() and torch.equal(p, stock.state_dict()[name])
    }
    other = stock.state_dict().keys() - same - {"lm_head.weight"}
    redrawn = {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in (1, 2) for x in "qk"}
    assert other == (redrawn if "start" in small["rows"][row] else set())
    for layer in (1, 2):
        given, wanted, places = recovered.taught(small, layer, "train", 0)
        own = recovered.attention_of(stock, layer)
        assert recovered.error(own, given, wanted, places) < 1e-9
        first = recovered.error(recovered.attention_of(model, layer), given, wanted, places).item()
        assert math.isfinite(first) and first > 1e-3
        if row == recovered.NONE:  # the mean of all values up to a token
            values = own.v_proj(given).cumsum(1) / torch.arange(1.0, given.shape[1] + 1)[:, None]
            groups = own.config.num_attention_heads // own.config.num_key_value_heads
            shape = (*given.shape[:2], -1, own.head_dim)
            made = own.o_proj(values.view(shape).repeat_interleave(groups, 2).flatten(2))
            expected = ((made - wanted).square().sum() / wanted.square().sum()).item()
            assert first == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_two_steps_of_every_row_that_is_replaced(small, tmp_path):
    experiment = store.Experiment("recovered", small, recovered.runs)
    assert store.perform(experiment, tmp_path)
    results = store.load("recovered", tmp_path)
    for row in small["rows"]:
        run, before = results["runs"][f"{row}, seed 1"], results["runs"][f"{row}, before"]
        assert run["2"]["loss"] != before["2"]["loss"] and set(run["errors"]) == {"1", "2"}
        assert run["1"].keys() == {"perplexity", "loss", "copying", "needles"}
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    recovered_tables.draw(tmp_path, page)
    assert (
        page.read_text().count("| no score |") == 5
        and "| umbral cone, xi, k = 2 |" in page.read_text()
    )


def test_a_layer_that_is_trained_is_nearer_to_the_untouched_one(small):
    layer, row = 1, "umbral cone, xi"
    before = recovered.error(
        recovered.attention_of(recovered.model_of(small, row, [layer], 0), layer),
        *recovered.taught(small, layer, "train", 0),
    ).item()
    attention, _ = recovered.train(small | {"steps": 60}, row, [layer], 0, 3e-3, 60)[layer]
    after = recovered.error(attention, *recovered.taught(small, layer, "train", 0)).item()
    assert after < 0.7 * before


@pytest.fixture
def short(monkeypatch):
    """The same for injection."""
    for module in (adaptation, injected_lora):
        monkeypatch.setattr(module, "tokens", text)
    monkeypatch.setattr(injected_lora, "pretrained", lambda: torch.manual_seed(0) and llama())
    monkeypatch.setattr(adaptation, "device", lambda: "cpu")

    def some(_, texts, length, tasks):
        return [Example(task, ids[:length], ((8, 12),)) for task in tasks for ids in texts]

    monkeypatch.setattr(injected_lora, "examples", some)
    monkeypatch.setattr(injected_lora, "tokenizer", lambda: None)
    return injected_lora.SETTINGS | {
        "rule": {"windows": [2, 4], "near": 4, "sinks": 1, "refine_top_k": 1},
        "seeds": [0, 1],
        "window": 32,
        "steps": 2,
        "held_out_windows": {"search": 1, "test": 2},
        "search": {"seed": 9, "steps": 1, "rates": [1e-3, 1e-2]},
    }


def test_two_steps_before_and_after_an_injection(short, tmp_path):
    experiment = store.Experiment("injected_lora", short, injected_lora.runs)
    assert store.perform(experiment, tmp_path)
    runs = store.load("injected_lora", tmp_path)["runs"]
    first, after = (runs[f"{row}, seed 1"] for row in short["rows"])
    assert (
        first["own_attention"] is None and after["own_attention"]["held_out"] != after["held_out"]
    )
    assert len({run["held_out"] for run in (first, after, runs["stock"], runs["injected"])}) == 4
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    injected_lora_tables.draw(tmp_path, page)
    assert "| injected, then LoRA |" in page.read_text() and "| LoRA alone |" in page.read_text()


def test_untrained_injection_is_the_same_in_both_orders(short):
    """LoRA starts at nothing: with rates of 0, both are the injected model."""
    short |= {"patch_rate": 0.0}
    wanted = injected_lora.read(short, injected_lora.injected(short, injected_lora.pretrained()))
    first = injected_lora.train(short, injected_lora.FIRST, 0, 0.0, 1)
    after = injected_lora.train(short, injected_lora.AFTER, 0, 0.0, 1).merge_and_unload()
    for model in (first, injected_lora.injected(short, after)):
        assert injected_lora.read(short, model)["held_out"] == pytest.approx(
            wanted["held_out"], abs=1e-5
        )
    assert wanted["held_out"] != pytest.approx(
        injected_lora.read(short, injected_lora.pretrained())["held_out"]
    )


@pytest.mark.parametrize(
    "experiment, tables",
    [(recovered, recovered_tables.TABLES), (injected_lora, injected_lora_tables.TABLES)],
)
def test_committed_results_are_of_these_settings_and_on_the_page(experiment, tables):
    page, name = PAGE.read_text(), experiment.EXPERIMENT.name
    if not (store.FOLDER / f"{name}.json").exists():
        assert all(draw.put(page, mark, NOT_DONE) == page for mark in tables)
        return
    results = store.load(name)
    assert results["settings"] == json.loads(json.dumps(experiment.SETTINGS))
    assert set(results["runs"]) <= {key for key, _ in experiment.runs(experiment.SETTINGS, {})}
    for mark, make in tables.items():
        assert draw.put(page, mark, make(results)) == page, mark
