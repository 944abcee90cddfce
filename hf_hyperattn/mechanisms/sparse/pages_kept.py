"""What a cache keeps for pages: their summaries, and what the chunk of a generated token has chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...engines.cpu import selected
from ...engines.cpu.selected import BY, KEPT, HeadRule, shapes_of_choice
from ...engines.selection import Lists, Summaries
from ..selection.cache import Blocks, KeptWithKeys, LayerCache

#: By these a chunk chooses before its last queries are there, so that the choice is the same for all of them.
EARLY = (BY.index("first"), BY.index("previous"))


class Choice(NamedTuple):
    """The pages that were chosen for a single query, and for which it was.

    Args:
        rules: of the heads.
        starts: of each row its first key that is no padding.
        stops: of each row the end of those, None where it is the end of all keys.
        chunks: of each head that of the query, in every row.
        least: keys that must be left for the choice to hold.
        pages: as `selected.chosen_pages` returns them.
    """

    rules: list[HeadRule]
    starts: list[int]
    stops: list[int | None]
    chunks: list[list[int]]
    least: int
    pages: Lists


class LastChoice(KeptWithKeys):
    """The pages that a layer has chosen last: they hold until its chunk of queries ends."""

    def __init__(self):
        self.last: Choice | None = None

    def choose(
        self,
        rules: Sequence[HeadRule],
        spans: tuple[list[int], list[int]],
        length: int,
        choose: Callable[[Sequence[HeadRule], Lists | None], Lists],
    ) -> Lists:
        """The pages for one query, the last of `length` keys; heads whose chunk has chosen already have that choice.

        Args:
            spans: of each row its first key that is no padding, and the end of those.
            choose: finds the pages by the rules that it is given, with what is kept.
        """
        early = [rule.by in EARLY and rule.page > 0 and rule.chunk > 1 for rule in rules]
        if not any(early):
            return choose(rules, None)
        starts, stops = spans[0], [stop if stop < length else None for stop in spans[1]]
        chunks = [[(length - 1 - start) // rule.chunk for start in starts] for rule in rules]
        last, wanted, kept = self.last, list(rules), None
        same = last and (last.rules, last.starts, last.stops) == (wanted, starts, stops)
        if last and same and last.pages.shapes == shapes_of_choice(rules, 1, length):
            kept, holds = last.pages, [then == now for then, now in zip(last.chunks, chunks, strict=True)]
            wanted = [r._replace(by=KEPT) if e and h else r for r, e, h in zip(rules, early, holds, strict=True)]
        pages = choose(wanted, kept)
        of_early = [(rule.chunk, row) for rule, row, e in zip(rules, chunks, early, strict=True) if e]
        least = max(
            start + chunk * size + 1 for size, row in of_early for start, chunk in zip(starts, row, strict=True)
        )
        self.last = Choice(list(rules), starts, stops, chunks, least, pages)
        return pages

    def crop(self, length: int) -> None:
        """See `KeptWithKeys`."""
        if self.last is not None and length < self.last.least:
            self.last = None

    def pick(self, rows: Tensor) -> None:
        """See `KeptWithKeys`."""
        self.last = None


class PageSummaries(Blocks):
    """The summaries of complete pages, of one size and kind. Room doubles, so that a page costs O(1).

    Args:
        starts: of each row its first key that is no padding, from which its pages count.
        page: keys of a page.
        bounds: by the least and the largest of its keys, not by their mean.
    """

    def __init__(self, starts: list[int], page: int, bounds: int):
        super().__init__(starts, page)
        self.bounds = bounds
        self.room: Tensor | None = None

    def updated(self, key: Tensor) -> Summaries:
        """Return those of all pages that are complete in some row.

        Args:
            key: [B, Hkv, M, d], all keys so far.
        """
        counts = self.complete(key.shape[2])
        most, had = max(counts), 0 if self.room is None else self.room.shape[2]
        if self.room is None or most > had:
            width = key.shape[3] * (1 + self.bounds)
            room = key.new_zeros(*key.shape[:2], max(most, 2 * had), width, dtype=torch.float32)
            if self.room is not None:
                room[:, :, :had] = self.room
            self.room = room
        if counts != self.counts:
            selected.page_summaries(key, self.room, self.size, self.bounds, self.starts, self.counts, counts)
            self.counts = counts
        return Summaries(self.room[:, :, :most], self.starts, self.size)

    def pick(self, rows: Tensor) -> None:
        """See `KeptWithKeys`."""
        super().pick(rows)
        if self.room is not None:
            self.room = self.room[rows.to(self.room.device)]


def summaries_of(cache: LayerCache, key: Tensor, page: int, bounds: int, starts: list[int]) -> Summaries:
    """Return the summaries of the pages of a cache, see `PageSummaries`."""
    name = "summaries", page, bounds
    kept = cache.kept(name, lambda: PageSummaries(starts, page, bounds))
    if kept.starts != starts:
        cache.beside[name] = kept = PageSummaries(starts, page, bounds)
    return kept.updated(key)
