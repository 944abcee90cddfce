"""FlexAttention, torch's own way to a fused score, as a cross-check of the definitions.

It is no engine of ours. Its gradients of statistics per query and per key are sums by atomic operations, so they differ
from run to run; on the CPU it has no backward pass; and a score there is a function of single numbers, which the rooms'
terms, written for tiles, are not. What has no Triton form goes to the blockwise engine.
"""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hf_hyperattn.functional import cone_attention, hype_attention
from tests.oracles.cases import assert_close, qkv

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def triangle(n, m):
    return create_block_mask(
        lambda b, h, i, j: j <= i, B=None, H=None, Q_LEN=n, KV_LEN=m, device="cpu"
    )


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_umbral(causal):
    q, k, v = qkv(batch=2, heads=3, lq=37, lk=37, d=9, dtype=torch.float32, scale=1.5)
    gamma, radius = 0.8, 1.2
    (hq, xq), (hk, xk) = ((t[..., -1].div(9).exp(), t[..., :-1]) for t in (q, k))
    xq, xk = xq * hq[..., None], xk * hk[..., None]
    norm_q, norm_k = xq.square().sum(-1), xk.square().sum(-1)

    def score(dot, b, h, i, j):
        distance = (norm_q[b, h, i] + norm_k[b, h, j] - 2 * dot).clamp_min(0).sqrt()
        low, high = hq[b, h, i], hk[b, h, j]
        half = (distance / math.sinh(radius) + low + high) / 2
        return -gamma * torch.maximum(torch.maximum(low, high), half)

    mask = triangle(37, 37) if causal else None
    flexible = flex_attention(xq, xk, v, score_mod=score, block_mask=mask, scale=1.0)
    ours = cone_attention(
        q, k, v, is_causal=causal, gamma=gamma, radius=radius, backend="blockwise"
    )
    assert_close(ours, flexible, 1e-5, "output")


@pytest.mark.parametrize("form", ["sinh", "cosh"])
def test_hype(form):
    q, k, v = qkv(batch=2, heads=2, lq=30, lk=45, d=8, dtype=torch.float32)
    mu, tau = 0.03, 7.0

    def score(dot, b, h, i, j):
        x = mu * (j - i)
        return dot + (tau * torch.sinh(x) if form == "sinh" else -tau * (torch.cosh(x) - 1))

    flexible = flex_attention(q, k, v, score_mod=score)
    ours = hype_attention(q, k, v, mu=mu, tau=tau, form=form, backend="blockwise")
    assert_close(ours, flexible, 1e-5, "output")
