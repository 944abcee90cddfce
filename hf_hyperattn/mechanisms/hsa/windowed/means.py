"""What key-tied attention attends to: tokens, and the means of keys and values over windows of every level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....engines import working_dtype
from . import native


@dataclass(frozen=True)
class Levels:
    """What can be attended to, bottom first: level 0 are the tokens, level l the means over windows of `sizes[l-1]`.

    Args:
        sizes: window sizes, bottom first, each dividing the next.
        keys: for every level, [B, Hkv, n_l, d]. Level 0 is as the call has it, padding included; block b of a level
            above holds the tokens start + b·w .. start + (b+1)·w - 1 of its row. Causal queries read complete blocks
            only, so the last incomplete one may be missing then. Means are in the working dtype. Tokens of a cache may
            be in half precision.
        values: likewise, [B, Hkv, n_l, dv].
        starts: int64 [B], the first real token of every row; None: 0.
        stops: int64 [B], one past the last real token; None: all.
        held: where a cache has forgotten some: how many tokens there are, and for every level how many of the first
            rows its tables hold, and how many after those are gone.
    """

    sizes: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    starts: Tensor | None = None
    stops: Tensor | None = None
    held: tuple[int, tuple[tuple[int, int], ...]] | None = None


def pool_levels(
    key: Tensor,
    value: Tensor,
    sizes: Sequence[int],
    starts: Tensor | None = None,
    stops: Tensor | None = None,
) -> Levels:
    """Means of keys and values over windows of every level, in O(M), for the kernel; tokens alone without one.

    Args:
        key: [B, Hkv, M, d]. value: [B, Hkv, M, dv]. Any floating dtype; means are float32.
        sizes: window sizes, bottom first, each dividing the next.
        starts, stops: the real tokens of every row, int64 [B]; windows start at the first one.
    """
    dtype = working_dtype(key)
    tables = key.to(dtype), value.to(dtype)
    if native.can_serve(tables[0]):
        spans = span_lists(len(key), key.shape[2], starts, stops)
        keys, values = ((t, *native.pool_windows(t, sizes, *spans)) for t in tables)
    else:
        keys, values = ((t,) for t in tables)
    return Levels(tuple(sizes), keys, values, starts, stops)


def unpool_gradients(
    tables: Sequence[Tensor], sizes: Sequence[int], starts: list[int], stops: list[int]
) -> Tensor:
    """Gradients of tokens [B, H, M, e], from those of tokens and means."""
    tokens, counts, above = tables[0], torch.tensor(stops) - torch.tensor(starts), None
    for level in range(len(sizes), 0, -1):
        blocks = torch.arange(tables[level].shape[2])
        inside = (counts[:, None] - sizes[level - 1] * blocks).clamp(1, sizes[level - 1])
        each = tables[level] / inside[:, None, :, None]
        if above is not None:
            children = min(sizes[level] // sizes[level - 1], len(blocks))  # no more than there are
            each += above.repeat_interleave(children, 2)[:, :, : len(blocks)]
        above = each
    if above is not None:
        for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            children = min(sizes[0], tokens.shape[2])
            tokens[row, :, start:stop] += above[row].repeat_interleave(children, 1)[
                :, : stop - start
            ]
    return tokens


def span_lists(
    batch: int, length: int, starts: Tensor | None, stops: Tensor | None
) -> tuple[list[int], list[int]]:
    """First real token of every row, and one past the last."""
    first = [0] * batch if starts is None else starts.tolist()
    last = [length] * batch if stops is None else [min(stop, length) for stop in stops.tolist()]
    if not batch:
        return [], []
    return first * (batch // len(first)), last * (batch // len(last))
