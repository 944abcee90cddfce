"""recipes/experiments: the length experiment, HyPE against ALiBi, and flash kernels."""

from __future__ import annotations

import itertools

import mpmath
import pytest
import torch
from experiments import alibi, flash, length
from experiments.fitting import share_of_rate, size_of

# --- the length experiment ------------------------------------------------------------------------------------------

SMALL = length.SETTINGS | {"width": 16, "layers": 2, "lengths": [8, 40], "train_length": 8}


def model(name: str, **changes):
    torch.manual_seed(0)
    return length.model_of(SMALL | changes, name).eval()


def test_the_alibi_mask_is_the_papers():
    mask = length.alibi_mask(4, 9)
    for h, i, j in itertools.product(range(4), range(9), range(9)):
        expected = -torch.inf if j > i else (i - j) * -(2.0 ** (-2 * (h + 1)))
        assert mask[0, h, i, j] == expected


def test_hype_with_a_small_mu_is_alibi_in_the_whole_model():
    ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    flat = {"positions": {"hype": {"hype": 100_000, "learned": False}}}
    with torch.no_grad():
        by_mask, by_hype, none = (
            m(ids).logits for m in (model("ALiBi"), model("hype", **flat), model("none"))
        )
    assert (by_mask - by_hype).abs().max() < 1e-4 < 1e-2 < (by_mask - none).abs().max()


def test_learned_slopes_start_as_alibi_and_move_as_hypes_without_its_bend():
    ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    flat = {"positions": {"hype": {"hype": 100_000, "learned": True}}}
    fixed, slopes, hype = model("ALiBi"), model("ALiBi, learned slopes"), model("hype", **flat)
    assert (fixed(ids).logits - slopes(ids).logits).abs().max() < 1e-5
    gradients = []
    for one in (slopes, hype):
        one(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in length.added(one).values()])
    for mine, theirs in zip(*gradients, strict=True):
        assert mine.abs().min() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-7)


def test_only_rotary_has_rotary_positions_and_only_learned_learns():
    for name in SMALL["positions"]:
        one = model(name)
        assert {layer.self_attn.use_rope for layer in one.model.layers} == {int(name == "rotary")}
        added = length.added(one)
        assert bool(added) == (name.startswith("HyPE") or name == "ALiBi, learned slopes")
        assert {p.requires_grad for p in added.values()} <= {"learned" in name}
        counted = size_of(one) - sum(p.numel() for p in added.values())
        assert counted == size_of(model("none"))


def test_rows_are_cut_from_the_text_before_the_held_out_part(monkeypatch):
    ids = torch.arange(3000) % 256
    monkeypatch.setattr(length, "bytes_of_the_bible", lambda: ids)
    small = SMALL | {"steps": 2, "batch": 4, "held_out": 0.1, "held_out_bytes": 200}
    found = length.train(small, "HyPE learned, from max_length 128", 0)
    assert set(found["perplexity"]) == {"8", "40"} and all(
        1 < p < 1000 for p in found["perplexity"].values()
    )
    assert any(
        value for values in found["added"].values() for value in values
    )  # log mu or log tau moved
    assert found == length.train(small, "HyPE learned, from max_length 128", 0)


def test_the_learning_rate_rises_and_falls():
    shares = [share_of_rate(step, 100) for step in range(100)]
    assert shares[0] == 0.1 and shares[9] == shares[10] == 1.0 and shares[-1] < 1e-3
    assert shares[:10] == sorted(shares[:10]) and shares[10:] == sorted(shares[10:], reverse=True)


