"""Keep the means of windows in a cache, each computed once.

This module shows how means grow with the cache, and which tokens and means an evicting cache can
forget.

A generated token completes one window in w_1, and one in w_2/w_1 of these completes a window of the
next level. Keeping all means up to date therefore costs O(1) per token, and no tensor is copied as
a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines import working_dtype
from ..selection.cache import Blocks, KeepWindows, KeptWithKeys, LayerCache, Pair
from ..selection.growing import TAKEN_BACK, GrowingTensor
from .open_blocks import first_near
from .windowed.native import Levels


class WindowMeans(KeptWithKeys):
    """Hold the means of cached keys and values over complete windows.

    The cache holds this object, so this object does not refer to the cache. Python then frees both
    at once.

    Args:
        cache: Cache of the tokens.
        sizes: Window sizes, bottom first.
        starts: int64 [B], the first real token of every row, where windows start; None: 0.
    """

    def __init__(self, cache: LayerCache, sizes: tuple[int, ...], starts: Tensor | None):
        self.sizes, self.starts = sizes, starts
        key_room, value_room = (tensor.room for tensor in cache.tokens)
        dtype = working_dtype(key_room)
        #: The first real token of every row, as numbers.
        self.first = [0] * len(key_room) if starts is None else starts.tolist()
        self.means: list[Pair] = [
            (GrowingTensor(key_room, dtype), GrowingTensor(value_room, dtype)) for _ in sizes
        ]
        self.blocks = [Blocks(list(self.first), size) for size in sizes]
        #: Views of all means, None after a change: making them for every token would slow down
        #: decoding.
        self.shown: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None

    def has_evicted(self, cache: LayerCache) -> bool:
        """Return whether any token or mean was evicted."""
        return any(t.gone for pair in (cache.tokens, *self.means) for t in pair)

    def complete_levels(self, cache: LayerCache) -> Levels:
        """Return the tokens and the means of all complete windows.

        Tokens have the dtype of the cache.
        """
        # Windows of all levels end where a window of the lowest level ends, so only that level is
        # checked.
        if self.blocks and self.blocks[0].count_complete(cache.length) != self.blocks[0].counts:
            below, width = cache.tokens, 1
            for level, size in enumerate(self.sizes):
                self._append_means(level, below, width, cache.length)
                below, width = self.means[level], size
            self.shown = None
        if self.shown is None:
            self.shown = (
                tuple(k.view() for k, _ in self.means),
                tuple(v.view() for _, v in self.means),
            )
        keys, values = (
            (tokens.view(), *shown) for tokens, shown in zip(cache.tokens, self.shown, strict=True)
        )
        held = None
        if self.has_evicted(cache):
            tables = (cache.tokens, *self.means)
            held = cache.length, tuple((k.head, k.gone) for k, _ in tables)
        return Levels(self.sizes, keys, values, self.starts, held=held)

    def _append_means(self, level: int, below: Pair, width: int, length: int) -> None:
        """Append the means of windows that became complete.

        Args:
            level: Level of the windows, 0 for the smallest.
            below: Tokens, or means of the level below, which the means are computed from.
            width: Number of tokens of a part of a window: 1, or the size of the level below.
            length: Number of tokens in the cache.
        """
        blocks = self.blocks[level]
        before, counts = blocks.counts, blocks.count_complete(length)
        blocks.counts = counts
        if counts == before:
            return
        branching, gone = self.sizes[level] // width, below[0].gone
        # Tokens count from the beginning of the row, means from its first real token.
        first = [0] * len(counts) if width > 1 else blocks.starts
        for mean, parts in zip(self.means[level], below, strict=True):
            mean.set_length(max(counts))
            for row, (done, count, start) in enumerate(zip(before, counts, first, strict=True)):
                if count <= done:
                    continue
                # A tensor without its evicted rows is shorter: places move to the front by their
                # number.
                inside = slice(start + done * branching - gone, start + count * branching - gone)
                new = parts.room[row, :, inside].unflatten(1, (count - done, branching))
                new = new.to(mean.room.dtype).mean(2)
                mean.room[row, :, done - mean.gone : count - mean.gone] = new

    def before_append(self, cache: LayerCache) -> None:
        """Evict the rows that no later query sees.

        The last `TAKEN_BACK` tokens may be removed again, so queries from there on count as later.
        Below the top level, a query sees only children of open blocks. These are a range around the
        query and, at the front, the blocks that hold one of the first tokens.
        """
        keep, starts = cache.keep, self.first
        if not isinstance(keep, KeepWindows):
            return
        safe = cache.length - TAKEN_BACK
        # Only a new bottom window changes the open blocks. Before the latest row starts, nothing
        # can be evicted.
        if safe <= max(starts) or safe < cache.shortest + self.sizes[0]:
            return
        cache.shortest, self.shown = max(cache.shortest, safe), None
        for pair, width, parent in zip((cache.tokens, *self.means), (1, *self.sizes), self.sizes):
            first, head = [], []
            for start in starts:
                window = (safe - start) // self.sizes[0] * self.sizes[0]
                open_from = first_near(window, keep.near) // parent * parent
                front = -(-keep.sinks // parent) * parent
                shift = start if width == 1 else 0
                first.append(shift + open_from // width)
                head.append(shift + front // width)
            # One table holds all rows of the batch, so only what no row needs can go.
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
        if self.starts is not None:
            self.starts = none_if_zero(self.starts[rows.to(self.starts.device)])


def read_levels(cache: LayerCache, sizes: tuple[int, ...], starts: Tensor | None) -> Levels:
    """Return the tokens of a cache, and the means of all complete windows.

    Args:
        cache: Cache of a layer.
        sizes: Window sizes, bottom first.
        starts: int64 [B], the first real token of every row, where windows start; None: 0.

    Raises:
        ValueError: Padding is at another place than before, and the cache has evicted tokens.
    """
    starts = none_if_zero(starts)
    means = cache.get_kept("means", lambda: WindowMeans(cache, sizes, starts))
    same = starts is means.starts
    if starts is not None and means.starts is not None:
        same = torch.equal(starts, means.starts)
    if not (same and sizes == means.sizes):
        # Other windows need other means, which can only be computed from all tokens.
        if means.has_evicted(cache):
            raise ValueError(
                "HierarchicalCache(evict=True) was called with padding at another place than before; allowed: the "
                "attention_mask of the earlier calls, continued"
            )
        cache.beside["means"] = means = WindowMeans(cache, sizes, starts)
    return means.complete_levels(cache)


def none_if_zero(starts: Tensor | None) -> Tensor | None:
    """Return the starts of rows, or None if all rows start at 0."""
    return starts if starts is not None and bool(starts.any()) else None
