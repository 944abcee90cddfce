"""Key-tied attention over windows as rules of heads, and hierarchical attention as rules of whole encoder layers.

Since tied logits are the means of those they stand for, plus the block bias, KL(tied ‖ ordinary attention) is the
difference of the log-sum-exps plus the bias times the weight of closed blocks (math in docs/hsa.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..mechanisms.base import HostCall
from ..mechanisms.hsa.config import HsaConfig
from ..mechanisms.hsa.layer import EVERYTHING
from ..mechanisms.hsa.open_blocks import first_near
from ..mechanisms.hsa.pairs import count_pairs, count_sibling_pairs
from ..mechanisms.hsa.windowed.key import attend_levels, pool_levels
from ..mechanisms.selection.growing import TAKEN_BACK
from .rules import CHUNK, CandidateRule

#: What a head may be given: small windows at the bottom, so that refinement opens few tokens that do not matter, and
#: few at the top, so that little is looked at to find them.
WINDOWS = ((4, 16, 64), (4, 16), (16, 64, 256))
NEAR = (16, 48, 96, 192, 384, 768, 1536, 3072)
TOP_K = (0, 4, 8, 16, 32, 64, 96)
#: The mean logit understates what a block holds (exp of a mean is below the mean of exp), hence those above 0.
BIASES = (-math.inf, -1.0, 0.0, 0.5, 1.0, 2.0)
#: With refinement, no more pairs than this: nearness alone is the better use of more.
MOST = 0.42
#: What a layer of an encoder may be given.
LAYER_WINDOWS, LAYER_NEAR, LAYER_TOP_K = ((4,), (8,), (16,), (8, 64)), (8, 32, 64), (0, 4)


@dataclass(frozen=True)
class HsaHeadRule(CandidateRule):
    """How one head is tied. `near` of `EVERYTHING` is exact attention; a `block_bias` of -inf drops closed blocks."""

    windows: tuple[int, ...]
    near: int
    sinks: int = 4
    refine_top_k: int = 0
    block_bias: float = 0.0

    @property
    def is_exact(self) -> bool:
        return self.near >= EVERYTHING

    @property
    def group(self) -> tuple[int, ...]:
        return self.windows

    @property
    def family(self) -> str:
        return (
            "sinks and window" if not self.refine_top_k and self.block_bias == -math.inf else "hsa"
        )

    def share(self, length: int) -> float:
        rule, dropped = (self.near, self.sinks, self.refine_top_k), self.block_bias == -math.inf
        return count_pairs(length, self.windows, *rule, dropped=dropped) / (
            length * (length + 1) / 2
        )

    def kept(self, length: int) -> float:
        """Tokens and means under open parents, and all means of the largest windows; without refinement."""
        if self.refine_top_k or self.is_exact:
            return 1.0
        own, held = (
            max(0, length - TAKEN_BACK) // self.windows[0] * self.windows[0],
            length / self.windows[-1],
        )
        for width, parent in zip((1, *self.windows), self.windows):
            first = first_near(own, self.near) // parent * parent
            held += min(length, length - first - self.sinks // -parent * parent) / width
        return min(1.0, held / length)

    def sharing(self, heads: int, key_heads: int) -> int:
        """A layer keeps the same of all its heads."""
        return heads

    def exact(self) -> HsaHeadRule:
        return HsaHeadRule(self.windows, EVERYTHING, 0)

    @staticmethod
    def layer_config(rules: Sequence[CandidateRule], length: int | None = None) -> HsaConfig:
        names = ("near", "sinks", "refine_top_k", "block_bias")
        values = {name: tuple(getattr(rule, name) for rule in rules) for name in names}
        return HsaConfig(rules[0].group, "key", **values, tuned_length=length)  # type: ignore[arg-type]

    @staticmethod
    def base_config() -> HsaConfig:
        return HsaConfig(tying="key")

    @staticmethod
    def compare(
        call: HostCall,
        rules: Sequence[HsaHeadRule],  # type: ignore[override]
        starts: Sequence[int],
        project: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """As in `CandidateRule`; rules that differ in their block bias alone are best beside each other.

        Attention is computed with closed blocks kept and with them dropped. Every other bias weighs the one against
        the other: with P the weight that closed blocks have at bias 0, e^b P / (1 - P + e^b P) of them is left.
        """
        query = call.query.detach().float()
        levels: dict[tuple[int, ...], Any] = {}

        def run(rule: HsaHeadRule) -> tuple[Tensor, Tensor]:
            """Projected outputs and log-sum-exps, [H, R]."""
            if rule.windows not in levels:
                levels.clear()
                levels[rule.windows] = pool_levels(
                    call.key.detach(), call.value.detach(), rule.windows
                )
            parts = [attend(query, levels[rule.windows], rule, call, start) for start in starts]
            outputs, sums = (torch.cat(part, 2)[0] for part in zip(*parts, strict=True))
            return project(outputs), sums

        kept = dropped = exact = run(rules[0].exact())
        computed = None
        for rule in rules:
            unbiased = replace(rule, block_bias=0.0)
            if unbiased != computed:
                computed, kept, dropped = (
                    unbiased,
                    run(unbiased),
                    run(replace(rule, block_bias=-math.inf)),
                )
            yield at_bias(kept, dropped, rule.block_bias, exact[1])


def candidates(length: int) -> list[HsaHeadRule]:
    """The rules that are measured for texts of a length, those that differ in their bias alone beside each other."""
    unbiased = [
        HsaHeadRule(sizes, near, 4, top)
        for sizes, near, top in itertools.product(WINDOWS, NEAR, TOP_K)
        if sizes[-1] * 4 <= length and near <= max(32, length // 2)
        if not top or 32 <= top * sizes[0] <= 512 and near < 2048
    ]
    fine = [rule for rule in unbiased if not rule.refine_top_k or rule.share(length) <= MOST]
    return [replace(rule, block_bias=bias) for rule in fine for bias in BIASES]


def at_bias(kept, dropped, bias: float, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Projected outputs and KL(tied ‖ ordinary attention) for a block bias.

    Args:
        kept, dropped: projected outputs and log-sum-exps at the biases 0 and -inf. whole: those of ordinary attention.
    """
    if bias == 0:
        return kept[0], whole - kept[1]
    if bias == -math.inf:
        return dropped[0], whole - dropped[1]
    closed = -torch.expm1((dropped[1] - kept[1]).clamp_max(0))  # weight of closed blocks at bias 0
    total = 1 + math.expm1(bias) * closed  # of all, in units of the sum at bias 0
    projected = dropped[0] + math.exp(bias) / total * (kept[0] - dropped[0])
    return projected, whole - kept[1] - total.log() + bias * math.exp(bias) * closed / total


