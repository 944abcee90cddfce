"""Other ways to the same results: what users have today, and what torch offers for scores of one's own."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

#: Names of ways that have no backward pass on this device.
ONLY_FORWARD = () if torch.cuda.is_available() else ("flex",)


def hidden(logits: Tensor, causal: bool) -> Tensor:
    """Logits with the later keys at -inf."""
    if not causal:
        return logits
    n, m = logits.shape[-2:]
    return logits.masked_fill(
        torch.ones(n, m, dtype=torch.bool, device=logits.device).triu(1), float("-inf")
    )


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Dot-product attention with the whole matrix."""
    logits = (q * q.shape[-1] ** -0.5) @ k.mT
    return hidden(logits, causal).softmax(-1) @ v


def cdist_umbral(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Umbral cones by the formula as it is published (Coneheads, section 4), with γ = r = 1:

    S = -max(h_q, h_k, (D / sinh r + h_q + h_k) / 2), D by torch.cdist, ξ as the mapping. This is what users have.
    """
    heights = [torch.exp(x[..., -1:].float() / x.shape[-1]) for x in (q, k)]
    (xq, hq), (xk, hk) = ((x[..., :-1].float() * h, h[..., 0]) for x, h in zip((q, k), heights))
    distance = torch.cdist(xq, xk, compute_mode="donot_use_mm_for_euclid_dist")
    hq, hk = hq[..., :, None], hk[..., None, :]
    sinh = torch.sinh(torch.ones(()))
    logits = -torch.maximum(torch.maximum(hq, hk), (distance / sinh + hq + hk) / 2)
    return (hidden(logits, causal).softmax(-1) @ v.float()).to(q.dtype)


def dense_hype(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """HyPE as a stored bias, given to SDPA as its mask."""
    from hf_hyperattn.functional import hype_bias
    from hf_hyperattn.mechanisms.hype.config import HypeConfig

    m = k.shape[2]
    mu, tau = HypeConfig(max_length=m).compute_starts("sinh", q.shape[1])
    at = torch.arange(m, device=q.device)
    bias = hype_bias(
        at[m - q.shape[2] :], at, mu=torch.tensor(mu), tau=torch.tensor(tau), form="sinh"
    )
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, hidden(bias, causal).to(q.dtype)
    )


@functools.cache
def compiled_flex():
    """FlexAttention as its documentation has it."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def causal_blocks(n: int, m: int, device: str):
    """FlexAttention's block mask of [n, m] pairs, queries seeing no later key."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: j <= i, None, None, n, m, device=device)


def flex(score, value: Tensor, causal: bool) -> Tensor:
    """A pair score by FlexAttention: the statistics are captured and indexed."""
    (term,) = score.terms
    row, column, head = ([t.contiguous() for t in side] for side in term.numbers()[:3])

    def modified(dot, b, h, i, j):
        return term.term.logits(
            dot, [t[b, h, i] for t in row], [t[b, h, j] for t in column], [t[h] for t in head]
        )

    blocks = (
        causal_blocks(score.query.shape[2], score.key.shape[2], value.device.type)
        if causal
        else None
    )
    return compiled_flex()(
        score.query,
        score.key,
        value.to(score.query.dtype),
        score_mod=modified,
        block_mask=blocks,
        scale=1.0,
    )


def flex_umbral(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Umbral cone attention by FlexAttention."""
    from hf_hyperattn.mechanisms.cone.functional import cone_space

    space = cone_space(q, "umbral", None, 1.0, 1.0, True, False)
    return flex(space.score(q, k), v, causal).to(q.dtype)


def flex_geodesic(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Geodesic hyperbolic attention by FlexAttention."""
    from hf_hyperattn.mechanisms.hyperbolic.functional import hyperbolic_space

    space = hyperbolic_space(q, None, 1.0, 1.0, "geodesic")
    return flex(space.score(q, k), v, causal).to(q.dtype)
