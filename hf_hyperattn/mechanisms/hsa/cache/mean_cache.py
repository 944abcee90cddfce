"""Keys and values as they come, and the means of their windows, each computed once: what decoding reads.

A generated token completes one window in w_1, of which one in w_2/w_1 completes one of the next level, so keeping all
means up to date costs O(1) a token, and no tensor is copied whole for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ....engines import working_dtype
from ...growing import TAKEN_BACK, GrowingTensor
from ..windowed.means import Levels

#: The `MeanCache` that keys and values come from, while they live.
MEAN_CACHES: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Keep:
    """What a cache that evicts has to keep, for heads that refine nothing.

    Args:
        sizes: windows, bottom first, at least one.
        near, sinks: the most that a head asks for.
    """

    sizes: tuple[int, ...]
    near: int
    sinks: int


#: Keys and values of one level.
Pair = tuple[GrowingTensor, GrowingTensor]


class MeanCache:
    """The keys and values of one layer, and their means over complete windows of every level.

    Args:
        key: [B, Hkv, n, d] and
        value: [B, Hkv, n, dv]: what the first tokens look like; nothing is added yet.
        keep: what to keep where the rest may be evicted; None: all.
    """

    def __init__(self, key: Tensor, value: Tensor, keep: Keep | None = None):
        self.keep, self.least = keep, 0  # tokens that must be left when some are taken back
        half = working_dtype(key) != key.dtype
        dtype = working_dtype(key) if keep is not None else None
        self.tokens: Pair = GrowingTensor(key, dtype), GrowingTensor(value, dtype)
        # means and logits are float32: half precision is kept in both, so that no step converts what it has converted
        both = half and keep is None
        self.exact = (GrowingTensor(key, torch.float32), GrowingTensor(value, torch.float32)) if both else self.tokens
        self.sizes: tuple[int, ...] = ()
        self.starts: Tensor | None = None
        self.means: list[Pair] = []
        self.counts: list[list[int]] = []  # complete windows of every level and row

    @property
    def has_evicted(self) -> bool:
        """Whether something is gone already."""
        return any(t.gone for pair in (self.tokens, *self.means) for t in pair)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add tokens."""
        if self.keep is not None and self.counts:
            self._evict(self.keep)
        for pair in {id(p): p for p in (self.tokens, self.exact)}.values():
            for tensor, new in zip(pair, (key, value), strict=True):
                tensor.append(new)

    def shown(self) -> tuple[Tensor, Tensor]:
        """All keys and values; where some may be forgotten, placeholders."""
        key, value = (t.view() if self.keep is None else t.placeholder(t.room.shape[1]) for t in self.tokens)
        return key, value

    def levels(self, sizes: tuple[int, ...], starts: Tensor | None) -> Levels:
        """The tokens, and the means of all windows that are complete.

        Args:
            sizes: window sizes, bottom first.
            starts: int64 [B], the first real token of every row, where windows start; None: 0.
        """
        starts = _none_if_zero(starts)
        same = starts is self.starts
        if starts is not None and self.starts is not None:
            same = torch.equal(starts, self.starts)
        if not (same and sizes == self.sizes and len(self.means) == len(sizes)):
            if self.has_evicted:
                raise ValueError(
                    "HierarchicalCache(evict=True) was called with padding at another place than before; allowed: the "
                    "attention_mask of the earlier calls, continued"
                )
            self.sizes, self.starts = sizes, starts
            key, value = self.exact
            self.means = [
                (GrowingTensor(key.room, key.room.dtype), GrowingTensor(value.room, value.room.dtype)) for _ in sizes
            ]
            self.counts = [[0] * len(key.room) for _ in sizes]
        below, width = self.exact, 1
        for level, size in enumerate(sizes):
            self._complete(level, below, width)
            below, width = self.means[level], size
        keys, values = ((t.view(), *(m[i].view() for m in self.means)) for i, t in enumerate(self.exact))
        held = None
        if self.has_evicted:
            held = self.exact[0].length, tuple((k.head, k.gone) for k, _ in (self.exact, *self.means))
        return Levels(sizes, keys, values, starts, held=held)

    def first_tokens(self) -> list[int]:
        """Where every row starts."""
        return [0] * len(self.exact[0].room) if self.starts is None else self.starts.tolist()

    def _evict(self, keep: Keep) -> None:
        """Forget what no query sees from here on, nor from `TAKEN_BACK` tokens before.

        What such a query sees below the top level has a parent that is open, which is a range round it, or holds one
        of the first tokens.
        """
        safe, starts = self.exact[0].length - TAKEN_BACK, self.first_tokens()
        if safe <= max(starts) or safe < self.least + self.sizes[0]:  # a window more, or nothing can go
            return
        self.least = max(self.least, safe)
        for pair, width, parent in zip((self.exact, *self.means), (1, *self.sizes), self.sizes):
            first, head = [], []
            for start in starts:
                window = (safe - start) // self.sizes[0] * self.sizes[0]
                open_from = max(0, window - max(keep.near, 1) + 1) // parent * parent
                front, shift = -(-keep.sinks // parent) * parent, start if width == 1 else 0
                first.append(shift + open_from // width)
                head.append(shift + front // width)
            for tensor in pair:
                tensor.evict(min(first), max(head))

    def _complete(self, level: int, below: Pair, width: int) -> None:
        """Add the means of windows that became complete, from what they consist of."""
        counts = self._counts(self.sizes[level])
        before, self.counts[level] = self.counts[level], counts
        if counts == before:
            return
        branching, gone = self.sizes[level] // width, below[0].gone
        first = [0] * len(counts) if width > 1 else self.first_tokens()
        for mean, parts in zip(self.means[level], below, strict=True):
            mean.extend(max(counts))
            for row, (done, count, start) in enumerate(zip(before, counts, first, strict=True)):
                inside = slice(start + done * branching - gone, start + count * branching - gone)
                if count > done:
                    new = parts.room[row, :, inside].unflatten(1, (count - done, branching))
                    mean.room[row, :, done - mean.gone : count - mean.gone] = new.mean(2)

    def _counts(self, size: int) -> list[int]:
        return [max(0, self.exact[0].length - start) // size for start in self.first_tokens()]

    def crop(self, length: int) -> None:
        """Forget all tokens but the first `length`.

        Raises:
            ValueError: more is to be taken back than a cache that evicts can.
        """
        if length < self.least:
            raise ValueError(
                f"HierarchicalCache(evict=True) cannot go back to {length} tokens, only to {self.least}; allowed: at "
                f"most {TAKEN_BACK} tokens at once, or evict=False"
            )
        for tensor in (*self.tokens, *self.exact):
            tensor.length = min(tensor.length, length)
        for level, size in enumerate(self.sizes):
            self.counts[level] = [*map(min, self.counts[level], self._counts(size))]
            for mean in self.means[level]:
                mean.length = max(self.counts[level])

    def pick(self, rows: Tensor) -> None:
        """Take these rows of the batch, in this order: beams, or several answers to a prompt."""
        for tensor in {id(t): t for pair in (self.tokens, self.exact, *self.means) for t in pair}.values():
            tensor.pick(rows)
        self.starts = None if self.starts is None else _none_if_zero(self.starts[rows.to(self.starts.device)])
        self.counts = [[counts[r] for r in rows.tolist()] for counts in self.counts]


def _none_if_zero(starts: Tensor | None) -> Tensor | None:
    """Where rows start, None where all do at 0."""
    return starts if starts is not None and bool(starts.any()) else None
