"""Multiple kernel learning by definition: logits are weighted before the softmax.

Let M be the number of heads, S^m the logits of head m, and β a softmax over heads. There are one
global set of weights, and a localized form whose weights depend on both tokens:

    global:       S^m_ij <- M·β_m · S^m_ij
    conditional:  S^m_ij <- (M·β_{i,m}) · (M·β_{j,m}) · S^m_ij
    combined:     S_ij = Σ_m of either, one attention for all heads

With uniform β only the combined form differs from ordinary attention.
"""

from __future__ import annotations

import torch
from torch import Tensor


def head_weights(beta: Tensor, heads: tuple[int, ...] | None = None) -> Tensor:
    """Return M·softmax(beta) over heads: axis 1 of [B, H, L], or the axis of [H].

    Args:
        beta: Logits of the weights.
        heads: The M heads that share the weights; the others have weight 1. None means all.
    """
    axis = min(1, beta.dim() - 1)
    if heads is None:
        return beta.shape[axis] * torch.softmax(beta, axis)
    index = torch.tensor(heads, device=beta.device)
    part = len(heads) * torch.softmax(beta.index_select(axis, index), axis)
    return torch.ones_like(beta).index_copy(axis, index, part)


def weighted(logits: Tensor, row: Tensor, column: Tensor | None = None) -> Tensor:
    """Multiply dense logits by their weights.

    Args:
        logits: S, shape [B, H, N, M].
        row: Weights, shape [H] for the global form, [B, H, N] for the conditional one.
        column: Weights of the keys, shape [B, H, M], for the conditional form.

    Returns:
        Shape [B, H, N, M].
    """
    if column is None:
        return logits * row[:, None, None]
    return logits * row[..., :, None] * column[..., None, :]


def combined(logits: Tensor) -> Tensor:
    """Return the sum of the weighted kernels, shape [B, 1, N, M]."""
    return logits.sum(1, keepdim=True)
