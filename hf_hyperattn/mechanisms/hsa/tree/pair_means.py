"""Means of a matrix of pairs, such as a position bias, over the pairs of sibling blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import Slots
from .up_down import mean


def pair_means(slots: Slots, pairs: Tensor) -> list[Tensor]:
    """For every group the means over i in B, j in C of siblings B and C; of leaves the entries themselves.

    Args:
        pairs: [1 or batch, 1 or H, N, N]; what it holds at padding is not looked at.

    Returns:
        For each group [R or 1, 1 or H, F, b, b].
    """
    rows, length = slots.apart, pairs.shape[-1]
    one = pairs.new_ones(rows, 1, length, 1)
    real = slots.from_leaves(slots.to_leaves(one))[:, :, None, :, 0] > 0
    pairs = pairs.masked_fill(~real, 0.0)
    pairs = pairs if rows == 1 else pairs.expand(rows, -1, -1, -1)
    members = torch.eye(length, dtype=pairs.dtype, device=pairs.device).expand(rows, 1, -1, -1)
    over_rows, of_tokens = (_pooled(slots, slots.to_leaves(x)) for x in (pairs, members))
    return [
        slots.children(over_rows, group) @ slots.children(of_tokens, group).transpose(-1, -2)
        for group in slots.groups
    ]


def _pooled(slots: Slots, leaves: Tensor):
    """A store of the means of these numbers of the leaves, [R, H, leaves, w]."""
    store = slots.store(leaves)
    for group in slots.groups:
        slots.put_parents(store, group, mean(group, slots.children(store, group)))
    return store
