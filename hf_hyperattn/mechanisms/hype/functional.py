"""Provide HyPE as functions: attention with the bias, and the bias itself.

Arguments are named as in `torch.nn.functional.scaled_dot_product_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines import Options, attention, dot_score
from ...utils.readable import can_read
from ..checks import check_call, check_choice, check_parameter
from ..positions import check_call_positions, check_positions, subtract_first
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
    """Compute softmax(scale · q·k + bias)·V with the bias of HyPE (arXiv 2310.19676).

    `hype_bias` has the formula of the bias.

    Args:
        query: Queries [B, H, N, d], any floating dtype; d is at least 2.
        key: Keys [B, H, M, d]. With `enable_gqa` [B, Hkv, M, d]; Hkv divides H.
        value: Values [B, H or Hkv, M, dv].
        attn_mask: Bool (True = visible) or additive, broadcastable to [B, H, N, M]. A query that
            sees no key gives 0.
        dropout_p: Probability that a weight is dropped, in [0, 1).
        is_causal: Let query i see only keys j <= i, by their places in the tensors. Combined with
            `attn_mask`, both apply.
        scale: Factor of q·k. None (default): 1/sqrt(d).
        enable_gqa: Allow fewer heads of keys and values than of queries.
        mu: μ > 0, a float, or a tensor with one value per query head.
        tau: τ >= 0, finite, a float, or a tensor with one value per query head. 0 means no bias.
        form: "sinh" for causal attention, "cosh" for bidirectional attention.
        query_positions: Positions [N] or [B, N], integers or floating point. They get no gradient.
            None (default): 0, 1, 2, ...
        key_positions: Positions [M] or [B, M], likewise.
        backend: "auto" (default), or the name of an engine. "sdpa" computes the bias as extra
            columns of Q and K on torch's own kernels, "blockwise" evaluates it on tiles, and
            "reference" stores it whole. "auto" takes compiled tiles if the call allows them, or
            else sdpa. It takes sdpa only if the columns keep the bias to 2e-3. They do while the
            largest bias of two positions is at most about 16000 (docs/hype.md).

    Returns:
        Outputs [B, H, N, dv] in the query's dtype.

    Raises:
        ValueError: An argument is out of range. The message names it, its value and the allowed
            values.
    """
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, is_causal=is_causal)
    check_choice("form", form, FORMS)
    heads = query.shape[1]
    score = dot_score(query, key, scale)
    mu = check_parameter("mu", mu, heads, query).to(score.dtype)
    tau = check_parameter("tau", tau, heads, query, least=0.0).to(score.dtype)
    positions = check_call_positions(query, key, query_positions, key_positions)
    # Default positions need not be read to know their largest distance.
    has_positions = query_positions is not None or key_positions is not None
    reach = measure_reach(*positions) if has_positions else max(query.shape[2], key.shape[2])
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
    """Return the dense bias of HyPE, computed from the definition.

        form="sinh":   τ · sinh(μ (j - i))                negative for the past
        form="cosh":  -τ · (cosh(μ (i - j)) - 1)

    Args:
        query_positions: Positions i, [N] or [B, N], integers or floating point.
        key_positions: Positions j, [M] or [B, M].
        mu: μ > 0, a float, or a tensor with one value per head.
        tau: τ >= 0, finite, a float, or a tensor with one value per head.
        form: "sinh" or "cosh".

    Returns:
        Bias [B, H, N, M]. B is 1 for positions without a batch axis, H is 1 if mu and tau are for
        all heads. The dtype is float32, or float64 if an argument has it.

    Raises:
        ValueError: An argument is out of range. The message names it, its value and the allowed
            values.
    """
    check_choice("form", form, FORMS)
    heads = max([1, *(t.numel() for t in (mu, tau) if isinstance(t, Tensor))])
    # Sizes are read before the check, which needs them. A wrong type still fails there.
    query_shape = torch.as_tensor(query_positions).shape
    key_shape = torch.as_tensor(key_positions).shape
    batch = max([s[0] for s in (query_shape, key_shape) if len(s) == 2], default=1)
    device = torch.as_tensor(query_positions).device
    n, m = (s[-1] if s else 1 for s in (query_shape, key_shape))
    queries = check_positions("query_positions", query_positions, n, batch, device)
    keys = check_positions("key_positions", key_positions, m, batch, device)
    tensors = [t for t in (mu, tau, queries, keys) if isinstance(t, Tensor)]
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    mu = check_parameter("mu", mu, heads, queries).to(dtype)
    tau = check_parameter("tau", tau, heads, queries, least=0.0).to(dtype)
    bias = definition(*subtract_first(queries, keys, dtype), mu, tau, form)
    return bias.expand(batch, heads, -1, -1)


def measure_reach(queries: Tensor, keys: Tensor) -> float | None:
    """Return the largest distance of two positions.

    None if there are no positions, or if they cannot be read.
    """
    if not can_read(queries, keys) or not queries.numel() or not keys.numel():
        return None
    highest = max(float(queries.max()), float(keys.max()))
    lowest = min(float(queries.min()), float(keys.min()))
    return highest - lowest
