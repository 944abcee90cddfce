"""recipes/experiments kernels, token_weights: what aligns with what, two steps of every kind, and the page."""

from __future__ import annotations

import json

import pytest
import torch
from experiments import (
    draw,
    kernels,
    kernels_tables,
    length,
    store,
    token_weights,
    token_weights_tables,
)

PAGES = {
    "kernels": (kernels, kernels_tables),
    "token_weights": (token_weights, token_weights_tables),
}


def some_nouns(*_) -> kernels.Nouns:
    """Twenty nouns of two classes, eight of them to be read; three layers of features."""
    draw_ = torch.Generator().manual_seed(0)
    labels = torch.arange(20) % 2
    features = torch.randn(3, 20, 6, generator=draw_) + 2 * labels[:, None]
    return kernels.Nouns(features, labels, torch.stack([labels, 2 + torch.arange(20) // 4], 1), 12)


def model_of(kind: str) -> kernels.Mixture:
    torch.manual_seed(0)
    return kernels.Mixture(kernels.SETTINGS["kinds"][kind], 3, 6, 1.5)


def test_alignment_by_loops():
    """Against centring by the matrix I - 1/n, and sums one by one."""
    draw_ = torch.Generator().manual_seed(1)
    first, second = (torch.randn(5, 5, generator=draw_, dtype=torch.float64) for _ in range(2))
    centre = torch.eye(5, dtype=torch.float64) - 1 / 5
    one, other = (centre @ k @ centre for k in (first, second))
    pairs = [(one[i, j].item(), other[i, j].item()) for i in range(5) for j in range(5)]
    expected = (
        sum(a * b for a, b in pairs)
        / (sum(a * a for a, _ in pairs) * sum(b * b for _, b in pairs)) ** 0.5
    )
    assert kernels.alignment(first, second) == pytest.approx(expected)
    assert kernels.alignment(first, 3 * first + 7) == pytest.approx(1)


def test_the_tasks_own_kernels():
    wanted = some_nouns().similarity(slice(12, None))
    for i in range(8):
        for j in range(8):
            same = (12 + i) % 2 == (12 + j) % 2
            assert wanted["class"][i, j] == same
            assert wanted["tree"][i, j] == (same + (same and (12 + i) // 4 == (12 + j) // 4))


@pytest.mark.parametrize("kind", kernels.SETTINGS["kinds"])
def test_what_aligns_is_what_attends(kind):
    """The kernel that is read, times its scale, gives the attention that is trained, by softmax."""
    model, nouns = model_of(kind), some_nouns()
    with torch.no_grad():
        for parameter in (model.beta, model.by_token):
            if parameter is not None and model.weights != kernels.RANDOM:
                parameter.copy_(torch.randn(parameter.shape))
        asked, known = nouns.features[:, :5], nouns.features[:, 5:12]
        logits = model.log_scale.exp() * model.kernel(nouns.features[:, :12])[:5, 5:]
        values = torch.eye(7)
        torch.testing.assert_close(
            model(asked, known, values).double(), logits.softmax(-1), atol=2e-5, rtol=1e-4
        )


def test_only_learned_weights_are_trained_and_random_ones_are_drawn():
    names = {
        kind: {n for n, p in model_of(kind).named_parameters() if p.requires_grad}
        for kind in kernels.SETTINGS["kinds"]
    }
    assert names["even mixture"] == names["random mixture"] == {"log_scale"}
    assert names["learned mixture"] == {"log_scale", "beta"} and names["mixture by token"] == {
        "log_scale",
        "by_token",
    }
    assert names["projected: even mixture"] == {"log_scale", "maps"}
    assert model_of("random mixture").beta.std() > 0 == model_of("even mixture").beta.std()


def test_two_steps_of_every_mixture(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "nouns_of", some_nouns)
    small = {
        "classes": 2,
        "labelled": 6,
        "asked": 4,
        "steps": 2,
        "seeds": [0, 1],
        "search": {"seed": 9, "rates": [0.1, 0.2]},
    }
    experiment = store.Experiment("kernels", kernels.SETTINGS | small, kernels.runs)
    assert store.perform(experiment, tmp_path)
    runs = store.load("kernels", tmp_path)["runs"]
    even, learned = (runs[f"{kind}, seed 1"] for kind in ("even mixture", "learned mixture"))
    assert even["before"] == even["after"] == learned["before"] != learned["after"]
    page = tmp_path / "page.md"
    page.write_text(kernels_tables.PAGE.read_text())
    kernels_tables.draw(tmp_path, page)
    assert "| projected: Euclidean distance |" in page.read_text()


def test_two_steps_of_every_model(tmp_path, monkeypatch):
    text = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(token_weights, "bytes_of_the_bible", lambda: text)
    small = {
        "length": 16,
        "steps": 2,
        "batch": 2,
        "width": 16,
        "layers": 1,
        "heads": 2,
        "held_out_bytes": 64,
    }
    small |= {"seeds": [0, 1], "search": {"seed": 9, "rates": [0.1, 0.2]}}
    experiment = store.Experiment(
        "token_weights", token_weights.SETTINGS | small, token_weights.runs
    )
    assert store.perform(experiment, tmp_path)
    runs = store.load("token_weights", tmp_path)["runs"]
    gates = [runs[f"{kind}, seed 0"]["gates"] for kind in token_weights.GATES]
    assert gates[:3] == [0, 2, 2 * 16] and gates[3] > 0
    page = tmp_path / "page.md"
    page.write_text(token_weights_tables.PAGE.read_text())
    token_weights_tables.draw(tmp_path, page)
    assert "| weights by token |" in page.read_text()


def test_the_search_reads_other_bytes_than_the_end(monkeypatch):
    seen = []
    monkeypatch.setattr(token_weights, "bytes_of_the_bible", lambda: torch.arange(4000) % 251)
    monkeypatch.setattr(
        token_weights,
        "perplexity",
        lambda model, kept, n: seen.append(kept) or length.perplexity(model, kept, n),
    )
    small = token_weights.SETTINGS | {
        "length": 16,
        "steps": 1,
        "batch": 2,
        "width": 16,
        "layers": 1,
        "heads": 2,
    }
    for search in (True, False):
        token_weights.train(small | {"held_out_bytes": 64}, "no weights", 0, 0.01, search)
    assert torch.equal(seen[0], torch.arange(3736, 3800) % 251) and torch.equal(
        seen[1], torch.arange(3800, 3864) % 251
    )


@pytest.mark.parametrize("name", PAGES)
def test_committed_results_are_of_these_settings_and_on_the_page(name):
    module, tables = PAGES[name]
    results, page = store.load(name), tables.PAGE.read_text()
    assert results["settings"] == json.loads(json.dumps(module.SETTINGS))
    assert set(results["runs"]) == {key for key, _ in module.runs(module.SETTINGS, {})}
    for mark, make in tables.TABLES.items():
        assert draw.put(page, mark, make(results)) == page, mark
