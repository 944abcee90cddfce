"""Summaries of pages of keys, each computed once: all that a generated token reads of keys that it does not open."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...engines.cpu import selected

#: The `PageCache` of the keys that a cache has given, while they live.
PAGE_CACHES: WeakIdKeyDictionary = WeakIdKeyDictionary()


class PageCache:
    """The summaries of all complete pages of a layer's keys, which only grow but for `crop` and `pick`."""

    def __init__(self):
        self.kept: dict[tuple[int, int], GrowingSummaries] = {}

    def summaries(self, key: Tensor, page: int, bounds: int, starts: list[int]) -> Tensor:
        """[B, Hkv, P, w] float32, of the P pages that are complete in some row; see `selected.page_summaries`.

        Args:
            key: [B, Hkv, M, d], all keys so far.
            page: keys of a page. bounds: by the least and the largest of its keys, not by their mean.
            starts: of each row its first key that is no padding, from which its pages count.
        """
        kept = self.kept.get((page, bounds))
        if kept is None or kept.starts != starts:
            kept = self.kept[page, bounds] = GrowingSummaries(starts, page)
        return kept.grown(key, bounds)

    def crop(self, length: int) -> None:
        """Forget all keys but the first `length`."""
        for kept in self.kept.values():
            kept.crop(length)

    def pick(self, rows: Tensor) -> None:
        """Take these rows of the batch, in this order."""
        for kept in self.kept.values():
            kept.pick(rows)


class GrowingSummaries:
    """The summaries of one kind. Room doubles, so that a page costs O(1)."""

    def __init__(self, starts: list[int], page: int):
        self.starts, self.page = starts, page
        self.counts = [0] * len(starts)
        self.room: Tensor | None = None

    def complete(self, length: int) -> list[int]:
        """How many pages of each row are complete with so many keys."""
        return [max(0, length - start) // self.page for start in self.starts]

    def grown(self, key: Tensor, bounds: int) -> Tensor:
        """All summaries, those of new pages among them."""
        counts = self.complete(key.shape[2])
        most, had = max(counts), 0 if self.room is None else self.room.shape[2]
        if self.room is None or most > had:
            width = key.shape[3] * (1 + bounds)
            room = key.new_zeros(*key.shape[:2], max(most, 2 * had), width, dtype=torch.float32)
            if self.room is not None:
                room[:, :, :had] = self.room
            self.room = room
        if counts != self.counts:
            selected.page_summaries(key, self.room, self.page, bounds, self.starts, self.counts, counts)
            self.counts = counts
        return self.room[:, :, :most]

    def crop(self, length: int) -> None:
        """As `PageCache.crop`."""
        self.counts = [*map(min, self.counts, self.complete(length))]

    def pick(self, rows: Tensor) -> None:
        """As `PageCache.pick`."""
        chosen = rows.tolist()
        self.starts, self.counts = ([of[r] for r in chosen] for of in (self.starts, self.counts))
        if self.room is not None:
            self.room = self.room[rows.to(self.room.device)]
