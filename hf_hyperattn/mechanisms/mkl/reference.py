"""Multiple kernel learning: the definition. Heads are kernels, and their logits are weighted before softmax.

With M heads, S^m the logits of head m, and β a softmax over heads (multiple kernel learning with one set of weights,
and its localized form, where weights depend on both tokens):

    global:       S^m_ij <- M·β_m · S^m_ij
    conditional:  S^m_ij <- (M·β_{i,m}) · (M·β_{j,m}) · S^m_ij
    combined:     S_ij = Σ_m of either, one attention for all heads

Uniform β changes nothing but the combined form.
"""

from __future__ import annotations

import torch
from torch import Tensor


def head_weights(beta: Tensor, heads: tuple[int, ...] | None = None) -> Tensor:
    """M·softmax(beta) over the heads, axis 1 of [B, H, L] or the only one of [H].

    Args:
        beta: logits of the weights.
        heads: the M heads that share the weights; the others have weight 1. None: all.
    """
    axis = min(1, beta.dim() - 1)
    if heads is None:
        return beta.shape[axis] * torch.softmax(beta, axis)
    index = torch.tensor(heads, device=beta.device)
    part = len(heads) * torch.softmax(beta.index_select(axis, index), axis)
    return torch.ones_like(beta).index_copy(axis, index, part)


def weighted(logits: Tensor, row: Tensor, column: Tensor | None = None) -> Tensor:
    """The dense logits with their weights, [B, H, N, M].

    Args:
        logits: S, [B, H, N, M].
        row: weights [H] for the global form, [B, H, N] for the conditional one.
        column: weights [B, H, M] for the conditional form.
    """
    if column is None:
        return logits * row[:, None, None]
    return logits * row[..., :, None] * column[..., None, :]


def combined(logits: Tensor) -> Tensor:
    """The sum of weighted kernels, [B, 1, N, M]."""
    return logits.sum(1, keepdim=True)
