"""Sparse attention rules (`SparseConfig`) as candidates for injection.

Read `candidates` for the rules that are tried, and `SparseHeadRule.compare` for how one is
measured. All these rules can be mixed within a layer.
"""

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

#: Up to this many tokens, a rule builds its mask for the whole text at once. For longer texts it
#: works chunk by chunk, because the whole mask would need too much memory.
AT_ONCE = 4096

#: Page rules of a head: tokens per page, summary that scores a page, query that chooses, share of
#: the channels that are read. Pages of one token (single keys) only with "previous", where 16
#: queries share a search: if every query searches by itself, a prompt takes longer than with full
#: attention.
PAGES: tuple[tuple[int, Any, Any, float], ...] = (
    (1, "mean", "previous", 1.0),
    (1, "mean", "previous", 0.25),
    (4, "bounds", "own", 1.0),
    (4, "mean", "own", 1.0),
    (16, "bounds", "previous", 1.0),
    (16, "bounds", "own", 1.0),
)
#: Window sizes of a head, in tokens.
NEAR = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
#: First tokens of the text that every rule of a head sees.
SINKS = 4
#: Window sizes of page rules, in tokens.
PAGE_NEAR = (16, 64)
#: Total size of the opened pages, in tokens.
OPENED = (32, 64, 128, 256, 512, 1024)
#: Page rules that compute a larger share of the pairs are left out: beyond it, a plain window is
#: the better use of the same pairs.
MOST = 0.5

#: Window sizes of an encoder layer, in tokens.
LAYER_NEAR = (8, 16, 32, 64, 128, 256)
#: One sink, because the first token of a passage is often [CLS].
LAYER_SINKS = 1
#: Window sizes of page rules of an encoder layer, in tokens.
LAYER_PAGE_NEAR = (4, 16)
#: Total size of the opened pages of an encoder layer, in tokens.
LAYER_OPENED = (16, 32, 64, 128)
#: Page rules of an encoder layer, as in `PAGES` but with all channels. Single keys only with
#: "chunk", where 16 queries share a search: otherwise the search alone computes every pair.
LAYER_PAGES: tuple[tuple[int, Any, Any], ...] = (
    (1, "mean", "chunk"),
    (4, "mean", "chunk"),
    (4, "bounds", "own"),
    (16, "bounds", "chunk"),
)


@dataclass(frozen=True)
class SparseCandidate(CandidateRule):
    """A rule of `hf_hyperattn.rules`, for one head or for a whole layer."""

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
        if not isinstance(rule, sparse.Pages):
            return rule.name
        if rule.page == 1:
            kind = "single keys"
        elif rule.summary == "bounds":
            kind = "Quest pages"
        else:
            kind = "mean pages"
        return kind if rule.query == "own" else f"{kind}, shared by {rule.chunk}"

    @staticmethod
    def layer_config(rules: Sequence[CandidateRule], length: int) -> sparse.SparseConfig:
        return sparse.SparseConfig(tuple(r.rule for r in rules), tuned_length=length)  # type: ignore[attr-defined]

    @staticmethod
    def base_config() -> sparse.SparseConfig:
        return sparse.SparseConfig(sparse.Exact())


