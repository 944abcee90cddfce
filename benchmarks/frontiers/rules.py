"""Which rules are measured, and which of them each method chooses from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from hf_hyperattn.inject import Allocation, hsa, sparse
from hf_hyperattn.inject.hsa import HsaHeadRule
from hf_hyperattn.inject.sparse import SparseHeadRule
from hf_hyperattn.mechanisms.sparse import (
    Clusters,
    NestedWindows,
    Pages,
    SparseRule,
    VerticalSlash,
    Window,
    sparse_rule,
)
from hf_hyperattn.mechanisms.sparse.rules import option, share_of

#: The rules of the kernel, in a model that learned by `benchmarks/healing.py` what they lose.
HEALED = "rules with a kernel, healed"


@sparse_rule("exact_top_k")
@dataclass(frozen=True)
class ExactTopK(SparseRule):
    """The `top` keys of largest weight, found for nothing: what no rule of so many tokens can beat by much.

    Keys of one weight are seen together.
    """

    top: int = option(64, "keys that a query sees", least=1)

    def share(self, length: int) -> float:
        return share_of(torch.arange(1, length + 1).clamp_max(self.top))

    def visible(self, call) -> torch.Tensor:
        logits = (call.query @ call.key.mT).masked_fill(call.tokens > call.places, -torch.inf)
        if self.top >= logits.shape[-1]:
            return logits > -torch.inf
        # numpy selects many numbers of a row faster than torch.topk, which also sorts them and finds their places
        parted = np.partition(logits.numpy(), -self.top, -1)
        return (logits >= torch.from_numpy(parted[..., -self.top, None])) & (logits > -torch.inf)


def is_pages(rule: Any, summary: str, query: str) -> bool:
    """Whether a rule is of pages of 16 that are chosen so."""
    rule = getattr(rule, "rule", None)
    return isinstance(rule, Pages) and (rule.summary, rule.query, rule.page, rule.channels) == (
        summary,
        query,
        16,
        1,
    )


def is_sparq(rule: SparseRule) -> bool:
    """Whether a rule is of single keys that each query finds by a part of its channels."""
    return isinstance(rule, Pages) and rule.page == 1 and rule.query == "own" and rule.channels < 1


def is_fast(rule: SparseRule) -> bool:
    """Whether a rule is of those whose kernel takes less time where pairs are fewer, as `hyperattn inject` has them."""
    return isinstance(rule, Window) or (isinstance(rule, Pages) and not is_sparq(rule))


def is_named(*names: str) -> Callable[[Any], bool]:
    """A test of rules: those of sparse attention that are registered under one of these names."""
    return lambda rule: isinstance(rule, SparseHeadRule) and rule.rule.name in names


#: What heads get that are no retrieval heads: DuoAttention's own, and for short texts a quarter of it.
RETRIEVAL = (Window(256, 64), Window(64, 16))
#: Which rules a method chooses from.
METHODS: dict[str, Callable[[Any], bool]] = {
    "sinks and window": is_named("window"),
    "retrieval heads": lambda rule: isinstance(rule, SparseHeadRule) and rule.rule in RETRIEVAL,
    "vertical-slash": is_named("vertical_slash"),
    "mean pages": lambda rule: is_pages(rule, "mean", "own"),
    "Quest": lambda rule: is_pages(rule, "bounds", "own"),
    "Quest, shared by 16": lambda rule: is_pages(rule, "bounds", "previous"),
    "SparQ": lambda rule: isinstance(rule, SparseHeadRule) and is_sparq(rule.rule),
    "clusters": is_named("clusters"),
    "trees": is_named("nested_windows"),
    "HSA": lambda rule: isinstance(rule, HsaHeadRule),
    "rules with a kernel": lambda rule: isinstance(rule, SparseHeadRule) and is_fast(rule.rule),
    "rules with a kernel and SparQ": is_named("window", "pages"),
    HEALED: lambda rule: isinstance(rule, SparseHeadRule) and is_fast(rule.rule),
    "all rules": lambda rule: not is_named("exact_top_k")(rule),
    "exact top-k": is_named("exact_top_k"),
}
#: Methods that choose from rules of several others.
COLLECTIONS = (
    "all rules",
    "rules with a kernel",
    "rules with a kernel and SparQ",
    HEALED,
    "retrieval heads",
)
#: What an allocation by head is changed to before it is run: (method, rule -> rule).
ABLATIONS: dict[str, Callable[[Any], Any]] = {
    "HSA, blocks dropped": lambda rule: replace(rule, block_bias=-math.inf),
    "HSA, no refinement": lambda rule: replace(rule, refine_top_k=0),
}


def as_run(allocation: Allocation) -> Allocation:
    """An allocation with exact top-k as single keys that every query chooses by itself, which the kernel computes.

    Masks take five times as long. A query sees its own key always: where that is none of the `top` largest, instead of
    the last of them.
    """

    def of(rule: Any) -> Any:
        exact = is_named("exact_top_k")(rule)
        return (
            SparseHeadRule(Pages(1, 0, 1, rule.rule.top - 1, "mean", "own", 1)) if exact else rule
        )

    return replace(
        allocation,
        layers={name: tuple(map(of, rules)) for name, rules in allocation.layers.items()},
    )


@cache
def candidates(length: int) -> list[Any]:
    """All rules that are measured; those of one class are beside each other. Their shares take a while to count."""
    top = [
        ExactTopK(max(1, int(length * share)))
        for share in (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25)
    ]
    windows = [Window(near, sparse.SINKS) for near in sparse.NEAR if near <= length / 2]
    rules = [*windows, *pages(length), *more_rules(length), *RETRIEVAL, *top]
    return [*hsa.candidates(length), *map(SparseHeadRule, dict.fromkeys(rules))]


def pages(length: int) -> list[Pages]:
    """Pages of 16 and of 4, single keys that each query finds by a part of its channels, or that 16 queries share."""
    bounds, shared, mean = ("bounds", "own"), ("bounds", "previous"), ("mean", "own")
    if length < 8192:
        first = [
            (1, "mean", "previous"),
            *((size, *kind) for size in (4, 16) for kind in (bounds, shared, mean)),
        ]
        near, opened, sparq = (
            (16, 64, 256),
            (64, 128, 256, 512, 1024),
            (32, 64, 128, 256, 512, 1024),
        )
    else:  # a rule takes a minute to measure there
        first = [(1, "mean", "previous"), (4, *bounds)]
        near, opened, sparq = (16, 64), (64, 128, 256, 512, 1024, 2048), (64, 128, 256, 512, 1024)
    small = [
        Pages(n, 4, size, tokens // size, summary, query)
        for n in near
        for tokens in opened
        if n + tokens < length / 2
        for size, summary, query in first
    ]
    small = [rule for rule in small if rule.share(length) <= sparse.MOST]
    rivals = [
        Pages(n, 4, 16, tokens // 16, *kind)
        for n in ((16, 64, 256) if length < 8192 else (64, 256))
        for tokens in (
            (16, 32, 64, 128, 256, 512, 1024) if length < 8192 else (64, 128, 256, 512, 1024)
        )
        for kind in (bounds, shared, mean)
        if n + tokens < length / 2
    ]
    keys = [
        Pages(n, 4, 1, tokens, "mean", "own", channels=channels)
        for n in ((16, 64) if length < 8192 else (64,))
        for tokens in sparq
        for channels in (1 / 16, 1 / 8)
        if n + tokens < length / 2
    ]
    few = [
        Pages(n, 4, 1, tokens, "mean", "previous", channels=0.25)
        for n in (16, 64)
        for tokens in opened
        if n + tokens < length / 2
    ]
    return [*small, *rivals, *keys, *few]


def more_rules(length: int) -> list[SparseRule]:
    """Columns and diagonals, clusters of keys, and trees of windows."""
    sizes = [
        (near, n)
        for near in ((32, 128) if length < 8192 else (64,))
        for n in (16, 64, 128, 256)
        if 2 * n + near < length / 2
    ]
    slashes = [
        VerticalSlash(near, 4, n, n, every=min(512, length // 8), measured=16) for near, n in sizes
    ]
    options: Any = {"segment": length // 16, "rounds": 2, "query": "previous"}
    clusters = [
        Clusters(64, 4, top=top, **options)
        for top in (2, 4, 8, 16, 32)
        if 64 + 16 * top < length / 2
    ]
    trees = [
        NestedWindows(windows, near, 4, top, summary, query)
        for windows in ((4, 16, 64), (16, 64))
        for near in ((16, 64, 256) if length < 8192 else (64,))
        for top in (4, 16)
        for summary, query in (("mean", "own"), ("bounds", "previous"))
    ]
    return [*slashes, *clusters, *trees]


def group_of(rule: Any) -> str:
    """The kind of a rule; what the rules of a kind cost is kept together."""
    if isinstance(rule, HsaHeadRule):
        return "hsa"
    few = isinstance(rule.rule, Pages) and rule.rule.channels < 1 and rule.rule.query != "own"
    return "shared_channels" if few else rule.rule.name
