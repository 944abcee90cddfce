"""Keys and values as they come, and the means of their windows, each computed once: what decoding reads.

A generated token completes one window in w_1, of which one in w_2/w_1 completes one of the next level, so keeping all
means up to date costs O(1) a token, and no tensor is copied whole for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines import working_dtype
from .levels import Levels

#: Set on the key tensor that a cache hands to attention: the `Store` it comes from.
STORE = "_hyperattn_store"


class Growing:
    """A tensor [B, H, length, e] that tokens are added to; room doubles, so that adding costs O(1) a token."""

    def __init__(self, like: Tensor, dtype: torch.dtype | None = None):
        self.length = 0
        self.room = like.new_empty((*like.shape[:2], 0, like.shape[3]), dtype=dtype or like.dtype)

    def view(self) -> Tensor:
        """What there is so far."""
        return self.room[:, :, : self.length]

    def extend(self, length: int) -> None:
        """Make it so long; what is new holds nothing in particular."""
        if length > self.room.shape[2]:
            grown = self.room.new_empty(
                (*self.room.shape[:2], max(length, 2 * self.length), self.room.shape[3])
            )
            grown[:, :, : self.length] = self.view()
            self.room = grown
        self.length = length

    def append(self, new: Tensor) -> None:
        """Add tokens [B, H, n, e]."""
        start = self.length
        self.extend(start + new.shape[2])
        self.room[:, :, start : self.length] = new

    def pick(self, rows: Tensor) -> None:
        """Take these rows of the batch."""
        self.room = self.view()[rows.to(self.room.device)]


class Store:
    """The keys and values of one layer.

    Args:
        key: [B, Hkv, n, d] and
        value: [B, Hkv, n, dv]: what the first tokens look like; nothing is added yet.
    """

    def __init__(self, key: Tensor, value: Tensor):
        self.tokens = Growing(key), Growing(value)
        half = working_dtype(key) != key.dtype
        # means and logits are float32: half precision is kept in both, so that no step converts what it has converted
        self.exact = (Growing(key, torch.float32), Growing(value, torch.float32)) if half else self.tokens
        self.sizes: tuple[int, ...] = ()
        self.starts: Tensor | None = None
        self.means: list[tuple[Growing, Growing]] = []
        self.counts: list[list[int]] = []  # complete windows of every level and row

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add tokens."""
        for pair in {id(p): p for p in (self.tokens, self.exact)}.values():
            for grown, new in zip(pair, (key, value), strict=True):
                grown.append(new)

    def levels(self, sizes: tuple[int, ...], starts: Tensor | None) -> Levels:
        """The tokens, and the means of all windows that are complete.

        Args:
            sizes: window sizes, bottom first.
            starts: int64 [B], the first real token of every row, where windows start; None: 0.
        """
        same = (starts is None) == (self.starts is None) and (
            starts is None or torch.equal(starts, self.starts)
        )
        if not (same and sizes == self.sizes and len(self.means) == len(sizes)):
            self.sizes, self.starts = sizes, starts
            self.means = [tuple(Growing(t.room, t.room.dtype) for t in self.exact) for _ in sizes]
            self.counts = [[0] * len(self.exact[0].room) for _ in sizes]
        below, width = self.exact, 1
        for level, size in enumerate(sizes):
            self._complete(level, below, width)
            below, width = self.means[level], size
        keys, values = ((t.view(), *(m[i].view() for m in self.means)) for i, t in enumerate(self.exact))
        return Levels(sizes, keys, values, starts)

    def _complete(self, level: int, below: tuple[Growing, Growing], width: int) -> None:
        """Add the means of windows that became complete, from what they consist of."""
        counts = self._counts(self.sizes[level])
        before, self.counts[level] = self.counts[level], counts
        if counts == before:
            return
        branching = self.sizes[level] // width
        first = [0] * len(counts) if width > 1 or self.starts is None else self.starts.tolist()
        for mean, parts in zip(self.means[level], below, strict=True):
            mean.extend(max(counts))
            for row, (done, count, start) in enumerate(zip(before, counts, first, strict=True)):
                inside = slice(start + done * branching, start + count * branching)
                new = (
                    parts.room[row, :, inside].unflatten(1, (count - done, branching))
                    if count > done
                    else None
                )
                if new is not None:
                    mean.room[row, :, done:count] = new.mean(2)

    def _counts(self, size: int) -> list[int]:
        rows, length = len(self.exact[0].room), self.exact[0].length
        starts = [0] * rows if self.starts is None else self.starts.tolist()
        return [max(0, length - start) // size for start in starts]

    def crop(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        for grown in (*self.tokens, *self.exact):
            grown.length = min(grown.length, length)
        for level, size in enumerate(self.sizes):
            self.counts[level] = [
                min(a, b) for a, b in zip(self.counts[level], self._counts(size), strict=True)
            ]
            for mean in self.means[level]:
                mean.length = max(self.counts[level])

    def pick(self, rows: Tensor) -> None:
        """Take these rows of the batch, in this order: beams, or several answers to a prompt."""
        for grown in {id(g): g for pair in (self.tokens, self.exact, *self.means) for g in pair}.values():
            grown.pick(rows)
        self.starts = None if self.starts is None else self.starts[rows.to(self.starts.device)]
        self.counts = [[counts[r] for r in rows.tolist()] for counts in self.counts]
