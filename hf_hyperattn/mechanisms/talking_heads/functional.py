"""Talking-heads attention as a function, shaped like `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from torch import Tensor

from ...engines import Options, dot_score
from ..checks import check_call, check_tensor
from .operator import talking_heads


def talking_heads_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    before: Tensor | None,
    after: Tensor | None,
    backend: str = "auto",
) -> Tensor:
    """P_w · softmax(P_l · (scale · q·k) + mask) · V: talking heads (arXiv 2003.02436), mixing logits and weights.

    Args:
        query: [B, H, N, d], any floating dtype. Arithmetic is float32, float64 for float64 inputs.
        key: [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], Hkv dividing H.
        value: [B, H or Hkv, M, dv].
        attn_mask: bool (True = take part) or additive, broadcastable to [B, H, N, M]; it acts on the mixed logits. A
            query that sees no key gives 0.
        dropout_p: probability that a mixed weight is dropped, in [0, 1).
        is_causal: query i sees keys j <= i; intersects with `attn_mask`.
        scale: what q·k is multiplied with; None: 1/sqrt(d).
        enable_gqa: allow fewer heads of keys and values than of queries; query heads are what is mixed.
        before: P_l, [H, H]: row h says what head h takes from the logits of each head. None: the identity.
        after: P_w, [H, H], likewise for the weights; their rows then need not sum to 1. None: the identity.
        backend: "reference" (dense), "blockwise" (no N x M matrix is stored), or "auto".

    Returns:
        [B, H, N, dv] in the query's dtype.

    Raises:
        ValueError: an argument out of its range; the message names it, its value and what is allowed.
    """
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, is_causal=is_causal)
    heads = query.shape[1]
    for name, matrix in (("before", before), ("after", after)):
        if matrix is not None:
            check_tensor(name, matrix)
        if matrix is not None and (
            tuple(matrix.shape) != (heads, heads) or not matrix.is_floating_point()
        ):
            raise ValueError(
                f"{name} has shape {tuple(matrix.shape)} and dtype {matrix.dtype}; allowed: floating point numbers, "
                f"one for each pair of query heads, {(heads, heads)}; or None"
            )
    options = Options(mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)
    score = dot_score(query, key, scale)
    out, _ = talking_heads(score, value, options, before=before, after=after, backend=backend)
    return out.to(query.dtype)
