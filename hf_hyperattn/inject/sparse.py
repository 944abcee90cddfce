"""The rules of sparse attention (`SparseConfig`) as rules that are measured and allocated; they mix within a layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..mechanisms import sparse
from ..mechanisms.base import HostCall
from ..mechanisms.selection.growing import TAKEN_BACK
from .rules import CHUNK, CandidateRule

#: Up to so many tokens a rule selects for the whole text at once; beyond, chunk by chunk, which needs less memory.
AT_ONCE = 4096


@dataclass(frozen=True)
class SparseCandidate(CandidateRule):
    """A rule of `hf_hyperattn.mechanisms.sparse`, for a head or for a whole layer."""

    rule: sparse.SparseRule

    @property
    def is_exact(self) -> bool:
        return self.rule.is_exact

    @property
    def group(self) -> str:
        return "sparse"

    @property
    def family(self) -> str:
        rule = self.rule
        if isinstance(rule, sparse.Window):
            return "sinks and window"
        if isinstance(rule, sparse.Pages):
            kind = "Quest pages" if rule.summary == "bounds" else "mean pages"
            kind = "single keys" if rule.page == 1 else kind
            return kind if rule.query == "own" else f"{kind}, shared by {rule.chunk}"
        return rule.name

    @staticmethod
    def layer_config(rules: Sequence[CandidateRule], length: int) -> sparse.SparseConfig:
        return sparse.SparseConfig(tuple(r.rule for r in rules), tuned_length=length)  # type: ignore[attr-defined]

    @staticmethod
    def base_config() -> sparse.SparseConfig:
        return sparse.SparseConfig(sparse.Exact())


@dataclass(frozen=True)
class SparseHeadRule(SparseCandidate):
    """A rule for one head."""

    def share(self, length: int) -> float:
        return share_of(self.rule, length)

    def kept(self, length: int) -> float:
        """Of a window, its tokens, the sinks, and those that can be taken back; summaries of pages are not counted."""
        reach = None if self.rule.earlier else self.rule.reach
        return 1.0 if reach is None else min(1.0, (sum(reach) + TAKEN_BACK) / length)

    def exact(self) -> SparseHeadRule:
        return SparseHeadRule(sparse.Exact())

    @staticmethod
    def compare(
        call: HostCall,
        rules: Sequence[SparseHeadRule],  # type: ignore[override]
        starts: Sequence[int],
        project: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """As in `CandidateRule`: the weights of ordinary attention, those of hidden keys left out, the rest scaled.

        What is left out has the weight 1 - kept, so that KL(under the rule ‖ ordinary attention) is -log kept.
        """
        query, key, value = (t.detach()[0].float() for t in (call.query, call.key, call.value))
        at = torch.cat([torch.arange(s, s + CHUNK, device=query.device) for s in starts])
        groups = len(query) // len(key)
        full_key, full_value = (t.repeat_interleave(groups, 0) for t in (key, value))
        logits = call.scale * query[:, at] @ full_key.mT
        logits.masked_fill_(torch.arange(key.shape[1], device=at.device) > at[:, None], -torch.inf)
        whole = logits.logsumexp(-1, keepdim=True)
        if call.options.sinks is not None:
            whole = torch.logaddexp(whole, call.options.sinks.float().view(-1, 1, 1))
        weights = (logits - whole).exp_()
        rest = 1 - weights.sum(-1)  # what a sink takes
        for rule in rules:
            kept = weights * seen(rule.rule, query, full_key, float(call.scale), starts, at)
            total = (kept.sum(-1) + rest).clamp_min(1e-30)
            yield project(kept @ full_value / total[..., None]), -total.log()


def seen(
    rule: sparse.SparseRule,
    query: Tensor,
    key: Tensor,
    scale: float,
    starts: Sequence[int],
    at: Tensor,
) -> Tensor:
    """Bool [H, R, N]: the keys that the sampled queries see; of queries and keys [H, N, d] of a whole text."""
    if not rule.earlier:  # it depends on the query and the keys alone
        call = sparse.RuleCall(query[None, :, at], key[None], scale, at[None])
        mask = rule.visible(call) & (call.tokens <= call.places)
        return mask.expand(1, len(query), len(at), key.shape[1])[0]
    if query.shape[1] <= AT_ONCE:
        return rule.mask(query[None], key[None], scale)[0][:, at]
    parts = []
    later = (
        rule.earlier if getattr(rule, "query", None) == "chunk" else 0
    )  # the rest of the last query's chunk
    for start in starts:
        first = max(0, start - rule.earlier)
        part = query[None, :, first : start + CHUNK + later]
        parts.append(rule.mask(part, key[None], scale, first, start - first)[0][:, :CHUNK])
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class SparseLayerRule(SparseCandidate):
    """A rule for all heads of an encoder's layer."""

    causal = False

    def share(self, length: int) -> float:
        """Of all length² pairs."""
        return share_of(self.rule, length, is_causal=False)

    def exact(self) -> SparseLayerRule:
        return SparseLayerRule(sparse.Exact())

    def __str__(self) -> str:
        rule = self.rule
        if isinstance(rule, sparse.Pages):
            return f"{self.family}: page {rule.page} near {rule.near} top {rule.top}"
        if isinstance(rule, sparse.Window):
            return f"{self.family}: near {rule.near}"
        return self.family


