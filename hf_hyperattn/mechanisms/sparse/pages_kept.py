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

#: Ways of choosing that need no later query of the chunk: what was chosen holds until the chunk ends.
EARLY = (BY.index("first"), BY.index("previous"))


class Choice(NamedTuple):
    """The pages that were chosen for a single query, and for which it was.

    Args:
        rules: of the heads.
        starts: the first real key of each row.
        stops: the end of the real keys of each row; None if it is the end of all keys, which grow.
        chunks: chunks[head][row] is the number of the chunk that the query is in.
        needed: keys that must be left for the choice to hold.
        pages: as `selected.chosen_pages` returns them.
    """

    rules: list[HeadRule]
    starts: list[int]
    stops: list[int | None]
    chunks: list[list[int]]
    needed: int
    pages: Lists

    def holds_for(
        self, rules: list[HeadRule], starts: list[int], stops: list[int | None], length: int
    ) -> bool:
        """Whether it can hold for a query of these rows, by these rules, as the last of `length` keys."""
        same = (self.rules, self.starts, self.stops) == (rules, starts, stops)
        return same and self.pages.shapes == shapes_of_choice(rules, 1, length)


class LastChoice(KeptWithKeys):
    """The pages that a layer has chosen last."""

    def __init__(self):
        self.last: Choice | None = None

    def choose(
        self,
        rules: Sequence[HeadRule],
        spans: tuple[list[int], list[int]],
        length: int,
        find: Callable[[Sequence[HeadRule], Lists | None], Lists],
    ) -> Lists:
        """The pages for one query, the last of `length` keys; heads whose chunk has chosen already have that choice.

        Args:
            rules: of the heads.
            spans: the first real key of each row, and the end of its real keys.
            length: keys so far.
            find: finds the pages by the rules that it is given; heads by `KEPT` have the pages that it is given.
        """
        early = [rule.by in EARLY and rule.page > 0 and rule.chunk > 1 for rule in rules]
        if not any(early):
            return find(rules, None)
        wanted, (starts, ends) = list(rules), spans
        stops = [end if end < length else None for end in ends]
        chunks = [[(length - 1 - start) // rule.chunk for start in starts] for rule in wanted]
        last, asked, kept = self.last, wanted, None
        if last is not None and last.holds_for(wanted, starts, stops, length):
            going_on = [
                e and then == now for e, then, now in zip(early, last.chunks, chunks, strict=True)
            ]
            asked = [
                rule._replace(by=KEPT) if on else rule
                for rule, on in zip(wanted, going_on, strict=True)
            ]
            kept = last.pages
        pages = find(asked, kept)
        # The first token of every chunk must stay. It is the last one that the choice of the chunk depends on.
        needed = [
            start + chunk * rule.chunk + 1
            for rule, of_rows, e in zip(wanted, chunks, early, strict=True)
            for start, chunk in zip(starts, of_rows, strict=True)
            if e
        ]
        self.last = Choice(wanted, starts, stops, chunks, max(needed), pages)
        return pages

    def crop(self, length: int) -> None:
        """See `KeptWithKeys`."""
        if self.last is not None and length < self.last.needed:
            self.last = None

    def pick(self, rows: Tensor) -> None:
        """See `KeptWithKeys`."""
        self.last = None


class PageSummaries(Blocks):
    """The summaries of complete pages, of one size and kind. Full storage doubles, so that a page costs O(1).

    Args:
        starts: the first real key of each row, at which its pages begin.
        page: keys of a page.
        bounds: 1 for the largest and the least of its keys, by channel, which takes twice the width; 0 for their mean.
    """

    def __init__(self, starts: list[int], page: int, bounds: int):
        super().__init__(starts, page)
        self.bounds = bounds
        self.room: Tensor | None = None

    def updated(self, key: Tensor) -> Summaries:
        """Return the summaries of all pages that are complete in some row.

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
            selected.page_summaries(
                key, self.room, self.size, self.bounds, self.starts, self.counts, counts
            )
            self.counts = counts
        return Summaries(self.room[:, :, :most], self.starts, self.size)

    def pick(self, rows: Tensor) -> None:
        """See `KeptWithKeys`."""
        super().pick(rows)
        if self.room is not None:
            self.room = self.room[rows.to(self.room.device)]


def summaries_of(
    cache: LayerCache, key: Tensor, page: int, bounds: int, starts: list[int]
) -> Summaries:
    """Return the summaries of the pages of a cache, see `PageSummaries`; made anew if its padding has moved."""
    name = "summaries", page, bounds
    kept = cache.kept(name, lambda: PageSummaries(starts, page, bounds))
    if kept.starts != starts:
        cache.beside[name] = kept = PageSummaries(starts, page, bounds)
    return kept.updated(key)
