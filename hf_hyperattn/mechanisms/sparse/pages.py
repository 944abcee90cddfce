"""Pages of keys of which a query opens the best, by a summary of each: bounds (Quest) or the mean (MoBA, InfLLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...fields import option
from .rules import RuleCall, share_of, sparse_rule
from .selection import CHUNK_HELP, QUERY_HELP, SELECTORS, SelectingRule, Selector, best, chunks_of, cut_to_text

Summary = Literal["bounds", "mean"]


@sparse_rule("pages")
@dataclass(frozen=True)
class Pages(SelectingRule):
    """The nearest tokens, the first ones, and the `top` pages of all others with the largest scores.

    Page a holds tokens a·page ... (a+1)·page - 1. A chunk of queries that begins at token c sees all tokens from
    w = page·floor(max(0, c - near + 1) / page) on, the sinks, and chooses among the pages before w. With q what the
    chunk selects by, a page's score is q·(its mean key), or with bounds Σ_d max(q_d m_d, q_d M_d), m and M the least
    and the largest of its keys by channel: no key of the page has a larger product with q (Quest, arXiv 2406.10774).
    Where `channels` is below 1, d are that share of the channels alone, rounded, at least one: those of largest |q_d|,
    of equal ones the first (with pages of one key SparQ, arXiv 2312.04985, without the mean value that stands there for
    what is left out).

    In attention that is not causal, near are the pages that hold a token at a distance of less than `near` from the
    chunk, before or after it. All other pages of the text can be opened. The last page of the text may be shorter; only
    its own tokens enter its score. query="previous" is refused there, since later pages have no chunk before them.
    """

    near: int = option(64, "tokens less than so many before a chunk are seen, rounded up to whole pages", least=1)
    sinks: int = option(4, "so many first tokens of the text are seen", least=0)
    page: int = option(16, "tokens of a page", least=1)
    top: int = option(16, "so many pages are opened", least=0)
    summary: Summary = option("bounds", "what a page is scored by", choices=get_args(Summary))
    query: Selector = option("own", QUERY_HELP, choices=SELECTORS)
    chunk: int = option(16, CHUNK_HELP, least=1)
    channels: float = option(1.0, "share of the channels that pages are scored by, where q is largest", above=0)

    def __post_init__(self):
        super().__post_init__()
        if self.channels > 1:
            self._refuse("channels", "at most 1")

    def share(self, length: int) -> float:
        """Tokens seen, and pages scored, where there are more than are opened, over the queries that share them.

        A page that is scored by a share of the channels counts as much of a logit.
        """
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
        after = (-(length // -self.page) + closing // -self.page).clamp_max(-(length // -self.page) - first)
        seen = closing - opening + opening.clamp_max(sinks) + (sinks - closing).clamp_min(0)
        return share_of(seen + self.count_chosen(before + after.clamp_min(0)), is_causal=False)

    def count_chosen(self, pages: Tensor) -> Tensor:
        """Return how many logits a query computes: to score this many pages, and for the tokens of the chosen ones."""
        scored = pages.where(pages > self.top, 0).double() * self.channels / self.chunk
        return pages.clamp_max(self.top) * self.page + scored

    @property
    def only_causal(self) -> str:
        """A choice by the chunk before."""
        return "Pages(query='previous')" if self.query == "previous" else ""

    def channels_of(self, dim: int) -> int:
        """How many channels of `dim` score pages."""
        return max(1, round(self.channels * dim))

    def opening(self, start: Tensor) -> Tensor:
        """The token from which on a chunk that begins at `start` sees everything."""
        return (start - self.near + 1).clamp_min(0) // self.page * self.page

    def closing(self, start: Tensor) -> Tensor:
        """The end of the tokens near a chunk that begins at `start`, in attention that is not causal."""
        return (start + self.chunk + self.near - 2) // self.page * self.page + self.page

    def visible(self, call: RuleCall) -> Tensor:
        """[B, H, N, M]."""
        chunks = chunks_of(call, self.chunk, self.query)
        opening, closing = self.opening(chunks.start), self.closing(chunks.start)
        keys, real = pages_of(call.key, self.page), None
        starts = torch.arange(keys.shape[2], device=keys.device) * self.page
        stops = starts + self.page
        near = call.tokens >= chunks.spread(opening)
        candidates = stops <= opening
        if call.lengths is not None:
            lengths = call.lengths[:, None, None, None]
            near = near & (call.tokens < chunks.spread(closing))
            candidates = candidates | ((starts >= closing) & (starts < lengths))
            stops = stops.minimum(lengths)
            inside = torch.arange(keys.shape[3], device=keys.device)
            real = (starts[:, None] + inside < lengths)[..., None]
        candidates = candidates & (stops > self.sinks)
        if call.window is not None:  # what a cache has dropped, or drops before the chunk ends, is no candidate
            candidates = candidates & (starts >= chunks.start + self.chunk - call.window)
            if not call.is_causal:
                candidates = candidates & (stops <= chunks.start + call.window)
        chunks.check(call, candidates)
        chosen = best(scores_of(self.summary, self.asking(chunks.query), keys, real), candidates, self.top)
        page = cut_to_text(self.page, call.key.shape[2])
        tokens = chunks.spread(chosen).repeat_interleave(page, -1)[..., : call.key.shape[2]]
        return tokens | near | (call.tokens < self.sinks)

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
        most, least = keys.masked_fill(~real, -torch.inf).amax(3), keys.masked_fill(~real, torch.inf).amin(3)
        return query.clamp_min(0) @ most.mT + query.clamp_max(0) @ least.mT
    if summary == "mean":
        return query @ keys.mean(3).mT
    return query.clamp_min(0) @ keys.amax(3).mT + query.clamp_max(0) @ keys.amin(3).mT


def pages_of(key: Tensor, size: int) -> Tensor:
    """[B, H, P, size, d]: keys [B, H, M, d] by pages, the last one filled up with zeros."""
    size = cut_to_text(size, key.shape[2])
    return pad(key, (0, 0, 0, -key.shape[2] % size)).unflatten(2, (-1, size))
