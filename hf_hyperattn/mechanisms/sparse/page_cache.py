"""What a generated token need not find anew: summaries of pages of keys, and the choice of the chunk that it is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...engines.cpu import selected
from ...engines.cpu.selected import BY, KEPT, HeadRule, shapes_of_choice

#: The `PageCache` of the keys that a cache has given, while they live.
PAGE_CACHES: WeakIdKeyDictionary = WeakIdKeyDictionary()


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
    pages: Tensor


class PageCache:
    """Of keys, which only grow but for `crop` and `pick`: the summaries of all complete pages, and the last choices."""

    def __init__(self):
        self.kept: dict[tuple[int, int], GrowingSummaries] = {}
        self.choices: dict[str, Choice] = {}  # by the layer that asked: several may share their keys

    def choose(
        self,
        asker: str,
        rules: Sequence[HeadRule],
        spans: tuple[list[int], list[int]],
        length: int,
        choose: Callable[[Sequence[HeadRule], Tensor | None], Tensor],
    ) -> Tensor:
        """The pages for one query, the last of `length` keys; heads whose chunk has chosen already have that choice.

        Args:
            asker: the layer's name.
            spans: of each row its first key that is no padding, and the end of those.
            choose: finds the pages by the rules that it is given, with what is kept.
        """
        early = [rule.by in EARLY and rule.page > 0 and rule.chunk > 1 for rule in rules]
        if not any(early):
            return choose(rules, None)
        starts, stops = spans[0], [stop if stop < length else None for stop in spans[1]]
        chunks = [[(length - 1 - start) // rule.chunk for start in starts] for rule in rules]
        places = sum(many * most for many, most in shapes_of_choice(rules, 1, length))
        last, wanted, kept = self.choices.get(asker), list(rules), None
        same = last and (last.rules, last.starts, last.stops) == (wanted, starts, stops)
        if last and same and last.pages.shape[1] == places:
            kept, holds = last.pages, [then == now for then, now in zip(last.chunks, chunks, strict=True)]
            wanted = [r._replace(by=KEPT) if e and h else r for r, e, h in zip(rules, early, holds, strict=True)]
        pages = choose(wanted, kept)
        of_early = [(rule.chunk, row) for rule, row, e in zip(rules, chunks, early, strict=True) if e]
        least = max(
            start + chunk * size + 1 for size, row in of_early for start, chunk in zip(starts, row, strict=True)
        )
        self.choices[asker] = Choice(list(rules), starts, stops, chunks, least, pages)
        return pages

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
        self.choices = {asker: choice for asker, choice in self.choices.items() if length >= choice.least}
        for kept in self.kept.values():
            kept.crop(length)

    def pick(self, rows: Tensor) -> None:
        """Take these rows of the batch, in this order."""
        self.choices = {}
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
