"""HSA in plain operators, as exported programs have it, against the ways that lay trees."""

import random

import pytest
import torch

from hf_hyperattn.engines import Options
from hf_hyperattn.functional import hierarchical_attention
from hf_hyperattn.mechanisms.hsa import portable
from hf_hyperattn.mechanisms.hsa.config import Rule
from hf_hyperattn.mechanisms.hsa.request import Request, attend_tied

BATCH, HEADS = 2, 4


def call(seed: int, tying: str, is_causal: bool):
    """Score features, values, options and request of a random call, and which of its queries are no padding."""
    pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n, groups = pick.randint(3, 40), pick.choice([2, 4])
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    ones = torch.ones(n, n, dtype=torch.bool)
    real, kind = (
        torch.ones(BATCH, n, dtype=torch.bool),
        pick.choice(["none", "left", "scattered", "window", "packed"]),
    )
    if kind == "scattered":
        real[1] = torch.rand(n, generator=generator) < 0.7
        real[1, pick.randrange(n)] = True
    if kind in ("left", "scattered"):
        real[0, : pick.randrange(n)] = False
    mask = (
        None if kind == "none" else (real[:, None, None, :] & (ones.tril() if is_causal else ones))
    )
    if kind == "window" and is_causal:
        mask = (ones.tril() & ~ones.tril(-4)).expand(BATCH, 1, n, n)
    if kind == "packed" and tying == "key":
        number = (torch.rand(BATCH, 1, n, generator=generator) < 0.2).cumsum(-1)
        same = (number[..., None] == number[..., None, :]) & (ones.tril() if is_causal else ones)
        mask = same & real[:, None, :, None] & real[:, None, None, :]
    rule = Rule("both", pick.choice([True, False]))
    if tying == "key":
        top_k = (1, 2, 0, 3) if is_causal else 0
        rule = Rule(
            "key",
            True,
            (pick.randint(0, 5), 0, 3, 1),
            (1, 0, 2, pick.randint(0, 3)),
            top_k,
            normal(HEADS),
        )
        if pick.random() < 0.5:  # the same for all heads
            rule = Rule(
                "key", True, pick.randint(0, 5), pick.randint(0, 3), 2 if is_causal else 0, 0.25
            )
    options = Options(
        mask,
        normal(1, HEADS, n, n) if pick.random() < 0.3 else None,
        is_causal and mask is None,
        window=pick.choice([None, 3]) if is_causal and mask is None else None,
        sinks=normal(HEADS) if tying == "key" and pick.random() < 0.3 else None,
    )
    sizes = pick.choice([(2, 4), (3,), (4, 16), (2, 4, 8), ()])
    features = normal(BATCH, HEADS, n, 8), normal(BATCH, groups, n, 8), normal(BATCH, groups, n, 5)
    return *features, options, Request(sizes, rule, is_causal, weights=True), real


@pytest.mark.parametrize("tying, is_causal", [("both", False), ("key", False), ("key", True)])
def test_agrees_with_trees(tying, is_causal):
    for seed in range(40):
        query, key, value, options, request, real = call(seed, tying, is_causal)
        assert portable.supports_call(query, key, options, request)
        expected = attend_tied(query, key, value, options, request)
        for got, want in zip(
            portable.attend_densely(query, key, value, options, request), expected, strict=True
        ):
            assert ((got - want) * real[:, None, :, None]).abs().max() < 1e-9, (
                seed,
                options,
                request,
            )


def test_a_mask_that_tying_both_forbids_gives_no_numbers():
    query, key, value, options, request, _ = call(0, "both", False)
    hides = torch.ones(BATCH, 1, *query.shape[2:3] * 2, dtype=torch.bool)
    hides[1, 0, 0, 2] = False
    out, _ = portable.attend_densely(query, key, value, Options(hides), request)
    assert out[0].isfinite().all() and out[1].isnan().all()


class OverTrees(torch.nn.Module):
    def forward(self, x, ids):
        return hierarchical_attention(x, x, x, hierarchy=ids)


def test_onnx_refuses_trees(monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(
        ValueError, match="exported to ONNX over windows alone; allowed: no hierarchy="
    ) as caught:
        torch.export.export(
            OverTrees(), (torch.randn(1, 2, 8, 4), torch.arange(8)[None, :, None] // 4)
        )
    assert "\n" not in str(caught.value)


def test_what_is_left_to_the_operator():
    query, key, _, _, request, _ = call(0, "key", False)
    refine = Rule("key", refine_top_k=2)
    assert not portable.supports_call(
        query, key, Options(), Request(request.hierarchy, refine, False)
    )
    assert not portable.supports_call(
        query[:, :, -1:], key, Options(), Request(request.hierarchy, refine, True)
    )
    assert not portable.supports_call(
        query, key, Options(), Request(torch.zeros(2, 3, 1), request.rule, False)
    )
