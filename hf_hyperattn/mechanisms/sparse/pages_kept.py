"""Page summaries and page choices that a cache keeps between decoding steps.

Without them, every generated token would summarise all pages again, and choose again within its
chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...engines.cpu import selected
from ...engines.selected import BY, KEPT, HeadRule, shapes_of_choice
from ...engines.selection import Lists, Summaries
from ..selection.cache import Blocks, KeptWithKeys, LayerCache

#: Ways of choosing that need no later query of the chunk. Their choice holds until the chunk ends.
EARLY = (BY.index("first"), BY.index("previous"))


class Choice(NamedTuple):
    """The pages chosen for a single query, and the queries that they hold for.

    Args:
        rules: The kernel's rule of each head.
        starts: First real key of each row.
        stops: End of the real keys of each row; None if it is the end of all keys, which grows.
        chunks: chunks[head][row] is the number of the chunk that the query is in.
        needed: Number of keys that must remain for the choice to hold.
        pages: As `selected.chosen_pages` returns them.
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
        """Return whether the choice can hold for the last query of `length` keys.

        Args:
            rules, starts, stops: Of that query's call, as in the class.
            length: Number of keys.
        """
        same = (self.rules, self.starts, self.stops) == (rules, starts, stops)
        return same and self.pages.shapes == shapes_of_choice(rules, 1, length)


class LastChoice(KeptWithKeys):
    """The pages that a layer chose last."""

    def __init__(self):
        self.last: Choice | None = None

    def choose_pages(
        self,
        rules: Sequence[HeadRule],
        spans: tuple[list[int], list[int]],
        length: int,
        find_pages: Callable[[Sequence[HeadRule], Lists | None], Lists],
    ) -> Lists:
        """Return the pages of one query, the last of `length` keys.

        Heads whose chunk has chosen already go on with that choice.

        Args:
            rules: The kernel's rule of each head.
            spans: First real key of each row, and the end of its real keys.
            length: Number of keys so far.
            find_pages: Chooses pages by the given rules. Heads with `KEPT` take the given pages.
        """
        is_early = [rule.by in EARLY and rule.page > 0 and rule.chunk > 1 for rule in rules]
        # Other heads choose again at every query, so there is nothing to keep.
        if not any(is_early):
            return find_pages(rules, None)
        wanted = list(rules)
        starts, ends = spans
        # The end of a row without padding behind it grows at every step. It must not end the
        # choice.
        stops = [end if end < length else None for end in ends]
        chunks = [[(length - 1 - start) // rule.chunk for start in starts] for rule in wanted]
        last = self.last
        if last is not None and last.holds_for(wanted, starts, stops, length):
            # The same chunk goes on: its head keeps the pages. Other heads choose again.
            asked = [
                rule._replace(by=KEPT) if early and then == now else rule
                for rule, early, then, now in zip(
                    wanted, is_early, last.chunks, chunks, strict=True
                )
            ]
            pages = find_pages(asked, last.pages)
        else:
            pages = find_pages(wanted, None)
        # The first token of every chunk must stay. It is the last one that the choice of the chunk
        # depends on.
        needed = [
            start + chunk * rule.chunk + 1
            for rule, of_rows, early in zip(wanted, chunks, is_early, strict=True)
            for start, chunk in zip(starts, of_rows, strict=True)
            if early
        ]
        self.last = Choice(
            rules=wanted,
            starts=starts,
            stops=stops,
            chunks=chunks,
            needed=max(needed),
            pages=pages,
        )
        return pages

    def crop(self, length: int) -> None:
        """See `KeptWithKeys`."""
        if self.last is not None and length < self.last.needed:
            self.last = None

    def select_rows(self, rows: Tensor) -> None:
        """See `KeptWithKeys`. The choice is dropped: one step chooses it again."""
        self.last = None


class PageSummaries(Blocks):
    """The summaries of complete pages of one size and kind.

    Args:
        starts: First real key of each row, at which its pages begin.
        page: Keys of a page.
        bounds: 1 for the largest and the smallest key by channel, which takes twice the width; 0
            for the mean.
    """

    def __init__(self, starts: list[int], page: int, bounds: int):
        super().__init__(starts, page)
        self.bounds = bounds
        self.room: Tensor | None = None

    def update_summaries(self, key: Tensor) -> Summaries:
        """Return the summaries of all pages that are complete in some row.

        Args:
            key: [B, Hkv, M, d], all keys so far.
        """
        counts = self.count_complete(key.shape[2])
        most = max(counts)
        had = 0 if self.room is None else self.room.shape[2]
        if self.room is None or most > had:
            # Storage doubles when it is full, so that a new page costs O(1) on average.
            width = key.shape[3] * (1 + self.bounds)
            room = key.new_zeros(*key.shape[:2], max(most, 2 * had), width, dtype=torch.float32)
            if self.room is not None:
                room[:, :, :had] = self.room
            self.room = room
        if counts != self.counts:
            # Writes the pages from self.counts up to counts into the room.
            selected.page_summaries(
                key, self.room, self.size, self.bounds, self.starts, self.counts, counts
            )
            self.counts = counts
        return Summaries(rows=self.room[:, :, :most], starts=self.starts, size=self.size)

    def select_rows(self, rows: Tensor) -> None:
        """See `KeptWithKeys`."""
        super().select_rows(rows)
        if self.room is not None:
            self.room = self.room[rows.to(self.room.device)]


def find_summaries(
    cache: LayerCache, key: Tensor, page: int, bounds: int, starts: list[int]
) -> Summaries:
    """Return the summaries of the pages of a cache, computed if they are missing.

    Args:
        cache: Of the layer.
        key: [B, Hkv, M, d], its keys.
        page, bounds, starts: As in `PageSummaries`.
    """
    name = "summaries", page, bounds
    kept = cache.get_kept(name, lambda: PageSummaries(starts, page, bounds))
    # Pages begin at the first real key. If padding has moved, every page holds other keys.
    if kept.starts != starts:
        kept = PageSummaries(starts, page, bounds)
        cache.beside[name] = kept
    return kept.update_summaries(key)
