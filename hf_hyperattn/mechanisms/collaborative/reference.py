"""The score of collaborative heads by definition.

From arXiv 2006.16362, sections 3.1 and 3.3.

With query x_i, key y_j, the heads' weights W_Q^h, W_K^h [d, D] and query biases b^h, the logit of
head h is

    S_ij = (W_Q^h x_i + b^h) · (W_K^h y_j) / sqrt(d) = x_i · (W_Q^h^T W_K^h) y_j / sqrt(d) + c_h ·
    y_j / sqrt(d),      c_h = W_K^h^T b^h

A key bias would only add a constant to each row. The heads share projections W_Q, W_K [R, D], and
head h weights their dimensions by m_h [R]:

    W_Q^h^T W_K^h  =  Σ_r  m_hr  w_Q,r  w_K,r^T,      S_ij = (q_i ∘ m_h) · k_j / sqrt(d) + c_h · y_j
    / sqrt(d)

For R = H·d, with the dimensions of all heads side by side and m_h the indicator of the head's own,
this is ordinary attention. For smaller R it is a CP decomposition of rank R of the H stacked
matrices. The content bias c_h · y_j stays exact.
"""

from __future__ import annotations

from torch import Tensor

from ...engines import repeat_heads, working_dtype


def collaborative_scores(
    query: Tensor, key: Tensor, mixing: Tensor, scale: float, content: Tensor | None = None
) -> Tensor:
    """Compute dense logits of collaborative heads.

    Args:
        query: Shared queries, shape [B, N, R].
        key: Shared keys, shape [B, M, R].
        mixing: Shape [H, R].
        scale: 1/sqrt(d) of the original heads.
        content: Addition of each key to a head's logits, before scaling, shape [B, M, H].

    Returns:
        Shape [B, H, N, M].
    """
    dtype = working_dtype(query, key)
    mixed = query.to(dtype)[:, None] * mixing.to(dtype)[:, None]
    logits = mixed @ key.to(dtype)[:, None].mT
    if content is not None:
        logits = logits + content.to(dtype).mT[:, :, None]
    return logits * scale


def concatenate_heads(x: Tensor, heads: int) -> Tensor:
    """Put all heads' dimensions side by side.

    Args:
        x: Shape [B, Hkv, L, d]; each head is repeated for its group.
        heads: Number of query heads.

    Returns:
        Shape [B, L, heads·d].
    """
    return repeat_heads(x, heads).transpose(1, 2).flatten(2)
