"""recipes/experiments/head_pruning: how heads are put in order, and that the page says what the results say."""

import json
import math

import pytest
import torch
from experiments import draw, head_pruning, head_tables, store
from experiments.head_ranks import RANKS, Heads, random_ranks

import hf_hyperattn as ha
from hf_hyperattn.analysis import dropped_heads, head_usage
from tests.integration.models import llama, perturb, run


@pytest.fixture
def heads():
    model = ha.patch_model(llama(), ha.HeadFusionConfig())
    perturb(model)
    texts = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    return Heads(model, head_usage(model, input_ids=texts), texts)


def test_a_contribution_is_what_the_residual_stream_loses_without_the_head(heads):
    """For the last layer: dropping one head changes what the attention adds by exactly that."""
    name, module = "model.layers.3.self_attn", heads.model.model.layers[3].self_attn
    added = []
    module.register_forward_hook(lambda _, args, output: added.append(output[0]))
    for drop in ({}, {name: [2]}):
        with dropped_heads(heads.model, drop):
            run(heads.model, {"input_ids": heads.texts})
    expected = (added[0] - added[1]).norm(dim=-1).mean().item()
    assert RANKS["contribution"](heads)[name, 2] == pytest.approx(expected, rel=1e-4)


def test_weight_norms_share_the_value_projection_of_a_group(heads):
    host = heads.model.model.layers[1].self_attn
    found = RANKS["weight norm"](heads)
    for head in range(4):
        values = host.v_proj.weight[8 * (head // 2) : 8 * (head // 2) + 8].norm()
        expected = values * host.o_proj.weight[:, 8 * head : 8 * head + 8].norm()
        assert found["model.layers.1.self_attn", head] == pytest.approx(expected.item(), rel=1e-5)


def test_gradient_importance_is_the_derivative_by_a_factor_on_the_head(heads):
    factors, totals = {}, {}
    for name, (host, count) in heads.hosts().items():

        def scale(_, args, name=name, count=count):
            factors[name] = torch.ones(*args[0].shape[:-1], count, 1, requires_grad=True)
            return (args[0].unflatten(-1, (count, -1)) * factors[name]).flatten(-2)

        host.o_proj.register_forward_pre_hook(scale)
    found = RANKS["gradient"](heads)
    for row in heads.texts:
        heads.model.zero_grad()
        heads.model(input_ids=row[None], labels=row[None], use_cache=False).loss.backward()
        for name, factor in factors.items():
            totals[name] = totals.get(name, 0) + factor.grad.abs().sum((0, 1, 3))
    for name, total in totals.items():
        for head, expected in enumerate((total / total.norm()).tolist()):
            assert found[name, head] == pytest.approx(expected, rel=1e-4)


def test_measures_by_layer_have_a_mean_of_one_in_each(heads):
    for name in ("contribution", "weight norm"):
        plain, by_layer = RANKS[name](heads), RANKS[f"{name}, by layer"](heads)
        for layer in heads.hosts():
            values = [by_layer[layer, head] for head in range(4)]
            assert sum(values) == pytest.approx(4)
            assert sorted(range(4), key=values.__getitem__) == sorted(
                range(4), key=lambda head: plain[layer, head]
            )


def test_every_head_has_a_rank(heads):
    for ranks in (*(make(heads) for make in RANKS.values()), random_ranks(heads, 1)):
        assert len(ranks) == 16 and all(math.isfinite(x) for x in ranks.values())
    assert random_ranks(heads, 1) == random_ranks(heads, 1) != random_ranks(heads, 2)
    assert sum(RANKS["beta"](heads).values()) == pytest.approx(16, rel=1e-5)


@pytest.mark.slow
def test_two_steps_of_every_way(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HYPERATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(head_pruning, "pretrained", lambda: torch.manual_seed(0) and llama())
    monkeypatch.setattr(head_pruning, "VALIDATION", 64)

    def tokens(kind, held_out):
        draw = torch.Generator().manual_seed(2 * len(kind) + held_out)
        return torch.randint(5, 90, (400,), generator=draw)

    class Tokenizer:
        def __call__(self, text):
            return {"input_ids": [5, 6, 7]}

        def decode(self, ids):
            return str(ids)

    monkeypatch.setattr(head_pruning, "tokens", tokens)
    monkeypatch.setattr(head_pruning, "tokenizer", Tokenizer)
    small = {
        "steps": 2,
        "window": 16,
        "held_out_window": 32,
        "calibration_tokens": 32,
        "shares": [0.5],
    }
    small |= {"seeds": [0, 1], "search": {"seed": 100, "steps": 1, "rates": [0.1, 0.2]}}
    experiment = store.Experiment("head_pruning", head_pruning.SETTINGS | small, head_pruning.runs)
    assert store.perform(experiment, tmp_path)
    results = store.load("head_pruning", tmp_path)
    for make in head_tables.TABLES.values():
        assert make(results)
    runs = results["runs"]
    trained = {
        way: runs[f"{way}, seed 0; trained"] for way in ("input-dependent", "static", "untrained")
    }
    assert trained["static"]["parameters"] == 16 < trained["input-dependent"]["parameters"]
    assert (
        trained["untrained"]["perplexity"]
        == runs["stock"]["perplexity"]
        != trained["static"]["perplexity"]
    )
    assert set(trained["static"]["entropy"].values()) != {1.0}


def test_the_committed_results_are_of_these_settings_and_on_the_page():
    results, page = store.load("head_pruning"), head_tables.PAGE.read_text()
    assert results["settings"] == json.loads(json.dumps(head_pruning.SETTINGS))
    assert set(results["runs"]) <= {key for key, _ in head_pruning.runs(head_pruning.SETTINGS, {})}
    for name, make in head_tables.TABLES.items():
        assert draw.put(page, name, make(results)) == page, name


def test_the_plot_is_drawn_from_the_results(tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    page.write_text(head_tables.PAGE.read_text())
    head_tables.draw(page=page, plots=tmp_path)
    assert (tmp_path / "head_pruning.svg").read_bytes().startswith(b"<?xml")
    assert page.read_text() == head_tables.PAGE.read_text()
    assert (
        "plots/head_pruning.svg" in page.read_text() and (draw.PLOTS / "head_pruning.svg").exists()
    )
