"""The means of windows that a cache keeps for HSA, each computed once: what decoding reads.

A generated token completes one window in w_1, of which one in w_2/w_1 completes one of the next level, so keeping all
means up to date costs O(1) a token, and no tensor is copied whole for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines import working_dtype
from ..selection.cache import Blocks, KeepWindows, KeptWithKeys, LayerCache, Pair
from ..selection.growing import TAKEN_BACK, GrowingTensor
from .open_blocks import first_near
from .windowed.means import Levels


class WindowMeans(KeptWithKeys):
    """Means of the keys and values of a cache over complete windows of every level.

    The cache holds them, so that they do not refer to it: it would be freed by the garbage collector alone.

    Args:
        cache: Whose tokens these are.
        sizes: Window sizes, bottom first.
        starts: int64 [B], the first real token of every row, where windows start; None: 0.
    """

    def __init__(self, cache: LayerCache, sizes: tuple[int, ...], starts: Tensor | None):
        self.sizes, self.starts = sizes, starts
        rooms = [tensor.room for tensor in cache.tokens]
        dtype = working_dtype(rooms[0])
        self.first = (
            [0] * len(rooms[0]) if starts is None else starts.tolist()
        )  # where every row starts
        self.means: list[Pair] = [
            (GrowingTensor(rooms[0], dtype), GrowingTensor(rooms[1], dtype)) for _ in sizes
        ]
        self.blocks = [Blocks(list(self.first), size) for size in sizes]
        self.shown: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = (
            None  # all means, until more are complete
        )

    def has_evicted(self, cache: LayerCache) -> bool:
        """Whether something is gone already."""
        return any(t.gone for pair in (cache.tokens, *self.means) for t in pair)

    def levels(self, cache: LayerCache) -> Levels:
        """Return the tokens, in the dtype of the cache, and the means of all windows that are complete."""
        # Windows of all levels end where one of the lowest ends.
        if self.blocks and self.blocks[0].count_complete(cache.length) != self.blocks[0].counts:
            below, width = cache.tokens, 1
            for level, size in enumerate(self.sizes):
                self._complete(level, below, width, cache.length)
                below, width = self.means[level], size
            self.shown = None
        if self.shown is None:
            self.shown = (
                tuple(k.view() for k, _ in self.means),
                tuple(v.view() for _, v in self.means),
            )
        tables = (cache.tokens, *self.means)
        keys, values = (
            (tokens.view(), *shown) for tokens, shown in zip(cache.tokens, self.shown, strict=True)
        )
        held = None
        if self.has_evicted(cache):
            held = cache.length, tuple((k.head, k.gone) for k, _ in tables)
        return Levels(self.sizes, keys, values, self.starts, held=held)

    def _complete(self, level: int, below: Pair, width: int, length: int) -> None:
        """Add the means of windows that became complete, from what they consist of."""
        blocks = self.blocks[level]
        before, counts = blocks.counts, blocks.count_complete(length)
        blocks.counts = counts
        if counts == before:
            return
        branching, gone = self.sizes[level] // width, below[0].gone
        first = [0] * len(counts) if width > 1 else blocks.starts
        for mean, parts in zip(self.means[level], below, strict=True):
            mean.set_length(max(counts))
            for row, (done, count, start) in enumerate(zip(before, counts, first, strict=True)):
                inside = slice(start + done * branching - gone, start + count * branching - gone)
                if count > done:
                    new = parts.room[row, :, inside].unflatten(1, (count - done, branching))
                    mean.room[row, :, done - mean.gone : count - mean.gone] = new.to(
                        mean.room.dtype
                    ).mean(2)

    def before_append(self, cache: LayerCache) -> None:
        """Forget what no query sees from here on, nor from `TAKEN_BACK` tokens before.

        What such a query sees below the top level has a parent that is open, which is a range round it, or holds one
        of the first tokens.
        """
        keep, starts = cache.keep, self.first
        safe = cache.length - TAKEN_BACK
        if not isinstance(keep, KeepWindows):
            return
        if (
            safe <= max(starts) or safe < cache.shortest + self.sizes[0]
        ):  # a window more, or nothing can go
            return
        cache.shortest, self.shown = max(cache.shortest, safe), None
        for pair, width, parent in zip((cache.tokens, *self.means), (1, *self.sizes), self.sizes):
            first, head = [], []
            for start in starts:
                window = (safe - start) // self.sizes[0] * self.sizes[0]
                open_from = first_near(window, keep.near) // parent * parent
                front, shift = -(-keep.sinks // parent) * parent, start if width == 1 else 0
                first.append(shift + open_from // width)
                head.append(shift + front // width)
            for tensor in pair:
                tensor.evict(min(first), max(head))

    def crop(self, length: int) -> None:
        """See `KeptWithKeys`."""
        self.shown = None
        for blocks, pair in zip(self.blocks, self.means, strict=True):
            blocks.crop(length)
            for mean in pair:
                mean.length = max(blocks.counts)

    def select_rows(self, rows: Tensor) -> None:
        """See `KeptWithKeys`."""
        self.shown = None
        for blocks, pair in zip(self.blocks, self.means, strict=True):
            blocks.select_rows(rows)
            for mean in pair:
                mean.select_rows(rows)
        self.first = [self.first[row] for row in rows.tolist()]
        self.starts = (
            None if self.starts is None else none_if_zero(self.starts[rows.to(self.starts.device)])
        )


def levels_of(cache: LayerCache, sizes: tuple[int, ...], starts: Tensor | None) -> Levels:
    """Return the tokens of a cache, and the means of all windows that are complete.

    Args:
        cache: Of a layer.
        sizes: Window sizes, bottom first.
        starts: int64 [B], the first real token of every row, where windows start; None: 0.

    Raises:
        ValueError: Padding is not where it was, and the cache has forgotten tokens.
    """
    starts = none_if_zero(starts)
    means = cache.get_kept("means", lambda: WindowMeans(cache, sizes, starts))
    same = starts is means.starts
    if starts is not None and means.starts is not None:
        same = torch.equal(starts, means.starts)
    if not (same and sizes == means.sizes):
        if means.has_evicted(cache):
            raise ValueError(
                "HierarchicalCache(evict=True) was called with padding at another place than before; allowed: the "
                "attention_mask of the earlier calls, continued"
            )
        cache.beside["means"] = means = WindowMeans(cache, sizes, starts)
    return means.levels(cache)


def none_if_zero(starts: Tensor | None) -> Tensor | None:
    """Where rows start, None where all do at 0."""
    return starts if starts is not None and bool(starts.any()) else None
