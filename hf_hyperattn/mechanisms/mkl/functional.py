"""Attention weighted by multiple kernel learning, as a function shaped like torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from torch import Tensor

from ...engines import Options, attention, dot_score, repeat_heads
from ..checks import check_call, check_tensor
from .layer import combined_attention, scaled_score
from .reference import head_weights
from .terms import weighted_score


def mkl_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    beta: Tensor,
    key_beta: Tensor | None = None,
    combine: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Attention whose heads are kernels with weights β = softmax over heads of `beta`.

        S^m_ij = M·β_m · scale · q_i·k_j                       beta [H]
        S^m_ij = (M·β_{i,m}) · (M·β_{j,m}) · scale · q_i·k_j   beta [B, H, N], key_beta [B, H, M]

    Args:
        query: [B, H, N, d], any floating dtype. Arithmetic is float32, float64 for float64 inputs; in half precision
            the weighted queries are rounded as the query is.
        key: [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], Hkv dividing H.
        value: [B, H or Hkv, M, dv].
        attn_mask: bool (True = take part) or additive, broadcastable to [B, H, N, M]; not weighted. A query that sees
            no key gives 0.
        dropout_p: probability that a weight is dropped, in [0, 1).
        is_causal: query i sees keys j <= i; intersects with `attn_mask`.
        scale: of the logits; None: 1/sqrt(d).
        enable_gqa: allow fewer heads of keys and values than of queries.
        beta: logits of the weights: [H], or [B, H, N] with `key_beta`.
        key_beta: [B, H, M].
        combine: sum the weighted kernels over heads into one attention, which all heads' values share.
        backend: "auto" or the name of an engine.

    Returns:
        [B, H, N, dv] in the query's dtype.

    Raises:
        ValueError: an argument out of its range; the message names it, its value and what is allowed.
    """
    flags = dict(is_causal=is_causal, combine=combine)
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, **flags)
    check_beta(query, key, beta, key_beta)
    score = dot_score(query, key, scale)
    options = Options(mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)
    row = head_weights(beta.to(score.dtype))
    if key_beta is None:
        score = scaled_score(score, row, options)
    else:
        score = weighted_score(score, row, head_weights(key_beta.to(score.dtype)))
    if combine:
        out, _ = combined_attention(attention, score, value, options, backend=backend)
        return out.to(query.dtype)
    out, _ = attention(score, repeat_heads(value, score.kv_heads), options, backend=backend)
    return out.to(query.dtype)


def check_beta(query: Tensor, key: Tensor, beta: Tensor, key_beta: Tensor | None) -> None:
    """Shapes of the weights' logits."""
    batch, heads, n, m = *query.shape[:3], key.shape[2]
    rules: dict[str, tuple[Tensor, tuple[int, ...]]] = {"beta": (beta, (heads,))}
    if key_beta is not None:
        rules = {"beta": (beta, (batch, heads, n)), "key_beta": (key_beta, (batch, heads, m))}
    for name, (t, shape) in rules.items():
        check_tensor(name, t)
        if tuple(t.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; allowed: {shape}, and [batch, heads, length] for both beta and "
                "key_beta where key_beta is given"
            )