def attend(
    query: Tensor, levels, rule: HsaHeadRule, call: HostCall, start: int
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a chunk of queries, which are those of the last tokens."""
    heads = query.shape[1]
    offset = levels.keys[0].shape[2] - query.shape[2]
    bias = query.new_full((heads,), rule.block_bias)
    near, first, top_k = ([x] * heads for x in (rule.near, rule.sinks, rule.refine_top_k))
    sinks = None if call.options.sinks is None else call.options.sinks.float()
    part = query[:, :, start : start + CHUNK]
    return attend_levels(
        part, levels, near, first, top_k, bias, sinks, True, start + offset, float(call.scale)
    )


@dataclass(frozen=True)
class HsaLayerRule(CandidateRule):
    """How a whole layer of an encoder is tied; without a config it is exact."""

    causal = False
    config: HsaConfig | None

    @property
    def is_exact(self) -> bool:
        return self.config is None

    @property
    def group(self) -> HsaConfig | None:
        return self.config

    def share(self, length: int) -> float:
        """Of all length² pairs; with tying="both" those of siblings, each once for a whole family."""
        config = self.config
        if config is None:
            return 1.0
        if config.tying == "both":
            count = count_sibling_pairs(length, config.windows)
        else:
            numbers: Any = (config.near, config.sinks, config.refine_top_k)
            count = count_pairs(length, config.windows, *numbers, is_causal=False, compared=False)
        return min(1.0, count / length**2)

    @property
    def family(self) -> str:
        return f"tying {self.config.tying}" if self.config else "exact"

    def exact(self) -> HsaLayerRule:
        return HsaLayerRule(None)

    @staticmethod
    def layer_config(rules: Sequence[CandidateRule], length: int | None = None) -> HsaConfig:
        return rules[0].group  # type: ignore[return-value]

    @staticmethod
    def base_config() -> HsaConfig:
        return HsaConfig()

    def __str__(self) -> str:
        config = self.config
        if config is None:
            return ""
        if config.tying == "both":
            return f"both {config.windows}"
        return f"key {config.windows} near {config.near} top {config.refine_top_k}"


def layer_candidates(length: int) -> list[HsaLayerRule]:
    """The rules of an encoder's layer for passages of `length` tokens."""
    rules = []
    for windows in (w for w in LAYER_WINDOWS if 2 * w[-1] <= length):
        rules.append(HsaLayerRule(HsaConfig(windows, "both", tuned_length=length)))
        for near, top in itertools.product([n for n in LAYER_NEAR if 2 * n <= length], LAYER_TOP_K):
            config = HsaConfig(
                windows, "key", near=near, sinks=1, refine_top_k=top, tuned_length=length
            )
            rules.append(HsaLayerRule(config))
    return rules
