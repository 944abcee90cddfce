"""Multiple kernel learning as a function with the arguments of PyTorch's SDPA.

SDPA is `torch.nn.functional.scaled_dot_product_attention`.
"""

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
        query: Shape [B, H, N, d], any floating dtype. Arithmetic is float32, or float64 for float64
            inputs. In half precision the weighted queries are rounded to the query's dtype.
        key: Shape [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], where Hkv divides H.
        value: Shape [B, H or Hkv, M, dv].
        attn_mask: Bool (True = visible) or additive, broadcastable to [B, H, N, M]; it is not
            weighted. A query that sees no key gives 0.
        dropout_p: Probability of dropping a weight, in [0, 1).
        is_causal: Query i sees keys j <= i, combined with `attn_mask`.
        scale: Scale of the logits; None means 1/sqrt(d).
        enable_gqa: Allow fewer key and value heads than query heads.
        beta: Logits of the weights: shape [H], or [B, H, N] with `key_beta`.
        key_beta: Logits of the keys' weights, shape [B, H, M].
        combine: Sum the weighted kernels over heads into one attention for the values of all heads.
        backend: "auto" or the name of an engine.

    Returns:
        Shape [B, H, N, dv], in the query's dtype.

    Raises:
        ValueError: An argument is out of range; the message names it, its value and the allowed
            values.
    """
    flags = dict(is_causal=is_causal, combine=combine)
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, **flags)
    check_beta(query, key, beta, key_beta)
    score = dot_score(query, key, scale)
    options = Options(mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)
    # Weight the logits, then let an engine compute softmax and values.
    row = head_weights(beta.to(score.dtype))
    if key_beta is None:
        score = scaled_score(score, row, options)
    else:
        score = weighted_score(score, row, head_weights(key_beta.to(score.dtype)))
    # One attention for all heads, else one per head.
    if combine:
        out, _ = combined_attention(attention, score, value, options, backend=backend)
        return out.to(query.dtype)
    out, _ = attention(score, repeat_heads(value, score.kv_heads), options, backend=backend)
    return out.to(query.dtype)


def check_beta(query: Tensor, key: Tensor, beta: Tensor, key_beta: Tensor | None) -> None:
    """Raise ValueError if the logits of the weights have a wrong shape."""
    batch, heads, n = query.shape[:3]
    m = key.shape[2]
    # `beta` has one number per head, or one per head and token if `key_beta` is given.
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
