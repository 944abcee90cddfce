"""`VerticalSlash`: a rule that shows the heaviest columns and diagonals.

It is related to MInference's vertical-slash pattern (arXiv 2407.02490).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....config.fields import option
from ...selection.best import select_best
from ..rules import RuleCall, SparseRule, share_of, sparse_rule
from ..selection import SMALL, split_chunks


@sparse_rule("vertical_slash")
@dataclass(frozen=True)
class VerticalSlash(SparseRule):
    """Show near and first tokens, and the heaviest columns and diagonals.

    A block is `every` tokens. The last `measured` queries of a block attend to all tokens before
    them. The tokens with the largest sums of weights are the columns that the queries of the next
    block see. The distances with the largest sums are the diagonals. Queries of the first block see
    everything.

    MInference measures at the last queries of a prompt and applies the result to earlier ones. Here
    no query depends on later tokens.
    """

    near: int = option(64, "number of tokens up to the query itself that are seen", least=1)
    sinks: int = option(4, "number of first tokens of the text that are seen", least=0)
    columns: int = option(64, "number of tokens that all queries of a block see", least=0)
    diagonals: int = option(64, "number of distances that all queries of a block see", least=0)
    every: int = option(512, "tokens of a block", least=1)
    measured: int = option(
        64, "number of last queries of a block that are measured; at most every", least=1
    )

    def __post_init__(self):
        super().__post_init__()
        if self.measured > self.every:
            self._refuse("measured", f"at most every={self.every}")

    @property
    def earlier(self) -> int:
        """Queries back to the first measured one of the block before."""
        return self.every + self.measured - 1

    def share(self, length: int) -> float:
        """Return the share of causal logits that a head computes.

        Counted are the tokens seen, and the logits that measured queries compute in addition.
        """
        places = torch.arange(length)
        start = places // self.every * self.every
        seen = torch.where(
            start > 0, self.near + self.sinks + self.columns + self.diagonals, places + 1
        )
        most = length * (length + 1) / 2
        # The measured queries before block start s attend to about s - measured/2 tokens each.
        measured = [
            self.measured * (s - self.measured / 2) for s in range(self.every, length, self.every)
        ]
        return min(1.0, share_of(seen) + sum(measured) / most)

    def visible(self, call: RuleCall) -> Tensor:
        """Return bool [B, H, N, M], see `SparseRule.visible`."""
        if call.window is not None:
            raise ValueError(
                f"vertical_slash was called with sliding_window={call.window}, whose cache drops the columns that it "
                "measures; allowed: layers without a sliding window, or other rules there"
            )
        # In the first block all tokens are seen. The size is checked first, see `SMALL`.
        if self.every > SMALL and self.every >= call.key.shape[2]:
            return torch.ones((), dtype=torch.bool, device=call.key.device)
        tokens = call.tokens
        steps = torch.arange(self.measured, device=call.key.device)
        chunks = split_chunks(call, self.every, "tail", self.measured)
        chunks.check_known(call, chunks.start > 0)
        # Weights of the measured queries, [B, H, R, measured, M].
        place = chunks.start[..., None] - self.measured + steps[:, None]  # [B, 1, R, measured, 1]
        logits = call.scale * (chunks.query @ call.key[:, :, None].mT)
        # Chunk 0 has no block before it: its rows are -inf only, and softmax gives NaN.
        weights = logits.masked_fill(tokens > place, -torch.inf).softmax(-1).nan_to_num(0.0)
        # Columns: sums over the measured queries, token by token.
        is_early = (tokens < chunks.start) & (tokens >= self.sinks)
        column = select_best(weights.sum(3), is_early, self.columns)
        # Diagonals: the same sums after a shift of each row from tokens to distances.
        back = (place - tokens).expand_as(weights)
        shifted = weights.gather(4, back.clamp(0, len(tokens) - 1)).masked_fill(back < 0, 0.0)
        by_distance = shifted.sum(3)
        is_far = (tokens >= self.near).expand_as(by_distance)
        diagonal = chunks.spread_to_queries(select_best(by_distance, is_far, self.diagonals))
        # And back: whether the distance of each token from the query is a chosen one.
        away = (call.places - tokens).clamp_min(0)
        on_diagonal = diagonal.gather(3, away.expand(-1, column.shape[1], -1, -1))
        seen = chunks.spread_to_queries(column) | on_diagonal
        seen = seen | (tokens > call.places - self.near) | (tokens < self.sinks)
        return seen | (call.places < self.every)
