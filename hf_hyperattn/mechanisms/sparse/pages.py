"""Rules that divide keys into pages and open the pages with the largest scores.

`PageRule` is the base for any page score. `Pages` scores a page by a summary: bounds (Quest) or the
mean (MoBA, InfLLM).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...config.fields import option
from ..selection.best import select_best
from .rules import RuleCall, share_of, sparse_rule
from .selection import (
    CHUNK_HELP,
    QUERY_HELP,
    SELECTORS,
    Chunks,
    SelectingRule,
    Selector,
    limit_to_text,
    split_chunks,
)

Summary = Literal["bounds", "mean"]
#: Methods of `PageRule` whose results the kernel computes itself. It would not notice a subclass
#: that changes them.
FIXED = ("visible", "opening", "choose_pages", "find_candidates", "select_pages")
#: Scores that `PageRule.list_pages` computes at a time, at most.
MOST_SCORES = 2**21


@dataclass(frozen=True, eq=False)
class Choice:
    """The pages that chunks of queries have chosen.

    Args:
        chunks: Of the call's queries.
        pages: Bool [B, H, R, P], the pages of each chunk.
        opening, closing: int64 [B, 1, R, 1], where the tokens near each chunk begin and end.
    """

    chunks: Chunks
    pages: Tensor
    opening: Tensor
    closing: Tensor


class PageRule(SelectingRule):
    """Show the nearest tokens, the first ones, and the best `top` other pages.

    A rule of your own is a frozen dataclass with the fields below, and defines `score_pages`. It
    runs on a kernel in causal calls on a CPU or a GPU, and under a mask elsewhere, with the same
    result. A rule that overrides another method (`FIXED`) always runs under a mask.

    Page a holds tokens a·page ... (a+1)·page - 1. A chunk of queries that begins at token c sees
    the sinks and all tokens from w = page·floor(max(0, c - near + 1) / page) on. Among the pages
    before w it opens the `top` with the largest scores. Ties go to the first page.

    In attention that is not causal, near pages hold a token at a distance of less than `near` from
    the chunk, before or after it. All other pages of the text can be opened. The last page of the
    text may be shorter; only its own tokens enter its score. query="previous" raises an error
    there, since later pages have no chunk before them.

    Args:
        near: Tokens at a distance of less than this before a chunk are seen, rounded up to whole
            pages; at least 1.
        sinks: Number of first tokens of the text that every query sees.
        page: Tokens of a page; at least 1.
        top: Number of pages that a chunk opens.
        query: Selecting vector of a chunk, see `selection.QUERY_HELP`.
        chunk: Queries that share a choice; 1 if query="own".
    """

    near: int
    sinks: int
    page: int
    top: int

    def __post_init__(self):
        super().__post_init__()
        # Checked here as well: a subclass may declare its fields without `option`. The type is
        # compared, because bool is a subclass of int.
        for name, least in (("near", 1), ("sinks", 0), ("page", 1), ("top", 0), ("chunk", 1)):
            number = getattr(self, name)
            if type(number) is not int or number < least:
                self._refuse(name, f"integers of at least {least}")
        if self.query not in SELECTORS:
            self._refuse("query", ", ".join(SELECTORS))

    @classmethod
    def find_changed_method(cls) -> str:
        """Return the name of a method that keeps this class from the kernel, or ""."""
        for name in FIXED:
            if getattr(cls, name) is not getattr(PageRule, name):
                return name
        return ""

    @abstractmethod
    def score_pages(self, query: Tensor, pages: Tensor, real: Tensor | None = None) -> Tensor:
        """Return the scores of pages, [B, H, R, P]; those with the largest are opened.

        The score of a page must depend on no later page: `pages` also holds keys that come after a
        chunk.

        Args:
            query: [B, H, R, d], the selecting vector of each chunk; float32, or float64 if the call
                is.
            pages: [B, H, P, page, d], the keys of each page; the last page is padded with zeros.
            real: Bool [B or 1, 1, P, page, 1], False at this padding. Given in attention that is
                not causal, in which an incomplete page may be opened. None: all True. A page
                without keys may have any score.
        """

    @property
    def score_cost(self) -> float:
        """Cost of scoring one page, as a share of the cost of one logit."""
        return 1.0

    def share(self, length: int) -> float:
        """Return the share of causal logits that a head computes.

        Counted are the tokens seen, and the pages scored divided by the chunk that shares them.

        Pages are scored only if there are more than `top`.
        """
        places = torch.arange(length)
        opening = self.opening(places // self.chunk * self.chunk)
        # Candidates are the pages before the near tokens, without the pages that hold only sinks.
        pages = (opening // self.page - self.sinks // self.page).clamp_min(0)
        seen = places - opening + 1 + opening.clamp_max(self.sinks)
        return share_of(seen + self.count_chosen(pages))

    def share_both_sides(self, length: int) -> float:
        """Return the same share without causality.

        The last page counts as if it were complete.
        """
        if self.only_causal:
            return super().share_both_sides(length)
        chunks = torch.arange(length) // self.chunk * self.chunk
        opening = self.opening(chunks)
        closing = self.closing(chunks).clamp_max(length)
        sinks = min(self.sinks, length)
        # The first page that does not hold sinks only, and the number of pages (rounded up).
        first = sinks // self.page
        pages = -(length // -self.page)
        before = (opening // self.page - first).clamp_min(0)
        after = (pages + closing // -self.page).clamp_max(pages - first)
        seen = closing - opening + opening.clamp_max(sinks) + (sinks - closing).clamp_min(0)
        return share_of(seen + self.count_chosen(before + after.clamp_min(0)), is_causal=False)

    def count_chosen(self, pages: Tensor) -> Tensor:
        """Return the logits of a query for scoring pages and reading the chosen ones.

        Args:
            pages: Number of candidates of each query.
        """
        scored = pages.where(pages > self.top, 0).double() * self.score_cost / self.chunk
        return pages.clamp_max(self.top) * self.page + scored

    @property
    def only_causal(self) -> str:
        """The setting that needs causal attention: a choice by the chunk before."""
        return f"{type(self).__name__}(query='previous')" if self.query == "previous" else ""

    def opening(self, start: Tensor) -> Tensor:
        """Return the first token near a chunk that begins at `start`."""
        return (start - self.near + 1).clamp_min(0) // self.page * self.page

    def closing(self, start: Tensor) -> Tensor:
        """Return the end of the tokens near a chunk, if attention is not causal."""
        return (start + self.chunk + self.near - 2) // self.page * self.page + self.page

    def choose_pages(self, call: RuleCall) -> Choice:
        """Return the pages that the chunks of a call's queries choose."""
        chunks = split_chunks(call, self.chunk, self.query)
        candidates = self.find_candidates(call, chunks.start)
        chunks.check_known(call, candidates)
        return Choice(
            chunks=chunks,
            pages=self.select_pages(call, chunks.query, candidates),
            opening=self.opening(chunks.start),
            closing=self.closing(chunks.start),
        )

    def find_candidates(self, call: RuleCall, start: Tensor) -> Tensor:
        """Return the pages that chunks may open, bool [B, 1, R, P].

        Args:
            call: With the keys.
            start: int64 [B, 1, R, 1], the first token of each chunk.
        """
        starts = self._find_page_starts(call)
        stops = starts + self.page
        # Only whole pages before the near tokens, so that a choice depends on no later token.
        candidates = stops <= self.opening(start)
        if call.lengths is not None:
            lengths = call.lengths[:, None, None, None]
            # Without causality also the pages after the near tokens. The last page may be
            # incomplete.
            candidates = candidates | ((starts >= self.closing(start)) & (starts < lengths))
            stops = stops.minimum(lengths)
        # A page of sinks only is seen anyway.
        candidates = candidates & (stops > self.sinks)
        if call.window is not None:
            # A cache with a window may have dropped a page, or drop it before the chunk ends.
            # Whether it has must not change the choice, so such a page is no candidate.
            candidates = candidates & (starts >= start + self.chunk - call.window)
            if not call.is_causal:
                candidates = candidates & (stops <= start + call.window)
        return candidates

    def select_pages(self, call: RuleCall, query: Tensor, candidates: Tensor) -> Tensor:
        """Return the candidates with the largest scores, bool [B, H, R, P].

        Args:
            call: With the keys.
            query: [B, H, R, d], the selecting vector of each chunk.
            candidates: From `find_candidates`.
        """
        pages = split_pages(call.key, self.page)
        real = None
        if call.lengths is not None:
            inside = torch.arange(pages.shape[3], device=pages.device)
            tokens = self._find_page_starts(call)[:, None] + inside
            real = (tokens < call.lengths[:, None, None, None])[..., None]
        scores = self.score_pages(query, pages, real)
        shape = (*query.shape[:3], pages.shape[2])
        self._check_scores(scores, shape)
        return select_best(scores.expand(shape), candidates, self.top)

    def _find_page_starts(self, call: RuleCall) -> Tensor:
        """Return the first token of each page, int64 [P]."""
        pages = split_pages(call.key, self.page).shape[2]
        return torch.arange(pages, device=call.key.device) * self.page

    def _check_scores(self, scores: Tensor, shape: tuple[int, ...]) -> None:
        """Raise if the scores of a subclass do not fit [batch, heads, chunks, pages]."""
        fits = scores.dim() == 4 and all(
            size in (1, full) for size, full in zip(scores.shape, shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"{type(self).__name__}.score_pages returned {list(scores.shape)}; allowed: {list(shape)} "
                "[batch, heads, chunks, pages], or 1 where all have the same score"
            )

    def visible(self, call: RuleCall) -> Tensor:
        """Return bool [B, H, N, M], see `SparseRule.visible`."""
        choice = self.choose_pages(call)
        chunks = choice.chunks
        near = call.tokens >= chunks.spread_to_queries(choice.opening)
        if not call.is_causal:
            near = near & (call.tokens < chunks.spread_to_queries(choice.closing))
        # As in `split_pages`: a page longer than the text is cut to it.
        page = limit_to_text(self.page, call.key.shape[2])
        opened = chunks.spread_to_queries(choice.pages).repeat_interleave(page, -1)
        return opened[..., : call.key.shape[2]] | near | (call.tokens < self.sinks)

    def list_pages(self, call: RuleCall, queries: range) -> Tensor:
        """Return the pages that the chunks of some queries of a causal call choose.

        Args:
            call: With all queries.
            queries: A range of the queries that follow the `call.earlier` ones.

        Returns:
            int32 [B, H, chunks, most], as the kernel reads them. Chunk 0 is the chunk of the first
            real query. Lists are padded with -1.
        """
        chunks, count = split_chunks(call, self.chunk, self.query), len(queries)
        asked = slice(call.earlier + queries.start, call.earlier + queries.stop)
        place = call.place[:, asked]
        of_query = chunks.of_query[:, asked]
        real = place >= 0
        # The first real query of each row of the batch, and its place in the text.
        index = real.int().argmax(1, keepdim=True)
        first = place.gather(1, index).clamp_min(0)
        # A query of each chunk: the one at its first token, or the first real one.
        chunk = first // self.chunk + torch.arange(count // self.chunk + 2, device=place.device)
        query = index + (chunk * self.chunk).maximum(first) - first
        # Chunks after the last query, and padding, get empty lists.
        is_there = query < count
        query = query.clamp_max(count - 1)
        is_there = is_there & real.gather(1, query)
        rows = of_query.gather(1, query)
        # A few chunks at a time: scores and marks have a number for each chunk and page.
        pages = -(-call.key.shape[2] // limit_to_text(self.page, call.key.shape[2]))
        step = max(1, MOST_SCORES // max(1, call.query.shape[0] * call.query.shape[1] * pages))
        pairs = zip(rows.split(step, 1), is_there.split(step, 1), strict=True)
        parts = [self._list_chunks(call, chunks.take(r), there) for r, there in pairs]
        # Checked once: on a GPU each check waits for all work before it.
        call.check_chosen(torch.cat([known for _, known in parts], 1))
        return torch.cat([listed for listed, _ in parts], 2)

    def _list_chunks(
        self, call: RuleCall, chunks: Chunks, is_there: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the pages that some chunks choose, and whether they could choose.

        Args:
            call: With all queries.
            chunks: The chunks.
            is_there: Bool [B, R], False for chunks whose lists stay empty.

        Returns:
            int32 [B, H, R, most], and bool [B, R]: False for chunks that would have to choose by
            queries which are not known.
        """
        is_there = is_there[:, None, :, None]
        candidates = self.find_candidates(call, chunks.start) & is_there
        known = chunks.known | ~candidates.any(-1)[:, 0]
        chosen = self.select_pages(call, chunks.query, candidates)
        # Turn marks into numbers: pages that are not chosen get the largest number.
        pages = chosen.shape[3]
        most = min(self.top, call.key.shape[2] // self.page)
        number = torch.arange(pages, dtype=torch.int32, device=chosen.device).where(chosen, pages)
        listed = number.topk(most, largest=False).values
        return listed.masked_fill(listed == pages, -1), known


@sparse_rule("pages")
@dataclass(frozen=True)
class Pages(PageRule):
    """A `PageRule` that scores pages by a summary of their keys.

    Let q be the selecting vector of a chunk. With summary="mean" the score of a page is q·(its mean
    key). With "bounds" it is Σ_d max(q_d m_d, q_d M_d), where m and M are the smallest and the
    largest of its keys in each channel. No key of the page has a larger product with q (Quest,
    arXiv 2406.10774).

    With `channels` below 1, only this share of the channels counts, rounded, at least one. These
    are the channels with the largest |q_d|; ties go to the first. Scoring a page then costs the
    same share of a logit. With pages of one key this is SparQ (arXiv 2312.04985), without the mean
    value that SparQ puts in for the rest.
    """

    near: int = option(
        64,
        "tokens at a distance of less than this before a chunk are seen, rounded up to whole pages",
        least=1,
    )
    sinks: int = option(4, "number of first tokens of the text that are seen", least=0)
    page: int = option(16, "tokens of a page", least=1)
    top: int = option(16, "number of pages that are opened", least=0)
    summary: Summary = option(
        "bounds", "summary of a page by which it is scored", choices=get_args(Summary)
    )
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
        """Cost of scoring one page: the share of the channels."""
        return self.channels

    def score_pages(self, query: Tensor, pages: Tensor, real: Tensor | None = None) -> Tensor:
        """See `PageRule.score_pages`."""
        return score_summaries(self.summary, self.mask_channels(query), pages, real)

    def channels_of(self, dim: int) -> int:
        """Return how many of `dim` channels score pages."""
        return max(1, round(self.channels * dim))

    def mask_channels(self, query: Tensor) -> Tensor:
        """Return queries [B, H, R, d] with 0 in channels that score nothing."""
        count = self.channels_of(query.shape[-1])
        if count == query.shape[-1]:
            return query
        every = torch.ones_like(query, dtype=torch.bool)
        return query * select_best(query.abs(), every, count)


def score_summaries(
    summary: Summary, query: Tensor, keys: Tensor, real: Tensor | None = None
) -> Tensor:
    """Return the scores of pages, [B, H, R, P].

    Args:
        summary: Kind of summary.
        query: [B, H, R, d].
        keys: [B, H, P, page, d], the keys of each page; 0 at padding.
        real: Bool [B or 1, 1, P, page, 1], False at padding, if incomplete pages are scored. A page
            without keys may have any score. None: all True.
    """
    if summary == "mean":
        if real is None:
            return query @ keys.mean(3).mT
        return query @ (keys.sum(3) / real.sum(3).clamp_min(1)).mT
    if real is None:
        most, least = keys.amax(3), keys.amin(3)
    else:
        most = keys.masked_fill(~real, -torch.inf).amax(3)
        least = keys.masked_fill(~real, torch.inf).amin(3)
    # Quest's Σ_d max(q_d m_d, q_d M_d) as two matrix products: a positive q_d takes M_d, a negative
    # one m_d.
    return query.clamp_min(0) @ most.mT + query.clamp_max(0) @ least.mT


def split_pages(key: Tensor, size: int) -> Tensor:
    """Return keys [B, H, M, d] as pages [B, H, P, size, d], padded with zeros."""
    size = limit_to_text(size, key.shape[2])
    missing = -key.shape[2] % size
    # `pad` would copy the keys in any case.
    return (pad(key, (0, 0, 0, missing)) if missing else key).unflatten(2, (-1, size))
