"""A few bottom windows of queries against their cover, in plain torch: the closed blocks, refinement, the tokens.

The front and the top level are one product for all queries; the ranges that move with the query are gathered once a
window; only refinement gathers for every query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cover import Cover


@dataclass
class Piece:
    """Some of what a tile attends to: `logits` [Z, T, Q, C] of the blocks `index` of `level`, hidden ones at -inf.

    index: an int C for the first C blocks, or [T, C], or [Z, T, Q, C].
    """

    level: int
    index: int | Tensor
    logits: Tensor

    def combine(self, weights: Tensor, table: Tensor) -> Tensor:
        """[Z, T, Q, e]: the sum of rows of `table` [Z, n, e] with `weights` [Z, T, Q, C]."""
        if isinstance(self.index, int):
            found = weighted_sum(weights.flatten(1, 2), table[:, : self.index])
            return found.unflatten(1, weights.shape[1:3])
        rows = gather(table, self.index)
        if self.index.dim() == 2:
            return weighted_sum(weights, rows)
        return weighted_sum(weights.unsqueeze(-2), rows).squeeze(-2)

    def spread(self, weights: Tensor, rows: Tensor, into: Tensor) -> None:
        """Add to `into` [Z, n, e] the transpose of `combine`: weights [Z, T, Q, C] times rows [Z, T, Q, e]."""
        if isinstance(self.index, int):
            into[:, : self.index] += weights.flatten(1, 2).mT @ rows.flatten(1, 2)
            return
        if self.index.dim() == 2:
            index, found = self.index.expand(len(into), -1, -1), weights.mT @ rows
        else:
            index, found = self.index, weights.unsqueeze(-1) * rows.unsqueeze(-2)
        offsets = torch.arange(len(into), device=into.device) * into.shape[1]
        index = (index.flatten(1) + offsets[:, None]).flatten()
        into.view(-1, into.shape[2]).index_add_(0, index, found.reshape(-1, into.shape[2]))


def gather(table: Tensor, index: Tensor) -> Tensor:
    """Rows of `table` [Z, n, e]: [Z, T, C, e] for an index [T, C], [Z, T, Q, C, e] for [Z, T, Q, C]."""
    if index.dim() == 2:
        return table[:, index]
    heads = torch.arange(len(table), device=table.device).view(-1, 1, 1, 1)
    return table[heads, index]


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """weights [..., Q, C] times rows [..., C, e], where a weight of 0 takes nothing of NaN and infinity either.

    Any other weight of such a number gives NaN. With gradients.
    """
    out = weights @ rows
    if bool(out.detach().sum().isfinite()):
        return out
    bad = ~rows.isfinite()
    reached = (weights != 0).to(out.dtype) @ bad.to(out.dtype) > 0
    return weights @ rows.masked_fill(bad, 0.0) + torch.where(reached, torch.nan, 0.0).to(out.dtype)


def product(query: Tensor, table: Tensor, index: int | Tensor) -> Tensor:
    """Logits [Z, T, Q, C] of query [Z, T, Q, d] with rows of `table` [Z, n, d]."""
    if isinstance(index, int):
        return (query.flatten(1, 2) @ table[:, :index].mT).unflatten(1, query.shape[1:3])
    rows = gather(table, index)
    return query @ rows.mT if index.dim() == 2 else (rows @ query.unsqueeze(-1)).squeeze(-1)


@dataclass
class Tile:
    """Queries of a few bottom windows against their cover.

    Args:
        cover: what is open.
        query: [Z, T, Q, d], scaled; Z key heads, T windows, Q queries of a window, of all heads that share keys.
        positions: [T, Q]. windows: [T], the bottom windows.
        keys: tables [Z, n_l, d], bottom first.
        block_bias: [Z, 1, Q, 1].
    """

    cover: Cover
    query: Tensor
    positions: Tensor
    windows: Tensor
    keys: Sequence[Tensor]
    block_bias: Tensor

    def pieces(self) -> list[Piece]:
        """The whole cover, from the top level down."""
        found, opened = [], None
        for level in range(self.cover.top, 0, -1):
            here = [*self.standing(level), *([] if opened is None else [self.candidates(level, *opened)])]
            if self.cover.top_k and here:
                opened = self.refine(level, here)
            for piece in here:
                several = self.sizes(piece) > 1  # a block of one token is that token
                piece.logits += torch.log(self.sizes(piece))
                piece.logits += torch.where(several, self.block_bias, 0.0)
            found += here
        found += self.standing(0)
        return found if opened is None else [*found, self.candidates(0, *opened)]

    def standing(self, level: int) -> list[Piece]:
        """What the rules without score leave of `level`: closed blocks, or tokens for level 0."""
        cover, found = self.cover, []
        if not cover.blocks(level):
            return found
        front = cover.front(level)
        if front:
            index = torch.arange(front, device=self.query.device)
            found.append(self.piece(level, front, self.hidden(level, index)))
        first, last = cover.moving(level, self.windows)
        width = int((last - first).max())
        if width:
            index = first[:, None] + torch.arange(width, device=self.query.device)
            hidden = self.hidden(level, index) | ((index < front) | (index >= last[:, None]))[:, None]
            found.append(self.piece(level, index.clamp(0, cover.blocks(level) - 1), hidden))
        return found

    def hidden(self, level: int, index: Tensor) -> Tensor:
        """Bool [T, Q or 1, C]: what of `index` [C] or [T, C] takes no part."""
        if level:
            return self.cover.hidden(level, index, self.windows)[:, None]
        index = index.expand(len(self.windows), -1)[:, None]
        hidden = (index < 0) | (index >= self.cover.tokens)
        return hidden | (index > self.positions[:, :, None]) if self.cover.is_causal else hidden

    def piece(self, level: int, index: int | Tensor, hidden: Tensor) -> Piece:
        """Logits of the tile for the blocks `index` of a level, -inf where `hidden`."""
        logits = product(self.query, self.keys[level], index)
        return Piece(level, index, logits.masked_fill_(hidden, float("-inf")))

    def candidates(self, level: int, index: Tensor, hidden: Tensor) -> Piece:
        """The children that refinement has laid open, as a piece of their level."""
        hidden = hidden | (index >= self.cover.blocks(level))
        return self.piece(level, index.clamp_max(self.cover.blocks(level) - 1), hidden)

    def sizes(self, piece: Piece) -> Tensor:
        """Real tokens of a piece's blocks, broadcastable to its logits."""
        index = piece.index
        if isinstance(index, int):
            index = torch.arange(index, device=self.query.device)
        elif index.dim() == 2:
            index = index[:, None]
        return self.cover.sizes_of(piece.level, index).to(self.query.dtype)

    def refine(self, level: int, pieces: list[Piece]) -> tuple[Tensor, Tensor]:
        """Take the best `top_k` blocks out of `pieces`; their children's index [Z, T, Q, k·f] and what of it is void.

        Equal scores go to the lower index.
        """
        shape = (*self.query.shape[:3], -1)
        scores = torch.cat([p.logits + torch.log(self.sizes(p)) for p in pieces], -1).detach()
        index = torch.cat([self.full_index(p).expand(shape) for p in pieces], -1)
        order = index.argsort(-1)
        order = order.gather(-1, scores.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
        order = order[..., : self.cover.top_k]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
        for piece, here in zip(pieces, chosen.split([p.logits.shape[-1] for p in pieces], -1), strict=True):
            piece.logits.masked_fill_(here, float("-inf"))
        branching = self.cover.branching(level)
        children = index.gather(-1, order).unsqueeze(-1) * branching
        children = children + torch.arange(branching, device=index.device)
        void = torch.isneginf(scores.gather(-1, order)).unsqueeze(-1).expand(children.shape)
        return children.flatten(-2), void.flatten(-2)

    def full_index(self, piece: Piece) -> Tensor:
        """A piece's blocks by number, int64, broadcastable to its logits."""
        if isinstance(piece.index, int):
            return torch.arange(piece.index, device=self.query.device)
        return piece.index[:, None] if piece.index.dim() == 2 else piece.index
