"""Collaborative heads: the score, as the paper has it (arXiv 2006.16362, sections 3.1 and 3.3).

With query x_i and key y_j, the heads' weights W_Q^h, W_K^h [d, D] and query biases b^h, the logit of head h is

    S_ij = (W_Q^h x_i + b^h) · (W_K^h y_j) / sqrt(d)            and, with a key bias, a term that is constant in the row
         = x_i · (W_Q^h^T W_K^h) y_j / sqrt(d) + c_h · y_j / sqrt(d),      c_h = W_K^h^T b^h

The heads share projections W_Q, W_K [R, D], and head h weighs their dimensions by m_h [R]:

    W_Q^h^T W_K^h  =  Σ_r  m_hr  w_Q,r  w_K,r^T,      S_ij = (q_i ∘ m_h) · k_j / sqrt(d) + c_h · y_j / sqrt(d)

which for R = H·d, all heads' dimensions side by side and m_h the indicator of the head's own, is the same attention.
For fewer dimensions it is a CP decomposition of rank R of the stacked H matrices. c_h · y_j, the content bias, stays
exact.
"""

from __future__ import annotations

from torch import Tensor

from ...engines import repeat_heads, working_dtype


def collaborative_scores(
    query: Tensor, key: Tensor, mixing: Tensor, scale: float, content: Tensor | None = None
) -> Tensor:
    """Dense logits [B, H, N, M].

    Args:
        query: shared queries [B, N, R].
        key: shared keys [B, M, R].
        mixing: [H, R].
        scale: 1/sqrt(d) of the heads as they were.
        content: what each key adds to a head's logits, before scaling, [B, M, H].
    """
    dtype = working_dtype(query, key)
    mixed = query.to(dtype)[:, None] * mixing.to(dtype)[:, None]
    logits = mixed @ key.to(dtype)[:, None].mT
    if content is not None:
        logits = logits + content.to(dtype).mT[:, :, None]
    return logits * scale


def concatenated(x: Tensor, heads: int) -> Tensor:
    """All heads' dimensions side by side: [B, Hkv, L, d] to [B, L, heads·d], each head repeated for its group."""
    return repeat_heads(x, heads).transpose(1, 2).flatten(2)
