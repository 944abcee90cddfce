"""Hierarchical self-attention (HSA) as candidates for injection.

Causal heads get key-tied attention over windows, encoder layers any tied attention. A tied logit is
the mean of the logits that it replaces, plus the block bias. KL(tied ‖ ordinary attention) is
therefore the difference of the log-sum-exps, plus the bias times the weight of closed blocks (math
in docs/hsa.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..engines import Options
from ..mechanisms.base import HostCall
from ..mechanisms.hsa.config import HsaConfig, Rule
from ..mechanisms.hsa.layer import EVERYTHING
from ..mechanisms.hsa.open_blocks import first_near
from ..mechanisms.hsa.pairs import count_pairs, count_sibling_pairs
from ..mechanisms.hsa.windowed.key import attend_levels
from ..mechanisms.hsa.windowed.native import pool_levels
from ..mechanisms.selection.growing import TAKEN_BACK
from .rules import CHUNK, CandidateRule

#: Window sizes of a head, bottom level first. The bottom windows are small, so that refinement
#: opens few irrelevant tokens. The top windows are few, so that finding them costs few logits.
WINDOWS = ((4, 16, 64), (4, 16), (16, 64, 256))
#: Distances within which a head reads single tokens.
NEAR = (16, 48, 96, 192, 384, 768, 1536, 3072)
#: First tokens of the text that a head reads one by one.
SINKS = 4
#: Numbers of blocks per level that a head opens by its query.
TOP_K = (0, 4, 8, 16, 32, 64, 96)
#: Numbers added to the logit of a closed block. The mean logit understates the weight of a block,
#: because exp of a mean is at most the mean of exp. Hence most biases are above 0.
BIASES = (-math.inf, -1.0, 0.0, 0.5, 1.0, 2.0)
#: Rules with refinement that compute a larger share of the pairs are left out: beyond it, more near
#: tokens are the better use of the same pairs.
MOST = 0.42
#: Window sizes of an encoder layer.
LAYER_WINDOWS = ((4,), (8,), (16,), (8, 64))
#: Distances within which an encoder layer reads single tokens.
LAYER_NEAR = (8, 32, 64)
#: Numbers of blocks per level that an encoder layer opens by its queries.
LAYER_TOP_K = (0, 4)

#: Projected outputs and log-sum-exps of all sampled queries, [H, R] each.
Attended = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class HsaHeadRule(CandidateRule):
    """Key-tied attention of one causal head.

    Args:
        windows: Window sizes, bottom level first.
        near: Blocks nearer than this are opened. `EVERYTHING` is exact attention.
        sinks: Blocks of this many first tokens are opened.
        refine_top_k: Number of blocks per level that each query opens.
        block_bias: Added to the logit of closed blocks. -inf drops them.
    """

    windows: tuple[int, ...]
    near: int
    sinks: int = 4
    refine_top_k: int = 0
    block_bias: float = 0.0

    @property
    def is_exact(self) -> bool:
        return self.near >= EVERYTHING

    @property
    def drops_blocks(self) -> bool:
        """Return whether closed blocks are ignored."""
        return self.block_bias == -math.inf

    @property
    def group(self) -> tuple[int, ...]:
        return self.windows

    @property
    def family(self) -> str:
        # Without refinement and closed blocks, only sinks and a window of near tokens are left.
        return "sinks and window" if self.drops_blocks and not self.refine_top_k else "hsa"

    def share(self, length: int) -> float:
        count = count_pairs(
            length,
            self.windows,
            self.near,
            self.sinks,
            self.refine_top_k,
            dropped=self.drops_blocks,
        )
        return count / (length * (length + 1) / 2)

    def kept(self, length: int) -> float:
        """Return the share of the keys that an evicting cache keeps.

        It keeps the means of all top windows. On each lower level it keeps the tokens or means
        that lie in an open window. With refinement it keeps everything.
        """
        # Refinement may open any block later, so nothing can be evicted.
        if self.refine_top_k or self.is_exact:
            return 1.0
        # Start of the bottom window of the earliest query that a rollback may return to.
        window_start = max(0, length - TAKEN_BACK) // self.windows[0] * self.windows[0]
        total = length / self.windows[-1]
        for width, parent in zip((1, *self.windows), self.windows):
            # Open windows are kept as a whole, so both ends are rounded to the parent's size.
            first = first_near(window_start, self.near) // parent * parent
            sink_tokens = math.ceil(self.sinks / parent) * parent
            total += min(length, length - first + sink_tokens) / width
        return min(1.0, total / length)

    def sharing(self, heads: int, key_heads: int) -> int:
        """Return all heads: the cache of a layer keeps the same keys for all of them."""
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
        """Compare every rule with ordinary attention, as `CandidateRule.compare` describes.

        Attention is computed twice per rule: with closed blocks at bias 0, and without them. Every
        other bias follows from these two, see `apply_block_bias`. Rules that differ only in their
        block bias should therefore be adjacent.
        """
        query = call.query.detach().float()
        # Keep the means of one list of window sizes at a time, to save memory.
        pooled: dict[tuple[int, ...], Any] = {}

        def attend_all(rule: HsaHeadRule) -> Attended:
            if rule.windows not in pooled:
                pooled.clear()
                pooled[rule.windows] = pool_levels(
                    call.key.detach(), call.value.detach(), rule.windows
                )
            levels = pooled[rule.windows]
            chunks = [attend_chunk(query, levels, rule, call, start) for start in starts]
            outputs, log_sums = (torch.cat(part, 2)[0] for part in zip(*chunks, strict=True))
            return project(outputs), log_sums

        exact = attend_all(rules[0].exact())
        kept = dropped = exact
        computed = None
        for rule in rules:
            unbiased = replace(rule, block_bias=0.0)
            if unbiased != computed:
                computed = unbiased
                kept = attend_all(unbiased)
                dropped = attend_all(replace(rule, block_bias=-math.inf))
            yield apply_block_bias(kept, dropped, rule.block_bias, exact[1])


def candidates(length: int) -> list[HsaHeadRule]:
    """Return the rules that are tried for causal texts of `length` tokens.

    Rules that differ only in their block bias are adjacent, as `HsaHeadRule.compare` prefers.
    """
    unbiased = []
    for sizes, near, top in itertools.product(WINDOWS, NEAR, TOP_K):
        # Top windows must be short compared with the text, and near tokens at most half of it.
        if sizes[-1] * 4 > length or near > max(32, length // 2):
            continue
        # Refinement is tried only if it opens 32 to 512 tokens, and next to a window that is short.
        if top and not (32 <= top * sizes[0] <= 512 and near < 2048):
            continue
        unbiased.append(HsaHeadRule(windows=sizes, near=near, sinks=SINKS, refine_top_k=top))
    useful = [rule for rule in unbiased if not rule.refine_top_k or rule.share(length) <= MOST]
    return [replace(rule, block_bias=bias) for rule in useful for bias in BIASES]


def apply_block_bias(
    kept: Attended, dropped: Attended, bias: float, ordinary: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the projected outputs and KL(tied ‖ ordinary attention) for a block bias b.

    Let P be the weight of closed blocks at bias 0. With bias b they have e^b P / (1 - P + e^b P).

    Args:
        kept: Result at bias 0.
        dropped: Result at bias -inf.
        bias: The block bias b.
        ordinary: Log-sum-exps of ordinary attention, [H, R].
    """
    if bias == 0:
        return kept[0], ordinary - kept[1]
    if bias == -math.inf:
        return dropped[0], ordinary - dropped[1]
    # 1 - exp(dropped - kept) is P. Rounding may make the difference slightly positive.
    closed = -torch.expm1((dropped[1] - kept[1]).clamp_max(0))
    # 1 - P + e^b P: the sum of exponentials, in units of the sum at bias 0.
    total = 1 + math.expm1(bias) * closed
    # `kept - dropped` is P · (output of closed blocks - output of the rest).
    projected = dropped[0] + math.exp(bias) / total * (kept[0] - dropped[0])
    closed_weight = math.exp(bias) * closed / total
    return projected, ordinary - kept[1] - total.log() + bias * closed_weight


