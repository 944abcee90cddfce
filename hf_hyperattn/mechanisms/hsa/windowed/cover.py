"""What of a row of windows is open before refinement, as arithmetic on positions (docs/hsa.md; arXiv 2509.15448).

Positions count from a row's first real token; level 0 are the tokens. A query's cover consists of
  - on the top level all blocks, below it the blocks whose parent is open because of `near`, the query's own place
    (both a range that moves with the query's bottom window) or `sinks` (a range at the front, the same for all);
  - what refinement opens, query by query.
Causal trees are read as continued to the right: what a query sees does not depend on how many tokens follow, so that a
prefix, a chunk, and a single step agree with the full pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

#: Queries of a flat tree that are computed together.
FLAT_ROWS = 64


@dataclass(frozen=True)
class Cover:
    """What is open before refinement, and how much refinement opens; the same for a group of heads.

    Args:
        sizes: window sizes, bottom first, each dividing the next; empty for a flat tree.
        near, sinks, top_k: as in the definition; for `opened` and `seen` near and sinks may be tensors, of heads.
        is_causal: only blocks to the left, and tokens up to the query.
        tokens: real tokens of the row.
    """

    sizes: tuple[int, ...]
    near: Any
    sinks: Any
    top_k: int
    is_causal: bool
    tokens: int

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Tokens of a block of each level, level 0 being tokens."""
        return (1, *self.sizes)

    @property
    def top(self) -> int:
        """The top level."""
        return len(self.sizes)

    def branching(self, level: int) -> int:
        """Children of a block of `level`."""
        return self.widths[level] // self.widths[level - 1]

    def blocks(self, level: int) -> int:
        """Blocks of `level`; causal queries see no incomplete one, the others see the last, perhaps incomplete."""
        incomplete = 0 if self.is_causal else self.widths[level] - 1
        return (self.tokens + incomplete) // self.widths[level]

    def bottom(self) -> int:
        """Size of a query's own group; in a flat tree, where there is none, of the queries that go together."""
        return self.sizes[0] if self.sizes else FLAT_ROWS

    def reach(self, window: Tensor) -> tuple[Tensor, Tensor]:
        """First and last position that `near` reaches from bottom window number `window`."""
        spare = torch.as_tensor(self.near).clamp_min(1) - 1
        start = window * self.bottom()
        high = start + self.bottom() - 1
        return start - spare, high if self.is_causal else high + spare

    def opened(self, level: int, index: Tensor, window: Tensor) -> Tensor:
        """Bool: whether the blocks `index` of a level above 0 are open to queries of bottom window `window`."""
        (low, high), width = self.reach(window), self.widths[level]
        first = index * width
        return (first < self.sinks) | ((first + width > low) & (first <= high))

    def seen(self, level: int, index: Tensor, place: Tensor) -> Tensor:
        """Bool: whether causal queries at `place` see the blocks or tokens `index`, where nothing is refined."""
        window = place // self.bottom()
        if level == 0:
            seen = (index <= place) & (index >= 0)
        else:
            complete = (index + 1) * self.widths[level] <= window * self.bottom()
            seen = complete & ~self.opened(level, index, window)
        if level == self.top:
            return seen
        return seen & self.opened(level + 1, index // self.branching(level + 1), window)

    def front(self, level: int) -> int:
        """Blocks 0..front-1 of `level` stand in the cover wherever the query is: the top level, and the sinks' kin."""
        if level == self.top:
            return self.blocks(level)
        parents = -(-min(self.sinks, self.tokens) // self.widths[level + 1])
        return min(parents * self.branching(level + 1), self.blocks(level))

    def moving(self, level: int, windows: Tensor) -> tuple[Tensor, Tensor]:
        """The blocks [first, last) of `level`, [T] each, whose parents are open round each window of `windows`."""
        if level == self.top:
            return torch.zeros_like(windows), torch.zeros_like(windows)
        (low, high), parent, children = self.reach(windows), self.widths[level + 1], self.branching(level + 1)
        first = low.clamp_min(0).div(parent, rounding_mode="floor")
        last = high.clamp_max(self.tokens - 1).div(parent, rounding_mode="floor")
        return first * children, (last + 1) * children

    def hidden(self, level: int, index: Tensor, windows: Tensor) -> Tensor:
        """Bool [T, C]: which blocks `index` [C] or [T, C] of a level above 0 are not closed blocks of the cover."""
        first, windows = index * self.widths[level], windows[:, None]
        hidden = self.opened(level, index, windows) | (first >= self.tokens) | (first < 0)
        later = first + self.widths[level] > windows * self.bottom()
        return hidden | later if self.is_causal else hidden

    def sizes_of(self, level: int, index: Tensor) -> Tensor:
        """Real tokens of each block, at least 1."""
        width = self.widths[level]
        return (self.tokens - index * width).clamp(1, width)

    def has_chains(self) -> bool:
        """Whether collapsing moves blocks of the right edge up a level: a last block with one child, not the root."""
        return any(
            self.blocks(level) > 1 and (self.blocks(level) - 1) * self.branching(level) == self.blocks(level - 1) - 1
            for level in range(1, self.top + 1)
        )
