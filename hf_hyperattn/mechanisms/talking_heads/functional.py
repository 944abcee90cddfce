"""Talking-heads attention as a function with the arguments of PyTorch's SDPA.

SDPA is `torch.nn.functional.scaled_dot_product_attention`.
"""

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
    """Talking-heads attention (arXiv 2003.02436): mix logits and weights across heads.

        P_w · softmax(P_l · (scale · q·k) + mask) · V

    Args:
        query: Shape [B, H, N, d], any floating dtype. Arithmetic is float32, or float64 for float64
            inputs.
        key: Shape [B, H, M, d]; with `enable_gqa` [B, Hkv, M, d], where Hkv divides H.
        value: Shape [B, H or Hkv, M, dv].
        attn_mask: Bool (True = visible) or additive, broadcastable to [B, H, N, M]; it applies to
            the mixed logits. A query that sees no key gives 0.
        dropout_p: Probability of dropping a mixed weight, in [0, 1).
        is_causal: Query i sees keys j <= i, combined with `attn_mask`.
        scale: Factor of q·k; None means 1/sqrt(d).
        enable_gqa: Allow fewer key and value heads than query heads; query heads are mixed.
        before: P_l, shape [H, H]: row h holds the share of each head's logits in head h. None means
            the identity.
        after: P_w, shape [H, H], the same for the weights; rows of weights then need not sum to 1.
            None means the identity.
        backend: "reference" (dense), "blockwise" (stores no N x M matrix), or "auto".

    Returns:
        Shape [B, H, N, dv], in the query's dtype.

    Raises:
        ValueError: An argument is out of range; the message names it, its value and the allowed
            values.
    """
    check_call(query, key, value, attn_mask, dropout_p, scale, enable_gqa, is_causal=is_causal)
    heads = query.shape[1]
    for name, matrix in (("before", before), ("after", after)):
        # None is the identity, which costs nothing.
        if matrix is None:
            continue
        check_tensor(name, matrix)
        if tuple(matrix.shape) != (heads, heads) or not matrix.is_floating_point():
            raise ValueError(
                f"{name} has shape {tuple(matrix.shape)} and dtype {matrix.dtype}; allowed: floating point numbers, "
                f"one for each pair of query heads, {(heads, heads)}; or None"
            )
    # Logits of the dot product; mixing, softmax and values follow in the operator.
    options = Options(mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)
    score = dot_score(query, key, scale)
    out, _ = talking_heads(score, value, options, before=before, after=after, backend=backend)
    return out.to(query.dtype)