# --- HyPE against ALiBi ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, mu", [(10, 0.1), (50, 0.002), (33, 0.2)])
def test_bias_errors_against_a_loop(size, mu):
    errors, cubes = [], []
    for i in range(size):
        for j in range(i + 1):
            exact = mpmath.sinh(mpmath.mpf(mu) * (j - i)) / mpmath.mpf(mu)
            errors.append(abs(exact - (j - i)))
            cubes.append(mpmath.mpf(mu) ** 2 * (i - j) ** 3 / 6)
    found = alibi.error_of(size, mu)
    expected = {"max": max(errors), "mean": mpmath.fsum(errors) / len(errors)}
    expected |= {"cubic_max": max(cubes), "cubic_mean": mpmath.fsum(cubes) / len(cubes)}
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-9, abs=1e-12), name


def test_where_the_cubic_term_matters():
    for share in (0.01, 0.1):
        root = mpmath.findroot(lambda x, share=share: mpmath.sinh(x) / x - 1 - share, 0.5)
        assert alibi.root_of_relative_error(share) == pytest.approx(float(root), rel=1e-9)
    integrand = lambda u: abs(u**3 - 6) / 12 * mpmath.exp(-u)
    exact = mpmath.quad(integrand, [0, mpmath.cbrt(6), 60])
    assert alibi.steep_constant() == pytest.approx(float(exact), rel=1e-6)
    # steep enough, and with many tokens inside the reach of the slope, the limit is met
    slope, mu = 0.02, 1 / 4000
    expected = alibi.steep_constant() * (mu / slope) ** 2
    assert alibi.total_variation(4000, slope, mu) == pytest.approx(expected, rel=0.05)


def test_total_variation_against_a_loop():
    size, slope, mu = 30, 0.1, 0.05
    p = [mpmath.exp(-slope * d) for d in range(size)]
    q = [mpmath.exp(-slope / mu * mpmath.sinh(mu * d)) for d in range(size)]
    expected = sum(abs(a / sum(p) - b / sum(q)) for a, b in zip(p, q)) / 2
    assert alibi.total_variation(size, slope, mu) == pytest.approx(float(expected), rel=1e-9)


# --- flash kernels --------------------------------------------------------------------------------------------------


def test_plain_columns_are_the_sinh():
    at = torch.arange(50, dtype=torch.float64)
    mu, tau = torch.tensor([0.02, 0.01]).double(), torch.tensor([3.0, -2.0]).double()
    left, right = flash.plain_columns(at, at, mu, tau, torch.float64)
    expected = tau[:, None, None] * torch.sinh(mu[:, None, None] * (at[None, :] - at[:, None]))
    assert (left @ right.mT - expected).abs().max() < 1e-12


def test_every_way_computes_the_same_attention():
    torch.manual_seed(0)
    qkv = [torch.randn(1, 4, 70, 16) for _ in range(3)]
    found = flash.ways(*qkv)
    assert {"SDPA, no bias", "mask", "two plain columns", "columns", "tiles (blockwise)"} <= set(
        found
    )
    for name, call in found.items():
        plain = name == "SDPA, no bias"
        assert flash.output_error(call(), *qkv, biased=not plain) < 2e-5, name
        assert not plain or flash.output_error(call(), *qkv, biased=True) > 0.1


def test_bias_errors_of_the_ways_are_told_apart():
    found = flash.bias_errors(2048, ["float32", "bfloat16"])
    assert max(found["float32"].values()) < 1e-3
    half = found["bfloat16"]
    assert half["columns"] < 5e-3 < 1 < min(half["two plain columns"], half["mask"])


def test_a_way_that_refuses_the_call_says_why(monkeypatch):
    def refuse():
        raise ValueError("no such kernel\nmore")

    ways = flash.ways
    monkeypatch.setattr(flash, "ways", lambda *qkv: ways(*qkv) | {"other": refuse})
    settings = flash.SETTINGS | {"heads": {"24": 2}, "dim": 8, "rounds": 1}
    found = flash.measure(settings, "cpu", "float32", 24)
    assert found["refused"] == {"other": "no such kernel"} and "other" not in found["ways"]
    assert found["ways"]["SDPA, no bias"]["ratio"] == 1 and found["ways"]["columns"]["error"] < 1e-5
