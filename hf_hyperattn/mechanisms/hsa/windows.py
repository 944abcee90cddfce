"""Key-tied attention over windows in plain torch, tile by tile: any device, forward and backward, never N x M numbers.

`keys` and `values` are tables of what can be attended to, bottom first: the tokens (level 0), then the means of the
windows of each level. Backward computes every tile again from the saved log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cover import Cover
from .tile import Tile, product

#: Numbers that the largest intermediate of one tile may have: on a CPU a few of its caches, elsewhere enough work.
TILE_ELEMENTS = 2**20
DEVICE_TILE_ELEMENTS = 2**26


def numbers(cover: Cover, queries: int, dim: int) -> int:
    """About how many numbers the largest intermediates of one bottom window with `queries` queries have."""
    middle = torch.tensor([cover.tokens // 2 // cover.bottom()])
    ranges = [cover.moving(level, middle) for level in range(cover.top)]
    round_window = sum(int(last - first) for first, last in ranges)
    logits = queries * (round_window + sum(cover.front(level) for level in range(cover.top + 1)))
    opened = (
        cover.top_k * max(cover.branching(level) for level in range(1, cover.top + 1)) if cover.top else 0
    )
    return max(logits, round_window * dim, queries * opened * dim, 1)


@dataclass
class Rows:
    """Queries of consecutive positions, cut into tiles of bottom windows.

    Args:
        cover: what is open.
        first: position of the first query, at least 0; all queries stand below `cover.tokens`.
        query: [Z, G, N, d], scaled. keys: tables [Z, n_l, d].
        block_bias: [Z, G] or None.
    """

    cover: Cover
    first: int
    query: Tensor
    keys: Sequence[Tensor]
    block_bias: Tensor | None

    def tiles(self) -> Iterator[tuple[slice, slice, slice, Tile]]:
        """(key heads, rows of `query`, rows of the padded tile, the tile), in a fixed order."""
        heads, group, n, dim = self.query.shape
        rows = self.cover.bottom() if n > 1 else 1
        each = numbers(self.cover, group * rows, max(dim, 1))
        most = TILE_ELEMENTS if self.query.device.type == "cpu" else DEVICE_TILE_ELEMENTS
        together = max(1, min(heads, most // each))
        many = max(1, most // (each * together))
        for z in range(0, heads, together):
            for start, stop in self.spans(many):
                yield self.tile(slice(z, z + together), start, stop)

    def spans(self, many: int) -> Iterator[tuple[int, int]]:
        """Positions [start, stop) of the queries of `many` windows each."""
        end, at = self.first + self.query.shape[2], self.first
        while at < end:
            stop = min(end, (at // self.cover.bottom() + many) * self.cover.bottom())
            yield at, stop
            at = stop

    def tile(self, heads: slice, start: int, stop: int) -> tuple[slice, slice, slice, Tile]:
        """The queries at positions [start, stop): the slice of heads, of queries, of the rows of the tile that they
        fill, and the tile.
        """
        size, device = self.cover.bottom(), self.query.device
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
            self.cover,
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
            if inside.stop - inside.start < rows_of_tile:
                weights.masked_fill_(
                    tile_lse.isposinf(), 0.0
                )  # rows round the queries, whose logits may be NaN
            piece.spread(weights, tile_grad, into.values[piece.level][heads])
            slope = product(tile_grad, values[piece.level][heads], piece.index).sub_(tile_delta).mul_(weights)
            if not slope.sum().isfinite():  # hidden values may be NaN
                slope.masked_fill_(weights == 0, 0.0)
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
