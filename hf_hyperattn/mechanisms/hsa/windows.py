"""Key-tied attention over windows in plain torch, tile by tile: any device, forward and backward, never N x M numbers.

Positions count from a row's first real token. `tables` are what can be attended to, bottom first: the tokens (level
0), then the means of the windows of each level. A query's cover (math.md A4; arXiv 2509.15448) consists of
  - on the top level all blocks, below it the blocks whose parent is open because of `near`, the query's own place
    (both a range that moves with the query's bottom window) or `sinks` (a range at the front, the same for all);
  - what refinement opens, query by query.
The front and the top level are one product for all queries; the moving ranges are gathered once a window; only
refinement gathers for every query. Causal trees are read as continued to the right: what a query sees does not depend
on how many tokens follow, so that a prefix, a chunk, and a single step agree with the full pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

#: Numbers that the largest intermediate of one tile may have.
TILE_ELEMENTS = 2**20
#: Rows of a tile of a flat tree.
FLAT_ROWS = 64


@dataclass(frozen=True)
class Rule:
    """What is open before refinement, and how much refinement opens; the same for a group of heads.

    Args:
        sizes: window sizes, bottom first, each dividing the next; empty for a flat tree.
        near, sinks, top_k: as in the definition.
        is_causal: only blocks to the left, and tokens up to the query.
        tokens: real tokens of the row.
    """

    sizes: tuple[int, ...]
    near: int
    sinks: int
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
        """Size of a query's own group; in a flat tree, where there is no such thing, queries that go together."""
        return self.sizes[0] if self.sizes else FLAT_ROWS

    def reach(self, window):
        """First and last position that `near` reaches from bottom window number `window` (int or tensor)."""
        spare = min(max(self.near, 1), self.tokens + self.bottom()) - 1
        start = window * self.bottom()
        return start - spare, start + self.bottom() - 1 + (0 if self.is_causal else spare)

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
        low, high = (edge[:, None] for edge in self.reach(windows))
        width = self.widths[level]
        first, last = index * width, index * width + width - 1
        hidden = (first < min(self.sinks, self.tokens)) | ((last >= low) & (first <= high))
        hidden = hidden | (first >= self.tokens) | (first < 0)
        return hidden | (last >= windows[:, None] * self.bottom()) if self.is_causal else hidden

    def sizes_of(self, level: int, index: Tensor) -> Tensor:
        """Real tokens of each block, at least 1."""
        width = self.widths[level]
        return (self.tokens - index * width).clamp(1, width)

    def has_chains(self) -> bool:
        """Whether collapsing moves blocks of the right edge up a level: a last block with one child, not the root."""
        return any(
            self.blocks(level) > 1
            and (self.blocks(level) - 1) * self.branching(level) == self.blocks(level - 1) - 1
            for level in range(1, self.top + 1)
        )


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
            return torch.matmul(weights.flatten(1, 2), table[:, : self.index]).unflatten(
                1, weights.shape[1:3]
            )
        rows = gather(table, self.index)
        return weights @ rows if self.index.dim() == 2 else (weights.unsqueeze(-2) @ rows).squeeze(-2)

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
        rule: what is open.
        query: [Z, T, Q, d], scaled; Z key heads, T windows, Q queries of a window, of all heads that share keys.
        positions: [T, Q]. windows: [T], the bottom windows.
        keys: tables [Z, n_l, d], bottom first.
        block_bias: [Z, 1, Q, 1].
    """

    rule: Rule
    query: Tensor
    positions: Tensor
    windows: Tensor
    keys: Sequence[Tensor]
    block_bias: Tensor

    def pieces(self) -> list[Piece]:
        """The whole cover, from the top level down."""
        found, opened = [], None
        for level in range(self.rule.top, 0, -1):
            here = [*self.standing(level), *([] if opened is None else [self.candidates(level, *opened)])]
            if self.rule.top_k and here:
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
        rule, found = self.rule, []
        if not rule.blocks(level):
            return found
        front = rule.front(level)
        if front:
            index = torch.arange(front, device=self.query.device)
            found.append(self.piece(level, front, self.hidden(level, index)))
        first, last = rule.moving(level, self.windows)
        width = int((last - first).max())
        if width:
            index = first[:, None] + torch.arange(width, device=self.query.device)
            hidden = self.hidden(level, index) | ((index < front) | (index >= last[:, None]))[:, None]
            found.append(self.piece(level, index.clamp(0, rule.blocks(level) - 1), hidden))
        return found

    def hidden(self, level: int, index: Tensor) -> Tensor:
        """Bool [T, Q or 1, C]: what of `index` [C] or [T, C] takes no part."""
        if level:
            return self.rule.hidden(level, index, self.windows)[:, None]
        index = index.expand(len(self.windows), -1)[:, None]
        hidden = (index < 0) | (index >= self.rule.tokens)
        return hidden | (index > self.positions[:, :, None]) if self.rule.is_causal else hidden

    def piece(self, level: int, index: int | Tensor, hidden: Tensor) -> Piece:
        logits = product(self.query, self.keys[level], index)
        return Piece(level, index, logits.masked_fill_(hidden, float("-inf")))

    def candidates(self, level: int, index: Tensor, hidden: Tensor) -> Piece:
        """The children that refinement has laid open, as a piece of their level."""
        hidden = hidden | (index >= self.rule.blocks(level))
        return self.piece(level, index.clamp_max(self.rule.blocks(level) - 1), hidden)

    def sizes(self, piece: Piece) -> Tensor:
        """Real tokens of a piece's blocks, broadcastable to its logits."""
        index = piece.index
        if isinstance(index, int):
            index = torch.arange(index, device=self.query.device)
        elif index.dim() == 2:
            index = index[:, None]
        return self.rule.sizes_of(piece.level, index).to(self.query.dtype)

    def refine(self, level: int, pieces: list[Piece]) -> tuple[Tensor, Tensor]:
        """Take the best `top_k` blocks out of `pieces`; their children's index [Z, T, Q, k·f] and what of it is void.

        Equal scores go to the lower index.
        """
        shape = (*self.query.shape[:3], -1)
        scores = torch.cat([p.logits + torch.log(self.sizes(p)) for p in pieces], -1).detach()
        index = torch.cat([self.full_index(p).expand(shape) for p in pieces], -1)
        order = index.argsort(-1)
        order = order.gather(-1, scores.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
        order = order[..., : self.rule.top_k]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
        for piece, here in zip(pieces, chosen.split([p.logits.shape[-1] for p in pieces], -1), strict=True):
            piece.logits.masked_fill_(here, float("-inf"))
        branching = self.rule.branching(level)
        children = index.gather(-1, order).unsqueeze(-1) * branching
        children = children + torch.arange(branching, device=index.device)
        void = torch.isneginf(scores.gather(-1, order)).unsqueeze(-1).expand(children.shape)
        return children.flatten(-2), void.flatten(-2)

    def full_index(self, piece: Piece) -> Tensor:
        if isinstance(piece.index, int):
            return torch.arange(piece.index, device=self.query.device)
        return piece.index[:, None] if piece.index.dim() == 2 else piece.index


def numbers(rule: Rule, queries: int, dim: int) -> int:
    """About how many numbers the largest intermediates of one bottom window with `queries` queries have."""
    middle = torch.tensor([rule.tokens // 2 // rule.bottom()])
    ranges = [rule.moving(level, middle) for level in range(rule.top)]
    round_window = sum(int(last - first) for first, last in ranges)
    logits = queries * (round_window + sum(rule.front(level) for level in range(rule.top + 1)))
    opened = rule.top_k * max(rule.branching(level) for level in range(1, rule.top + 1)) if rule.top else 0
    return max(logits, round_window * dim, queries * opened * dim, 1)


@dataclass
class Rows:
    """Queries of consecutive positions, cut into tiles of bottom windows.

    Args:
        rule: what is open.
        first: position of the first query, at least 0; all queries stand below `rule.tokens`.
        query: [Z, G, N, d], scaled. keys: tables [Z, n_l, d].
        block_bias: [Z, G] or None.
    """

    rule: Rule
    first: int
    query: Tensor
    keys: Sequence[Tensor]
    block_bias: Tensor | None

    def tiles(self) -> Iterator[tuple[slice, slice, slice, Tile]]:
        """(key heads, rows of `query`, rows of the padded tile, the tile), in a fixed order."""
        heads, group, n, dim = self.query.shape
        rows = self.rule.bottom() if n > 1 else 1
        each = numbers(self.rule, group * rows, max(dim, 1))
        together = max(1, min(heads, TILE_ELEMENTS // each))
        many = max(1, TILE_ELEMENTS // (each * together))
        for z in range(0, heads, together):
            for start, stop in self.spans(many):
                yield self.tile(slice(z, z + together), start, stop)

    def spans(self, many: int) -> Iterator[tuple[int, int]]:
        """Positions [start, stop) of the queries of `many` windows each."""
        end, at = self.first + self.query.shape[2], self.first
        while at < end:
            stop = min(end, (at // self.rule.bottom() + many) * self.rule.bottom())
            yield at, stop
            at = stop

    def tile(self, heads: slice, start: int, stop: int) -> tuple[slice, slice, slice, Tile]:
        size, device = self.rule.bottom(), self.query.device
        low = start if stop - start == 1 else start // size * size
        rows = 1 if stop - start == 1 else size
        count = -(-(stop - low) // rows)
        here, inside = slice(start - self.first, stop - self.first), slice(start - low, stop - low)
        query = self.query.new_zeros(*self.query[heads].shape[:2], count * rows, self.query.shape[3])
        query[:, :, inside] = self.query[heads, :, here]
        group = query.shape[1]
        positions = (low + torch.arange(count * rows, device=device)).view(count, rows)
        bias = query.new_zeros(len(query), group) if self.block_bias is None else self.block_bias[heads]
        return heads, here, inside, Tile(
            self.rule,
            to_tile(query, count),
            positions.repeat(1, group),
            positions[:, 0] // size,
            [table[heads] for table in self.keys],
            bias.repeat_interleave(rows, -1)[:, None, :, None],
        )  # fmt: skip


def to_tile(rows: Tensor, count: int) -> Tensor:
    """[Z, G, T·R, e] to [Z, T, G·R, e]."""
    return rows.unflatten(2, (count, -1)).transpose(1, 2).flatten(2, 3)


def from_tile(tile: Tensor, group: int) -> Tensor:
    """[Z, T, G·R, e] to [Z, G, T·R, e]."""
    return tile.unflatten(2, (group, -1)).transpose(1, 2).flatten(2, 3)


def forward(rows: Rows, values: Sequence[Tensor], sink_logit: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [Z, G, N, dv] and log-sum-exp [Z, G, N]; `sink_logit` [Z, G] takes part without a value."""
    group = rows.query.shape[1]
    out = rows.query.new_empty(*rows.query.shape[:3], values[0].shape[-1])
    lse = rows.query.new_empty(rows.query.shape[:3])
    for heads, here, inside, tile in rows.tiles():
        pieces = tile.pieces()
        top = torch.stack([p.logits.amax(-1) for p in pieces]).amax(0)[..., None]
        sink = None
        if sink_logit is not None:
            sink = sink_logit[heads].repeat_interleave(top.shape[2] // group, -1)[:, None, :, None]
            top = torch.maximum(top, sink)
        top = top.clamp_min(torch.finfo(top.dtype).min)
        weights = [p.logits.sub_(top).exp_() for p in pieces]
        total = sum(w.sum(-1, keepdim=True) for w in weights)
        total = total if sink is None else total + torch.exp(sink - top)
        total = total.clamp_min(torch.finfo(top.dtype).tiny)
        found = sum(p.combine(w, values[p.level][heads]) for p, w in zip(pieces, weights)) / total
        out[heads, :, here] = from_tile(found, group)[:, :, inside]
        lse[heads, :, here] = from_tile(top + total.log(), group)[:, :, inside, 0]
    return out, lse


@dataclass
class Gradients:
    """Where `backward` adds what it finds: like the arguments of `forward`, all of them zero at first or None."""

    query: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    block_bias: Tensor | None = None
    sink_logit: Tensor | None = None


def backward(
    rows: Rows, values: Sequence[Tensor], out: Tensor, lse: Tensor, grad: Tensor, into: Gradients,
    sink_logit: Tensor | None,
) -> None:  # fmt: skip
    """Gradients by computing every tile again; the selection of blocks has none."""
    group = rows.query.shape[1]
    delta = (grad * out).sum(-1)
    if into.sink_logit is not None:
        into.sink_logit -= (torch.exp(sink_logit[..., None] - lse) * delta).sum(-1)
    for heads, here, inside, tile in rows.tiles():
        count = tile.query.shape[1]
        rows_of_tile = count * tile.query.shape[2] // group
        tile_grad, tile_delta, tile_lse = (
            to_tile(_padded(t[heads, :, here], inside, rows_of_tile, fill), count)
            for t, fill in ((grad, 0.0), (delta[..., None], 0.0), (lse[..., None], float("inf")))
        )
        query_grad = torch.zeros_like(tile.query)
        for piece in tile.pieces():
            weights = torch.exp(piece.logits - tile_lse)
            piece.spread(weights, tile_grad, into.values[piece.level][heads])
            slope = weights * (product(tile_grad, values[piece.level][heads], piece.index) - tile_delta)
            query_grad += piece.combine(slope, tile.keys[piece.level])
            piece.spread(slope, tile.query, into.keys[piece.level][heads])
            if into.block_bias is not None and piece.level:
                tied = slope.masked_fill(tile.sizes(piece) <= 1, 0.0).sum((1, 3))
                into.block_bias[heads] += tied.unflatten(1, (group, -1)).sum(-1)
        into.query[heads, :, here] += from_tile(query_grad, group)[:, :, inside]


def _padded(t: Tensor, inside: slice, rows: int, fill: float) -> Tensor:
    """[Z, G, n, e] with rows of `fill` round it, as the tile has them."""
    padded = t.new_full((*t.shape[:2], rows, t.shape[3]), fill)
    padded[:, :, inside] = t
    return padded
