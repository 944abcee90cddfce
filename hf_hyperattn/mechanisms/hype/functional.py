"""HyPE as functions: attention with the bias, and the bias by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines import Options, attention, dot_score
from ...readable import can_read
from ..checks import check_call, check_choice, check_parameter
from .positions import checked_positions, from_first
from .reference import FORMS, Form, definition
from .score import with_hype


def hype_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mu: float | Tensor,
    tau: float | Tensor,
    form: Form = "sinh",
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(scale · q·k + bias)·V with the bias of HyPE (arXiv 2310.19676), see `hype_bias`.

    Args:
        query: [B, H, N, d], any floating dtype; d at least 2.
        key: [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], Hkv dividing H.
        value: [B, H or Hkv, M, dv].
        attn_mask: bool (True = take part) or additive, broadcastable to [B, H, N, M]. A query that sees no key gives 0.
        dropout_p: probability that a weight is dropped, in [0, 1).
        is_causal: query i sees keys j <= i, by their place in the tensors; intersects with `attn_mask`.
        scale: what q·k is multiplied with; None: 1/sqrt(d).
        enable_gqa: allow fewer heads of keys and values than of queries.
        mu: μ > 0, a float or a tensor of one value per query head.
        tau: τ, finite, from 0, likewise; 0 is attention without the bias.
        form: "sinh" for causal attention, "cosh" for bidirectional attention.
        query_positions: [N] or [B, N], integers or floating point; None: 0, 1, 2, ... Positions get no gradient.
        key_positions: [M] or [B, M], likewise.
        backend: "auto" or the name of an engine. "sdpa" computes the bias as extra columns of Q and K on torch's own
            kernels, "blockwise" evaluates it on tiles, "reference" stores it whole. "auto" takes compiled tiles, or
            else sdpa, where the call allows it and the columns keep the bias to 2e-3, which they do while the largest
            bias of two positions is about 16000 at most (docs/hype.md).

    Returns:
        [B, H, N, dv] in the query's dtype.

    Raises:
        ValueError: an argument out of its range; the message names it, its value and what is allowed.
    """
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, is_causal=is_causal)
    check_choice("form", form, FORMS)
    batch, heads, n, m = *query.shape[:3], key.shape[2]
    score = dot_score(query, key, scale)
    mu = check_parameter("mu", mu, heads, query).to(score.dtype)
    tau = check_parameter("tau", tau, heads, query, least=0.0).to(score.dtype)
    positions = (
        checked_positions("query_positions", query_positions, n, batch, query.device),
        checked_positions("key_positions", key_positions, m, batch, query.device),
    )
    has_positions = query_positions is not None or key_positions is not None
    reach = reach_of(*positions) if has_positions else max(n, m)
    score = with_hype(score, positions, mu, tau, form, reach)
    options = Options(mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)
    out, _ = attention(score, value, options, backend=backend)
    return out.to(query.dtype)


def hype_bias(
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    mu: float | Tensor,
    tau: float | Tensor,
    form: Form,
) -> Tensor:
    """The dense bias of HyPE, straight from the definition.

        form="sinh":   τ · sinh(μ (j - i))                negative for the past
        form="cosh":  -τ · (cosh(μ (i - j)) - 1)

    Args:
        query_positions: i, [N] or [B, N], integers or floating point.
        key_positions: j, [M] or [B, M].
        mu: μ > 0, a float or a tensor of one value per head.
        tau: τ, finite, from 0, likewise.
        form: "sinh" or "cosh".

    Returns:
        [B, H, N, M], with B = 1 for positions without a batch and H = 1 where mu and tau are for all heads; float32,
        or float64 if one of the arguments has it.

    Raises:
        ValueError: an argument out of its range; the message names it, its value and what is allowed.
    """
    check_choice("form", form, FORMS)
    sizes = [t.numel() for t in (mu, tau) if isinstance(t, Tensor)]
    heads, like = max([1, *sizes]), torch.as_tensor(query_positions)
    lengths = [torch.as_tensor(p).shape for p in (query_positions, key_positions)]
    batch = max([shape[0] for shape in lengths if len(shape) == 2], default=1)
    queries, keys = (
        checked_positions(name, p, shape[-1] if shape else 1, batch, like.device)
        for name, p, shape in zip(
            ("query_positions", "key_positions"),
            (query_positions, key_positions),
            lengths,
            strict=True,
        )
    )
    tensors = [t for t in (mu, tau, queries, keys) if isinstance(t, Tensor)]
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    mu = check_parameter("mu", mu, heads, queries).to(dtype)
    tau = check_parameter("tau", tau, heads, queries, least=0.0).to(dtype)
    bias = definition(*from_first(queries, keys, dtype), mu, tau, form)
    return bias.expand(batch, heads, -1, -1)


def reach_of(queries: Tensor, keys: Tensor) -> float | None:
    """The largest distance of two positions; not known where positions cannot be read, or there are none."""
    if not can_read(queries, keys) or not queries.numel() or not keys.numel():
        return None
    ends = [(float(p.min()), float(p.max())) for p in (queries, keys)]
    return max(high for _, high in ends) - min(low for low, _ in ends)