@dataclass(frozen=True)
class SparseHeadRule(SparseCandidate):
    """A sparse rule for one head of a causal model."""

    def share(self, length: int) -> float:
        return share_of(self.rule, length)

    def kept(self, length: int) -> float:
        """Return the share of the keys that an evicting cache keeps for a head.

        A window keeps its own tokens, the sinks, and the tokens that a rollback may need. Page
        summaries are not counted.
        """
        # As in the cache: a rule that chooses by earlier queries forgets no key.
        reach = None if self.rule.earlier else self.rule.reach
        if reach is None:
            return 1.0
        return min(1.0, (sum(reach) + TAKEN_BACK) / length)

    def exact(self) -> SparseHeadRule:
        return SparseHeadRule(sparse.Exact())

    @staticmethod
    def compare(
        call: HostCall,
        rules: Sequence[SparseHeadRule],  # type: ignore[override]
        starts: Sequence[int],
        project: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Compare every rule with ordinary attention, as `CandidateRule.compare` describes.

        A rule removes the weights of hidden keys and rescales the remaining ones. If these sum to
        w, then KL(under the rule ‖ ordinary attention) is -log w.
        """
        query, key, value = (t.detach()[0].float() for t in (call.query, call.key, call.value))
        groups = len(query) // len(key)
        key = key.repeat_interleave(groups, 0)
        value = value.repeat_interleave(groups, 0)
        chunks = [torch.arange(s, s + CHUNK, device=query.device) for s in starts]
        places = torch.cat(chunks)
        weights = attention_weights(call, query[:, places], key, places)
        # Attention sinks take weight that belongs to no key, under every rule.
        sink_weight = 1 - weights.sum(-1)
        for rule in rules:
            visible = select_visible(rule.rule, query, key, float(call.scale), starts, places)
            remaining = weights * visible
            # The bound keeps log and division finite if a rule hides every key of a query.
            total = (remaining.sum(-1) + sink_weight).clamp_min(1e-30)
            yield project(remaining @ value / total[..., None]), -total.log()


def attention_weights(call: HostCall, query: Tensor, key: Tensor, places: Tensor) -> Tensor:
    """Return the causal attention weights [H, R, N] of sampled queries.

    Args:
        call: The call that the queries come from, for its scale and attention sinks.
        query: Sampled queries [H, R, d].
        key: Keys [H, N, d] of the whole text.
        places: Position of each sampled query, [R].
    """
    logits = call.scale * query @ key.mT
    later = torch.arange(key.shape[1], device=places.device) > places[:, None]
    logits.masked_fill_(later, -torch.inf)
    total = logits.logsumexp(-1, keepdim=True)
    if call.options.sinks is not None:
        total = torch.logaddexp(total, call.options.sinks.float().view(-1, 1, 1))
    return (logits - total).exp_()


def select_visible(
    rule: sparse.SparseRule,
    query: Tensor,
    key: Tensor,
    scale: float,
    starts: Sequence[int],
    places: Tensor,
) -> Tensor:
    """Return the keys that the sampled queries see, bool [H, R, N].

    Args:
        rule: The sparse rule.
        query: Queries [H, N, d] of the whole text. Some rules choose by queries before the sample.
        key: Keys [H, N, d] of the whole text.
        scale: Factor of the logits.
        starts: First query of each sampled chunk.
        places: Position of each sampled query, [R].
    """
    if not rule.earlier:
        # The choice depends only on the query itself, so the sampled queries are enough.
        call = sparse.RuleCall(query[None, :, places], key[None], scale, places[None])
        mask = rule.visible(call) & (call.tokens <= call.places)
        return mask.expand(1, len(query), len(places), key.shape[1])[0]
    if query.shape[1] <= AT_ONCE:
        return rule.mask(query[None], key[None], scale)[0][:, places]
    # If a chunk of queries chooses together, the rest of the last query's chunk is needed too.
    later = rule.earlier if getattr(rule, "query", None) == "chunk" else 0
    parts = []
    for start in starts:
        first = max(0, start - rule.earlier)
        part = query[None, :, first : start + CHUNK + later]
        parts.append(rule.mask(part, key[None], scale, first, start - first)[0][:, :CHUNK])
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class SparseLayerRule(SparseCandidate):
    """A sparse rule for all heads of an encoder layer."""

    causal = False

    def share(self, length: int) -> float:
        """Return the computed pairs as a share of all length² pairs."""
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
    """Return the share of pairs that a rule computes.

    The result is cached: a rule counts the pairs of every query, and each choice of an allocation
    asks for the shares of all heads.
    """
    return rule.share(length) if is_causal else rule.share_both_sides(length)


def candidates(length: int) -> list[SparseHeadRule]:
    """Return the rules that are tried for causal texts of `length` tokens.

    These are windows, pages scored by bounds or means, and single keys.
    """
    windows = [sparse.Window(near, SINKS) for near in NEAR if near <= length / 2]
    pages = [
        sparse.Pages(
            near=near,
            sinks=SINKS,
            page=page,
            top=opened // page,
            summary=summary,
            query=query,
            channels=channels,
        )
        for near, opened in itertools.product(PAGE_NEAR, OPENED)
        if near + opened < length / 2
        for page, summary, query, channels in PAGES
    ]
    useful = [rule for rule in pages if rule.share(length) <= MOST]
    return [SparseHeadRule(rule) for rule in (*windows, *useful)]


def layer_candidates(length: int) -> list[SparseLayerRule]:
    """Return the rules that are tried for an encoder layer and passages of `length` tokens.

    These are windows, pages, and single keys.
    """
    windows = [sparse.Window(near, LAYER_SINKS) for near in LAYER_NEAR if 4 * near <= length]
    pages = [
        sparse.Pages(
            near=near,
            sinks=LAYER_SINKS,
            page=page,
            top=opened // page,
            summary=summary,
            query=query,
        )
        for near, opened in itertools.product(LAYER_PAGE_NEAR, LAYER_OPENED)
        if 2 * (near + opened) < length
        for page, summary, query in LAYER_PAGES
    ]
    useful = [rule for rule in pages if rule.share_both_sides(length) <= MOST]
    return [SparseLayerRule(rule) for rule in (*windows, *useful)]