def attend_chunk(
    query: Tensor, levels, rule: HsaHeadRule, call: HostCall, start: int
) -> tuple[Tensor, Tensor]:
    """Compute the output and the log-sum-exp of one chunk of queries.

    Args:
        query: Queries [B, H, N, d] of the last N tokens.
        levels: Keys and values of all tokens, and their means per window.
        rule: The rule, for all heads.
        call: The call that the queries come from, for its scale and attention sinks.
        start: First query of the chunk.
    """
    offset = levels.keys[0].shape[2] - query.shape[2]
    output, log_sum = attend_levels(
        query[:, :, start : start + CHUNK],
        levels,
        Rule(
            tying="key",
            near=rule.near,
            sinks=rule.sinks,
            refine_top_k=rule.refine_top_k,
            block_bias=rule.block_bias,
        ),
        Options(is_causal=True, offset=start + offset, sinks=call.options.sinks),
        float(call.scale),
    )
    assert log_sum is not None  # it is, unless `lse` is False
    return output, log_sum


@dataclass(frozen=True)
class HsaLayerRule(CandidateRule):
    """Tied attention of a whole encoder layer.

    Args:
        config: Config of the layer. None: exact attention.
    """

    causal = False
    config: HsaConfig | None

    @property
    def is_exact(self) -> bool:
        return self.config is None

    @property
    def group(self) -> HsaConfig | None:
        return self.config

    def share(self, length: int) -> float:
        """Return the computed pairs as a share of all length² pairs.

        With tying="both", each pair of sibling blocks counts once.
        """
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
    """Return the rules that are tried for an encoder layer and passages of `length` tokens."""
    rules = []
    # Larger windows or near parts than half of the passage would save nothing.
    for windows in (w for w in LAYER_WINDOWS if 2 * w[-1] <= length):
        rules.append(HsaLayerRule(HsaConfig(windows, "both", tuned_length=length)))
        near_sizes = [near for near in LAYER_NEAR if 2 * near <= length]
        for near, top in itertools.product(near_sizes, LAYER_TOP_K):
            # One sink, because the first token of a passage is often [CLS].
            config = HsaConfig(
                windows, "key", near=near, sinks=1, refine_top_k=top, tuned_length=length
            )
            rules.append(HsaLayerRule(config))
    return rules
