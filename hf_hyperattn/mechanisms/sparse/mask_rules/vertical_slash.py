"""Columns and diagonals that were heavy for queries before (kin of MInference's vertical-slash, arXiv 2407.02490)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....fields import option
from ..rules import RuleCall, SparseRule, share_of, sparse_rule
from ..selection import SMALL, best, chunks_of


@sparse_rule("vertical_slash")
@dataclass(frozen=True)
class VerticalSlash(SparseRule):
    """The nearest tokens, the first ones, and the heaviest columns and diagonals, measured again and again.

    MInference measures at the last queries of a prompt what its first ones then see; here nobody sees what comes after
    it. A block is `every` tokens. The last `measured` queries of a block attend to all before them; the tokens with
    the largest sums of weights are the columns, and the distances with the largest the diagonals, that the queries of
    the next block see. Queries of the first block see everything.
    """

    near: int = option(64, "so many tokens up to the query itself are seen", least=1)
    sinks: int = option(4, "so many first tokens of the text are seen", least=0)
    columns: int = option(64, "so many tokens are seen by all queries of a block", least=0)
    diagonals: int = option(64, "so many distances are seen by all queries of a block", least=0)
    every: int = option(512, "tokens of a block", least=1)
    measured: int = option(
        64, "so many last queries of a block are measured; at most every", least=1
    )

    def __post_init__(self):
        super().__post_init__()
        if self.measured > self.every:
            self._refuse("measured", f"at most every={self.every}")

    @property
    def earlier(self) -> int:
        """Up to the first measured one of the block before."""
        return self.every + self.measured - 1

    def share(self, length: int) -> float:
        """Tokens seen, and the measured queries' logits beside their own."""
        places = torch.arange(length)
        start = places // self.every * self.every
        seen = torch.where(
            start > 0, self.near + self.sinks + self.columns + self.diagonals, places + 1
        )
        most = length * (length + 1) / 2
        measured = [
            self.measured * (s - self.measured / 2) for s in range(self.every, length, self.every)
        ]
        return min(1.0, share_of(seen) + sum(measured) / most)

    def visible(self, call: RuleCall) -> Tensor:
        """[B, H, N, M]."""
        if call.window is not None:
            raise ValueError(
                f"vertical_slash was called with sliding_window={call.window}, whose cache drops the columns that it "
                "measures; allowed: layers without a sliding window, or other rules there"
            )
        if (
            self.every > SMALL and self.every >= call.key.shape[2]
        ):  # the first block sees all before it
            return torch.ones((), dtype=torch.bool, device=call.key.device)
        tokens, steps = call.tokens, torch.arange(self.measured, device=call.key.device)
        chunks = chunks_of(call, self.every, "tail", self.measured)
        chunks.check(call, chunks.start > 0)
        place = chunks.start[..., None] - self.measured + steps[:, None]  # [B, 1, R, measured, 1]
        logits = call.scale * (chunks.query @ call.key[:, :, None].mT)
        weights = logits.masked_fill(tokens > place, -torch.inf).softmax(-1).nan_to_num(0.0)
        column = best(
            weights.sum(3), (tokens < chunks.start) & (tokens >= self.sinks), self.columns
        )
        back = (place - tokens).expand_as(weights)
        by_distance = (
            weights.gather(4, back.clamp(0, len(tokens) - 1)).masked_fill(back < 0, 0.0).sum(3)
        )
        diagonal = best(by_distance, (tokens >= self.near).expand_as(by_distance), self.diagonals)
        away = (call.places - tokens).clamp_min(0)
        seen = chunks.spread(column) | chunks.spread(diagonal).gather(
            3, away.expand(-1, column.shape[1], -1, -1)
        )
        seen = seen | (tokens > call.places - self.near) | (tokens < self.sinks)
        return seen | (call.places < self.every)
