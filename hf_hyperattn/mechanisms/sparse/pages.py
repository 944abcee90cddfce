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
        seen = places - opening + 1 + opening.clamp_max(self.sinks) + pages.clamp_max(self.top) * self.page
        return share_of(seen + pages.where(pages > self.top, 0).double() * self.channels / self.chunk)

    def channels_of(self, dim: int) -> int:
        """How many channels of `dim` score pages."""
        return max(1, round(self.channels * dim))

    def opening(self, start: Tensor) -> Tensor:
        """The token from which on a chunk that begins at `start` sees everything."""
        return (start - self.near + 1).clamp_min(0) // self.page * self.page

    def visible(self, call: RuleCall) -> Tensor:
        """[B, H, N, M]."""
        chunks = chunks_of(call, self.chunk, self.query)
        opening = self.opening(chunks.start)
        keys = pages_of(call.key, self.page)
        stops = torch.arange(1, keys.shape[2] + 1, device=keys.device) * self.page
        candidates = (stops <= opening) & (stops > self.sinks)
        if call.window is not None:  # what a cache has dropped, or drops before the chunk ends, is no candidate
            candidates = candidates & (stops - self.page >= chunks.start + self.chunk - call.window)
        chunks.check(call, candidates)
        chosen = best(scores_of(self.summary, self.asking(chunks.query), keys), candidates, self.top)
        page = cut_to_text(self.page, call.key.shape[2])
        tokens = chunks.spread(chosen).repeat_interleave(page, -1)[..., : call.key.shape[2]]
        return tokens | (call.tokens >= chunks.spread(opening)) | (call.tokens < self.sinks)

    def asking(self, query: Tensor) -> Tensor:
        """[B, H, R, d], what chunks choose by: 0 in channels that score nothing."""
        count = self.channels_of(query.shape[-1])
        if count == query.shape[-1]:
            return query
        return query * best(query.abs(), torch.ones_like(query, dtype=torch.bool), count)


def scores_of(summary: Summary, query: Tensor, keys: Tensor) -> Tensor:
    """[B, H, R, P] of queries [B, H, R, d] and pages of keys [B, H, P, page, d]."""
    if summary == "mean":
        return query @ keys.mean(3).mT
    return query.clamp_min(0) @ keys.amax(3).mT + query.clamp_max(0) @ keys.amin(3).mT


def pages_of(key: Tensor, size: int) -> Tensor:
    """[B, H, P, size, d]: keys [B, H, M, d] by pages, the last one filled up with zeros."""
    size = cut_to_text(size, key.shape[2])
    return pad(key, (0, 0, 0, -key.shape[2] % size)).unflatten(2, (-1, size))
