"""Windows of windows of keys, of which a query opens the best, level by level: HSA's tied keys without their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from ....fields import option
from ....hierarchy.windows import checked_sizes
from ...hsa.open_blocks import is_open
from ..pages import Summary, scores_of
from ..rules import RuleCall, share_of, sparse_rule
from ..selection import (
    CHUNK_HELP,
    QUERY_HELP,
    SELECTORS,
    SMALL,
    SelectingRule,
    Selector,
    best,
    chunks_of,
)


@sparse_rule("nested_windows")
@dataclass(frozen=True)
class NestedWindows(SelectingRule):
    """The nearest tokens, the first ones, and what `top` windows of every level, opened from the top down, hold.

    With c the first token of the query's chunk, o is the largest multiple of the smallest window that is at most c. A
    window is open if it is not wholly before o, holds one of the first `sinks` tokens, or ends less than `near` before
    o, and the windows inside it then stand by themselves. Level by level from the largest, of the windows that stand
    and are not open, the `top` with the largest scores are opened too. A query sees the tokens of open smallest
    windows. With query="own" and summary="mean" that is HSA with tying="key" and block_bias=-inf.
    """

    windows: tuple[int, ...] = option(
        (4, 16, 64), "tokens of the windows, smallest first, each dividing the next"
    )
    near: int = option(48, "windows less than so many tokens before are open", least=0)
    sinks: int = option(4, "windows of the first so many tokens are open", least=0)
    top: int = option(16, "so many more windows of every level are opened", least=0)
    summary: Summary = option(
        "mean", "what a window is scored by, as pages are", choices=get_args(Summary)
    )
    query: Selector = option("own", QUERY_HELP, choices=SELECTORS)
    chunk: int = option(16, CHUNK_HELP, least=1)

    def __post_init__(self):
        if isinstance(self.windows, list):
            object.__setattr__(self, "windows", tuple(self.windows))
        super().__post_init__()
        object.__setattr__(self, "windows", checked_sizes(self.windows))
        if not self.windows:
            self._refuse("windows", "at least one size")

    def share(self, length: int) -> float:
        """Tokens seen, and windows scored, where more stand than are opened, over the queries that share them."""
        windows = self.within(length)
        if not windows:
            return 1.0
        places, bottom = torch.arange(length), self.windows[0]
        own = torch.arange(0, length, bottom)[:, None]
        laid = torch.zeros(len(own), dtype=torch.float64)
        scored = torch.zeros(len(own), dtype=torch.float64)
        above = torch.ones(len(own), -(-length // windows[-1]), dtype=torch.bool)
        for size, below in zip(reversed(windows), (*reversed(windows[:-1]), 1)):
            start = torch.arange(0, length, size)
            is_open = above[:, : len(start)] & self.is_open(start, size, own)
            stand = (above[:, : len(start)] & ~is_open).sum(1) + laid
            scored += stand.where(stand > self.top, 0)
            laid = stand.clamp_max(self.top) * (size // below)
            above = is_open.repeat_interleave(size // below, 1)
        seen = (above[:, :length] & (places < own)).sum(1) + laid
        row = places // self.chunk * self.chunk // bottom
        return share_of(seen[row] + scored[row] / self.chunk + places - own[row, 0] + 1)

    def within(self, length: int) -> tuple[int, ...]:
        """The windows that a text may have several of; a larger one holds every query, and so is open."""
        return tuple(size for size in self.windows if size <= SMALL or size < length)

    def is_open(self, start: Tensor, size: int, own: Tensor) -> Tensor:
        """Whether windows are open by where they stand, of chunks whose smallest windows begin at `own`."""
        before = own - (start + size - 1)
        return is_open(
            start, before, before, self.near, self.sinks
        )  # what begins later is not chosen, either

    def visible(self, call: RuleCall) -> Tensor:
        """[B, H, N, M]."""
        chunks, bottom = chunks_of(call, self.chunk, self.query), self.windows[0]
        own, length = chunks.start.clamp_min(0) // bottom * bottom, call.key.shape[2]
        windows = self.within(length)
        if not windows:
            return torch.ones((), dtype=torch.bool, device=call.key.device)
        count = -(-length // windows[-1]) * windows[-1]
        key = torch.nn.functional.pad(call.key, (0, 0, 0, count - length))
        is_open = torch.ones(1, dtype=torch.bool, device=key.device).expand(
            1, 1, 1, count // windows[-1]
        )
        for size, below in zip(reversed(windows), (*reversed(windows[:-1]), 1)):
            start = torch.arange(0, count, size, device=key.device)
            candidates = is_open & ~self.is_open(start, size, own)
            if call.window is not None:
                candidates = candidates & (start >= chunks.start + self.chunk - call.window)
            chunks.check(call, candidates.any(1, keepdim=True))
            score = scores_of(self.summary, chunks.query, key.unflatten(2, (-1, size)))
            opened = best(score, candidates, self.top)
            is_open = ((is_open & self.is_open(start, size, own)) | opened).repeat_interleave(
                size // below, -1
            )
        return chunks.spread(is_open)[..., :length]
