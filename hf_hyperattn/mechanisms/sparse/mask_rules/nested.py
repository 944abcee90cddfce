"""`NestedWindows`: a rule that opens the best windows of several sizes.

With query="own" and summary="mean" it is HSA with tied keys, without the closed blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....config.fields import option
from ....hierarchy.windows import checked_sizes
from ...hsa.open_blocks import is_open
from ...selection.best import select_best
from ..pages import Summary, score_summaries
from ..rules import RuleCall, share_of, sparse_rule
from ..selection import (
    CHUNK_HELP,
    QUERY_HELP,
    SELECTORS,
    SMALL,
    SelectingRule,
    Selector,
    split_chunks,
)


@sparse_rule("nested_windows")
@dataclass(frozen=True)
class NestedWindows(SelectingRule):
    """Show the nearest tokens, the first ones, and the best `top` windows per level.

    Let c be the first token of the query's chunk, and o the largest multiple of the smallest window
    that is at most c. A window is open in one of three cases: it is not wholly before o, it holds
    one of the first `sinks` tokens, or it ends less than `near` before o. The windows inside an
    open window then stand by themselves.

    Levels are taken from the largest windows down. Among the windows that stand and are not open,
    the `top` with the largest scores are opened, too. A query sees the tokens of open smallest
    windows. With query="own" and summary="mean" this is HSA with tying="key" and block_bias=-inf.
    """

    windows: tuple[int, ...] = option(
        (4, 16, 64), "tokens of the windows, smallest first, each dividing the next"
    )
    near: int = option(48, "windows at a distance of less than this before are open", least=0)
    sinks: int = option(4, "windows that hold one of this many first tokens are open", least=0)
    top: int = option(16, "number of further windows that are opened on each level", least=0)
    summary: Summary = option(
        "mean", "summary of a window by which it is scored, as for pages", choices=get_args(Summary)
    )
    query: Selector = option("own", QUERY_HELP, choices=SELECTORS)
    chunk: int = option(16, CHUNK_HELP, least=1)

    def __post_init__(self):
        # The dataclass is frozen, so plain assignments raise.
        if isinstance(self.windows, list):
            object.__setattr__(self, "windows", tuple(self.windows))
        super().__post_init__()
        object.__setattr__(self, "windows", checked_sizes(self.windows))
        if not self.windows:
            self._refuse("windows", "at least one size")

    def share(self, length: int) -> float:
        """Return the share of causal logits that a head computes.

        Counted are the tokens seen, and the windows scored divided by the chunk that shares them.

        Windows of a level are scored only if more than `top` of them stand.
        """
        windows = self.select_windows(length)
        if not windows:
            return 1.0
        places = torch.arange(length)
        bottom = self.windows[0]
        # One row for each smallest window, since all queries of it open the same windows.
        own = torch.arange(0, length, bottom)[:, None]
        laid = torch.zeros(len(own), dtype=torch.float64)
        scored = torch.zeros(len(own), dtype=torch.float64)
        above = torch.ones(len(own), -(-length // windows[-1]), dtype=torch.bool)
        for size, below in zip(reversed(windows), (*reversed(windows[:-1]), 1)):
            start = torch.arange(0, length, size)
            is_open = above[:, : len(start)] & self.is_open(start, size, own)
            # Windows that stand: closed ones in open windows, and those laid open by score, whose
            # place is not known.
            stand = (above[:, : len(start)] & ~is_open).sum(1) + laid
            scored += stand.where(stand > self.top, 0)
            laid = stand.clamp_max(self.top) * (size // below)
            above = is_open.repeat_interleave(size // below, 1)
        seen = (above[:, :length] & (places < own)).sum(1) + laid
        row = places // self.chunk * self.chunk // bottom
        return share_of(seen[row] + scored[row] / self.chunk + places - own[row, 0] + 1)

    def select_windows(self, length: int) -> tuple[int, ...]:
        """Return the windows that a text may have several of.

        A larger window holds every query, and so is always open.
        """
        return tuple(size for size in self.windows if size <= SMALL or size < length)

    def is_open(self, start: Tensor, size: int, own: Tensor) -> Tensor:
        """Return whether windows are open by their place.

        Args:
            start: First token of each window.
            size: Tokens of a window.
            own: Where the smallest window begins in which each chunk begins.
        """
        before = own - (start + size - 1)
        # `before` on both sides: windows that begin after the chunk count as open, so they are
        # never scored.
        return is_open(start, before, before, self.near, self.sinks)

    def visible(self, call: RuleCall) -> Tensor:
        """Return bool [B, H, N, M], see `SparseRule.visible`."""
        chunks = split_chunks(call, self.chunk, self.query)
        bottom, length = self.windows[0], call.key.shape[2]
        own = chunks.start.clamp_min(0) // bottom * bottom
        windows = self.select_windows(length)
        if not windows:
            return torch.ones((), dtype=torch.bool, device=call.key.device)
        # Fill up the text to whole windows of the largest size.
        count = -(-length // windows[-1]) * windows[-1]
        key = pad(call.key, (0, 0, 0, count - length))
        opened = torch.ones(1, dtype=torch.bool, device=key.device)
        opened = opened.expand(1, 1, 1, count // windows[-1])
        for size, below in zip(reversed(windows), (*reversed(windows[:-1]), 1)):
            # Here `opened` says which windows of this size lie in an open window of the level
            # above.
            start = torch.arange(0, count, size, device=key.device)
            by_place = self.is_open(start, size, own)
            candidates = opened & ~by_place
            if call.window is not None:
                # A cache with a window may have dropped it, or drop it before the chunk ends.
                candidates = candidates & (start >= chunks.start + self.chunk - call.window)
            chunks.check_known(call, candidates.any(1, keepdim=True))
            score = score_summaries(self.summary, chunks.query, key.unflatten(2, (-1, size)))
            by_score = select_best(score, candidates, self.top)
            opened = ((opened & by_place) | by_score).repeat_interleave(size // below, -1)
        return chunks.spread_to_queries(opened)[..., :length]