@lru_cache(4096)
def share_of(rule: sparse.SparseRule, length: int, is_causal: bool = True) -> float:
    """The rule's own; it is asked for often."""
    return rule.share(length) if is_causal else rule.share_both_sides(length)


#: Tokens of a page, what it is scored by, by whose query, and by which share of its channels. Single keys only where 16
#: queries share the search: where every query searches by itself, a prompt takes longer than with full attention.
PAGES: tuple[tuple[int, Any, Any, float], ...] = (
    (1, "mean", "previous", 1.0),
    (1, "mean", "previous", 0.25),
    (4, "bounds", "own", 1.0),
    (4, "mean", "own", 1.0),
    (16, "bounds", "previous", 1.0),
    (16, "bounds", "own", 1.0),
)
#: What a head may be given, in tokens: windows, what is seen beside pages, and what pages open.
NEAR, SINKS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048), 4
PAGE_NEAR, OPENED = (16, 64), (32, 64, 128, 256, 512, 1024)
#: Pages, no more pairs than this: nearness alone is the better use of more.
MOST = 0.5
#: What a layer of an encoder may be given, in tokens; the first token of a passage is often [CLS]. Single keys only
#: where 16 queries share the search, which otherwise computes every pair.
LAYER_NEAR, LAYER_SINKS, LAYER_PAGE_NEAR, LAYER_OPENED = (
    (8, 16, 32, 64, 128, 256),
    1,
    (4, 16),
    (16, 32, 64, 128),
)
LAYER_PAGES: tuple[tuple[int, Any, Any], ...] = (
    (1, "mean", "chunk"),
    (4, "mean", "chunk"),
    (4, "bounds", "own"),
    (16, "bounds", "chunk"),
)


def candidates(length: int) -> list[SparseHeadRule]:
    """The rules that are measured for texts of a length: windows, pages by their bounds or means, and single keys."""
    windows = [sparse.Window(near, SINKS) for near in NEAR if near <= length / 2]
    pages = [
        sparse.Pages(near, SINKS, page, opened // page, summary, query, channels=channels)
        for near, opened in itertools.product(PAGE_NEAR, OPENED)
        if near + opened < length / 2
        for page, summary, query, channels in PAGES
    ]
    fine = [rule for rule in pages if rule.share(length) <= MOST]
    return [SparseHeadRule(rule) for rule in (*windows, *fine)]


def layer_candidates(length: int) -> list[SparseLayerRule]:
    """The rules of an encoder's layer for passages of `length` tokens: windows, pages, and single keys."""
    windows = [sparse.Window(near, LAYER_SINKS) for near in LAYER_NEAR if 4 * near <= length]
    pages = [
        sparse.Pages(near, LAYER_SINKS, page, opened // page, summary, query)
        for near, opened in itertools.product(LAYER_PAGE_NEAR, LAYER_OPENED)
        if 2 * (near + opened) < length
        for page, summary, query in LAYER_PAGES
    ]
    fine = [rule for rule in pages if rule.share_both_sides(length) <= MOST]
    return [SparseLayerRule(rule) for rule in (*windows, *fine)]
