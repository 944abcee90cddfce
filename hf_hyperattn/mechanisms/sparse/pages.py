"""Pages of keys of which a query opens the best, by a score of each.

`PageRule` is for any score. `Pages` scores by a summary: bounds (Quest) or the mean (MoBA, InfLLM).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...fields import option
from .rules import RuleCall, share_of, sparse_rule
from .selection import (
    CHUNK_HELP,
    QUERY_HELP,
    SELECTORS,
    Chunks,
    SelectingRule,
    Selector,
    best,
    chunks_of,
    cut_to_text,
)

Summary = Literal["bounds", "mean"]
#: Methods of `PageRule` whose results the kernel computes itself. It would not notice a subclass that changes them.
FIXED = ("visible", "opening", "choose_pages")


@dataclass(frozen=True, eq=False)
class Choice:
    """The pages that chunks of queries have chosen.

    Args:
        chunks: Of the call's queries.
        pages: Bool [B, H, R, P], the pages of each chunk.
        opening, closing: int64 [B, 1, R, 1], the tokens near each chunk begin and end here.
    """

    chunks: Chunks
    pages: Tensor
    opening: Tensor
    closing: Tensor


class PageRule(SelectingRule):
    """The nearest tokens, the first ones, and the `top` pages of all others with the largest scores.

    A rule of your own is a frozen dataclass with the fields below, and defines `score_pages`. It runs on the compiled
    kernel in causal calls on a CPU, and under a mask elsewhere, with the same result. A rule that overrides `visible`,
    `opening` or `choose_pages` always runs under a mask.

    Page a holds tokens a·page ... (a+1)·page - 1. A chunk of queries that begins at token c sees all tokens from
    w = page·floor(max(0, c - near + 1) / page) on, and the sinks. Among the pages before w it opens the `top` with the
    largest scores; of equal scores the first.

    In attention that is not causal, near are the pages that hold a token at a distance of less than `near` from the
    chunk, before or after it. All other pages of the text can be opened. The last page of the text may be shorter; only
    its own tokens enter its score. query="previous" is refused there, since later pages have no chunk before them.

    Args:
        near: Tokens less than so many before a chunk are seen, rounded up to whole pages; at least 1.
        sinks: So many first tokens of the text are seen.
        page: Tokens of a page; at least 1.
        top: So many pages are opened.
        query: What a chunk chooses by, see `selection.QUERY_HELP`.
        chunk: Queries that share a choice; 1 if query="own".
    """

    near: int
    sinks: int
    page: int
    top: int

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("near", 1), ("sinks", 0), ("page", 1), ("top", 0), ("chunk", 1)):
            number = getattr(self, name)
            if type(number) is not int or number < least:
                self._refuse(name, f"integers of at least {least}")
        if self.query not in SELECTORS:
            self._refuse("query", ", ".join(SELECTORS))

    @classmethod
    def find_changed_method(cls) -> str:
        """Return the name of a method that keeps this class from the kernel; "" if there is none."""
        return next(
            (name for name in FIXED if getattr(cls, name) is not getattr(PageRule, name)), ""
        )

    @abstractmethod
    def score_pages(self, query: Tensor, pages: Tensor, real: Tensor | None = None) -> Tensor:
        """Return the scores of pages, [B, H, R, P]; the largest are opened.

        The score of a page must depend on no later page: `pages` also holds keys that come after a chunk.

        Args:
            query: [B, H, R, d], what each chunk chooses by; float32, or float64 where the call is.
            pages: [B, H, P, page, d], the keys of each page; the last one is filled up with zeros.
            real: Bool [B or 1, 1, P, page, 1], the keys that the text has, where a page that is not complete may be
                opened: in attention that is not causal. None: all. A page without keys may have any score.
        """

    @property
    def score_cost(self) -> float:
        """What the score of a page costs, as a share of a logit."""
        return 1.0

    def share(self, length: int) -> float:
        """Tokens seen, and pages scored, where there are more than are opened, over the queries that share them."""
        places = torch.arange(length)
        opening = self.opening(places // self.chunk * self.chunk)
        pages = (opening // self.page - self.sinks // self.page).clamp_min(0)
        seen = places - opening + 1 + opening.clamp_max(self.sinks)
        return share_of(seen + self.count_chosen(pages))

    def share_both_sides(self, length: int) -> float:
        """The same on both sides; the last page counts as if it were complete."""
        if self.only_causal:
            return super().share_both_sides(length)
        chunks = torch.arange(length) // self.chunk * self.chunk
        opening, closing = self.opening(chunks), self.closing(chunks).clamp_max(length)
        sinks = min(self.sinks, length)
        first = sinks // self.page  # the first page that holds more than sinks
        before = (opening // self.page - first).clamp_min(0)
        after = (-(length // -self.page) + closing // -self.page).clamp_max(
            -(length // -self.page) - first
        )
        seen = closing - opening + opening.clamp_max(sinks) + (sinks - closing).clamp_min(0)
        return share_of(seen + self.count_chosen(before + after.clamp_min(0)), is_causal=False)

    def count_chosen(self, pages: Tensor) -> Tensor:
        """Return how many logits a query computes: to score this many pages, and for the tokens of the chosen ones."""
        scored = pages.where(pages > self.top, 0).double() * self.score_cost / self.chunk
        return pages.clamp_max(self.top) * self.page + scored

    @property
    def only_causal(self) -> str:
        """A choice by the chunk before."""
        return f"{type(self).__name__}(query='previous')" if self.query == "previous" else ""

    def opening(self, start: Tensor) -> Tensor:
        """The token from which on a chunk that begins at `start` sees everything."""
        return (start - self.near + 1).clamp_min(0) // self.page * self.page

    def closing(self, start: Tensor) -> Tensor:
        """The end of the tokens near a chunk that begins at `start`, in attention that is not causal."""
        return (start + self.chunk + self.near - 2) // self.page * self.page + self.page

    def choose_pages(self, call: RuleCall) -> Choice:
        """Return what the chunks of a call's queries choose."""
        chunks = chunks_of(call, self.chunk, self.query)
        opening, closing = self.opening(chunks.start), self.closing(chunks.start)
        pages, real = pages_of(call.key, self.page), None
        starts = torch.arange(pages.shape[2], device=pages.device) * self.page
        stops = starts + self.page
        candidates = stops <= opening
        if call.lengths is not None:
            lengths = call.lengths[:, None, None, None]
            candidates = candidates | ((starts >= closing) & (starts < lengths))
            stops = stops.minimum(lengths)
            inside = torch.arange(pages.shape[3], device=pages.device)
            real = (starts[:, None] + inside < lengths)[..., None]
        candidates = candidates & (stops > self.sinks)
        if (
            call.window is not None
        ):  # what a cache has dropped, or drops before the chunk ends, is no candidate
            candidates = candidates & (starts >= chunks.start + self.chunk - call.window)
            if not call.is_causal:
                candidates = candidates & (stops <= chunks.start + call.window)
        chunks.check(call, candidates)
        scores, shape = (
            self.score_pages(chunks.query, pages, real),
            (*chunks.query.shape[:3], pages.shape[2]),
        )
        if scores.dim() != 4 or any(
            size not in (1, full) for size, full in zip(scores.shape, shape, strict=True)
        ):
            raise ValueError(
                f"{type(self).__name__}.score_pages returned {list(scores.shape)}; allowed: {list(shape)} "
                "[batch, heads, chunks, pages], or 1 where all have the same score"
            )
        chosen = best(scores.expand(shape), candidates, self.top)
        return Choice(chunks, chosen, opening, closing)

    def visible(self, call: RuleCall) -> Tensor:
        """[B, H, N, M]."""
        choice = self.choose_pages(call)
        chunks = choice.chunks
        near = call.tokens >= chunks.spread(choice.opening)
        if not call.is_causal:
            near = near & (call.tokens < chunks.spread(choice.closing))
        page = cut_to_text(self.page, call.key.shape[2])
        tokens = chunks.spread(choice.pages).repeat_interleave(page, -1)[..., : call.key.shape[2]]
        return tokens | near | (call.tokens < self.sinks)

    def list_pages(self, call: RuleCall, queries: range) -> Tensor:
        """Return the pages that the chunks of some queries of a causal call choose, int32 [B, H, chunks, most].

        As the kernel reads them: chunk 0 is that of the first real query, and a list is filled up with -1.

        Args:
            call: With all queries.
            queries: A range of the queries that follow the `call.earlier` ones.
        """
        choice, count = self.choose_pages(call), len(queries)
        place = call.place[:, call.earlier + queries.start : call.earlier + queries.stop]
        of_query = choice.chunks.of_query[
            :, call.earlier + queries.start : call.earlier + queries.stop
        ]
        real = place >= 0
        index = real.int().argmax(
            1, keepdim=True
        )  # of the first real query, in each row of the batch
        first = place.gather(1, index).clamp_min(0)
        # A query of each chunk: the one at its first token, or the first real one.
        chunk = first // self.chunk + torch.arange(count // self.chunk + 2, device=place.device)
        query = index + (chunk * self.chunk).maximum(first) - first
        query, is_there = query.clamp_max(count - 1), query < count
        is_there = is_there & real.gather(1, query)
        rows = of_query.gather(1, query)
        chosen = choice.pages.gather(
            2,
            rows[:, None, :, None].expand(
                len(rows), choice.pages.shape[1], -1, choice.pages.shape[3]
            ),
        )
        chosen = chosen & is_there[:, None, :, None]
        pages, most = chosen.shape[3], min(self.top, call.key.shape[2] // self.page)
        number = torch.arange(pages, device=chosen.device).where(chosen, pages)
        listed = number.sort(-1).values[..., :most]
        return listed.masked_fill(listed == pages, -1).to(torch.int32)


@sparse_rule("pages")
@dataclass(frozen=True)
class Pages(PageRule):
    """A `PageRule` that scores pages by a summary of their keys.

    With q what the chunk selects by, a page's score is q·(its mean key), or with bounds Σ_d max(q_d m_d, q_d M_d), m
    and M the least and the largest of its keys by channel: no key of the page has a larger product with q (Quest,
    arXiv 2406.10774). Where `channels` is below 1, d are that share of the channels alone, rounded, at least one: those
    of largest |q_d|, of equal ones the first (with pages of one key SparQ, arXiv 2312.04985, without the mean value
    that stands there for what is left out). A page that is scored by a share of the channels costs as much of a logit.
    """

    near: int = option(
        64, "tokens less than so many before a chunk are seen, rounded up to whole pages", least=1
    )
    sinks: int = option(4, "so many first tokens of the text are seen", least=0)
    page: int = option(16, "tokens of a page", least=1)
    top: int = option(16, "so many pages are opened", least=0)
    summary: Summary = option("bounds", "what a page is scored by", choices=get_args(Summary))
    query: Selector = option("own", QUERY_HELP, choices=SELECTORS)
    chunk: int = option(16, CHUNK_HELP, least=1)
    channels: float = option(
        1.0, "share of the channels that pages are scored by, where q is largest", above=0
    )

    def __post_init__(self):
        super().__post_init__()
        if self.channels > 1:
            self._refuse("channels", "at most 1")

    @property
    def score_cost(self) -> float:
        """The share of the channels."""
        return self.channels

    def score_pages(self, query: Tensor, pages: Tensor, real: Tensor | None = None) -> Tensor:
        """See `PageRule.score_pages`."""
        return scores_of(self.summary, self.asking(query), pages, real)

    def channels_of(self, dim: int) -> int:
        """How many channels of `dim` score pages."""
        return max(1, round(self.channels * dim))

    def asking(self, query: Tensor) -> Tensor:
        """[B, H, R, d], what chunks choose by: 0 in channels that score nothing."""
        count = self.channels_of(query.shape[-1])
        if count == query.shape[-1]:
            return query
        return query * best(query.abs(), torch.ones_like(query, dtype=torch.bool), count)


def scores_of(summary: Summary, query: Tensor, keys: Tensor, real: Tensor | None = None) -> Tensor:
    """[B, H, R, P] of queries [B, H, R, d] and pages of keys [B, H, P, page, d].

    Args:
        real: bool [B or 1, 1, P, page, 1], the keys that the text has, where a page that is not complete is scored; the
            others are 0, and a page of them alone may score anything. None: all.
    """
    if real is not None:
        if summary == "mean":
            return query @ (keys.sum(3) / real.sum(3).clamp_min(1)).mT
        most, least = (
            keys.masked_fill(~real, -torch.inf).amax(3),
            keys.masked_fill(~real, torch.inf).amin(3),
        )
        return query.clamp_min(0) @ most.mT + query.clamp_max(0) @ least.mT
    if summary == "mean":
        return query @ keys.mean(3).mT
    return query.clamp_min(0) @ keys.amax(3).mT + query.clamp_max(0) @ keys.amin(3).mT


def pages_of(key: Tensor, size: int) -> Tensor:
    """[B, H, P, size, d]: keys [B, H, M, d] by pages, the last one filled up with zeros."""
    size = cut_to_text(size, key.shape[2])
    return pad(key, (0, 0, 0, -key.shape[2] % size)).unflatten(2, (-1, size))
