"""Pool keys and values into means of windows, and gradients back.

This module shows what the kernel of key-tied attention reads: tokens, and one mean for each
window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....engines import working_dtype
from . import native


@dataclass(frozen=True)
class Levels:
    """Hold keys and values by level.

    Level 0 holds tokens, and level l the means over windows of `sizes[l-1]` tokens.

    Args:
        sizes: Window sizes, bottom first, each dividing the next.
        keys: For every level, [B, Hkv, n_l, d]. Level 0 holds the tokens of the call, padding
            included. Block b of a level above holds tokens start + b·w to start + (b+1)·w - 1 of
            its row. The last block may be missing if it is incomplete: causal queries read complete
            blocks only. Means are in the working dtype. Tokens of a cache may be in half precision.
        values: As `keys`, [B, Hkv, n_l, dv].
        starts: int64 [B], the first real token of every row; None: 0.
        stops: int64 [B], one past the last real token; None: the last token is real.
        held: None if nothing is evicted. Else the number of tokens of the text, and for every level
            the number of rows kept at the front of its tables, and the number of rows evicted after
            them.
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
    """Return keys and values with their means over windows of every level, in O(M).

    Without the kernel, only the tokens are returned: plain torch computes means from its own trees.

    Args:
        key: [B, Hkv, M, d], any floating dtype. Means are float32.
        value: [B, Hkv, M, dv].
        sizes: Window sizes, bottom first, each dividing the next.
        starts, stops: The real tokens of every row, int64 [B]; windows start at the first one.
            None: all are real.
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
    """Return the gradients of tokens [B, H, M, e].

    Gradients of means are added to the gradients of their tokens. The first table is changed in
    place, and returned.

    Args:
        tables: Gradients of every level, tokens first.
        sizes: Window sizes, bottom first.
        starts, stops: First real token of every row, and one past the last.
    """
    tokens = tables[0]
    counts = torch.tensor(stops) - torch.tensor(starts)
    above: Tensor | None = None
    # From the top level down, add to each block the gradient that its parent passes on to each
    # token.
    for level in range(len(sizes), 0, -1):
        blocks = torch.arange(tables[level].shape[2])
        # Tokens in each block: the last one of a row may be incomplete. At least 1, since padded
        # blocks are divided too.
        inside = (counts[:, None] - sizes[level - 1] * blocks).clamp(1, sizes[level - 1])
        each = tables[level] / inside[:, None, :, None]
        if above is not None:
            # A huge window has fewer children than its size allows: do not repeat beyond the
            # existing blocks.
            children = min(sizes[level] // sizes[level - 1], len(blocks))
            each += above.repeat_interleave(children, 2)[:, :, : len(blocks)]
        above = each
    if above is not None:
        children = min(sizes[0], tokens.shape[2])
        for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            by_token = above[row].repeat_interleave(children, 1)
            tokens[row, :, start:stop] += by_token[:, : stop - start]
    return tokens


def span_lists(
    batch: int, length: int, starts: Tensor | None, stops: Tensor | None
) -> tuple[list[int], list[int]]:
    """Return the first real token of every row, and one past the last.

    Args:
        batch: Number of rows.
        length: Number of tokens of a row, padding included.
        starts, stops: int64 [B or 1], or None: 0 and `length`.
    """
    first = [0] * batch if starts is None else starts.tolist()
    last = [length] * batch if stops is None else [min(stop, length) for stop in stops.tolist()]
    if not batch:
        return [], []
    return first * (batch // len(first)), last * (batch // len(last))
