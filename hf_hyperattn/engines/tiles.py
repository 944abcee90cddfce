"""One tile of attention: a block of query rows of a few heads against the keys they can see.

Tensors are grouped for shared keys: heads [H] become [Hkv, G], so that one product serves a whole group. A tile
slices every tensor of the call in the same way, and slices the gradients, which have the same shapes, alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .options import Options, key_range
from .score import Term
from .serialize import OperatorCall

#: Gathering the points of single pairs costs this many times as much a pair as the differences of a whole tile.
FEW = 16
#: Points coincide where they differ by less than this many units of rounding: those of equal vectors may.
BLUR = 4.0


@dataclass
class Tensors:
    """All tensors of a call, or all their gradients, grouped by key heads.

    query [B, Hkv, G, N, d]; key, value [B, Hkv, M, d]; rows [B, Hkv, G, N]; columns [B, Hkv, G or 1, M];
    heads [Hkv, G]; mask and bias [B|1, Hkv|1, G|1, N|1, M|1]; sinks [Hkv, G]; points as query and key.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    row: list[Tensor]
    column: list[Tensor]
    head: list[Tensor]
    mask: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    points_query: Tensor | None = None
    points_key: Tensor | None = None


def by_group(t: Tensor | None, group: tuple[int, int]) -> Tensor | None:
    """[B|1, H|1, N|1, M|1] to [B|1, Hkv|1, G|1, N|1, M|1]."""
    return None if t is None else t.unflatten(1, group if t.shape[1] > 1 else (1, 1))


@dataclass
class Call:
    """A call of the blockwise engine: tensors, score, options."""

    tensors: Tensors
    terms: tuple[
        tuple[Term, bool, bool], ...
    ]  # with whether each has a gate, and whether softcap acts on it
    options: Options  # its tensors stand in `tensors`, grouped
    seed: int = 0

    @classmethod
    def of(cls, call: OperatorCall, gradients: bool = False) -> Call:
        """A call from an operator's arguments, or its gradients, of which extras without one are empty."""
        kv_heads = call.key.shape[1]
        group = (kv_heads, call.query.shape[1] // kv_heads)
        named = {n: t for n, t in call.extras.items() if not (gradients and t.shape == (0,))}
        by_head = lambda name: named[name].view(group) if name in named else None
        tensors = Tensors(
            call.query.unflatten(1, group),
            call.key,
            call.value,
            [t.unflatten(1, group) for t in call.row],
            [t.unflatten(1, (kv_heads, -1)) for t in call.column],
            [t.view(group) for t in call.head],
            by_group(named.get("mask"), group),
            by_group(named.get("bias"), group),
            sinks=by_head("sinks"),
            points_query=by_group(named.get("points_query"), group),
            points_key=named.get("points_key"),
        )
        seed = int(named["seed"]) if "seed" in named and not gradients else 0
        return cls(tensors, call.terms, call.options, seed)

    def tiles(self, elements: int) -> Iterator[Tile]:
        """Cut the call into tiles of about `elements` pairs: by batch element, by heads, by blocks of query rows."""
        batch, kv_heads, group, n, _ = self.tensors.query.shape
        keys = self.tensors.key.shape[2]
        rows = max(1, min(n, elements // max(1, group * keys)))
        together = max(1, min(kv_heads, elements // max(1, group * keys * rows)))
        index = 0
        for b in range(batch):
            for h in range(0, kv_heads, together):
                for i in range(0, n, rows):
                    block = range(i, min(i + rows, n))
                    yield Tile(
                        self,
                        b,
                        slice(h, h + together),
                        block,
                        key_range(self.options, block, keys),
                        index,
                    )
                    index += 1


@dataclass
class Tile:
    """One block of rows; `columns` are the keys that causality and the window leave it."""

    call: Call
    batch: int
    heads: slice
    rows: range
    columns: range
    index: int

    def __post_init__(self):
        self.row_slice = slice(self.rows.start, self.rows.stop)
        self.column_slice = slice(self.columns.start, self.columns.stop)

    # slices of a call's tensors, and of their gradients

    def of_query(self, t: Tensor) -> Tensor:
        """[hc, G, R, d] of [B, Hkv, G, N, d]."""
        return t[self.batch, self.heads, :, self.row_slice]

    def of_key(self, t: Tensor) -> Tensor:
        """[hc, C, d] of [B, Hkv, M, d]."""
        return t[self.batch, self.heads, self.column_slice]

    def of_row(self, t: Tensor) -> Tensor:
        """[hc, G, R, 1] of [B, Hkv, G, N]."""
        return t[self.batch, self.heads, :, self.row_slice, None]

    def of_column(self, t: Tensor) -> Tensor:
        """[hc, G or 1, 1, C] of [B, Hkv, G or 1, M]."""
        return t[self.batch, self.heads, :, None, self.column_slice]

    def of_head(self, t: Tensor) -> Tensor:
        """[hc, G, 1, 1] of [Hkv, G]."""
        return t[self.heads, :, None, None]

    def of_pair(self, t: Tensor) -> Tensor:
        """[hc|1, G|1, R|1, C|1] of [B|1, Hkv|1, G|1, N|1, M|1]."""
        t = t[self.batch if t.shape[0] > 1 else 0]
        t = t[self.heads] if t.shape[0] > 1 else t
        t = t[:, :, self.row_slice] if t.shape[2] > 1 else t
        return t[..., self.column_slice] if t.shape[3] > 1 else t

    def product(self, query: Tensor, key: Tensor) -> Tensor:
        """[hc, G, R, C] products of [hc, G, R, d] with [hc, C, d]; all queries of a group in one product."""
        hc, group, rows, _ = query.shape
        return torch.bmm(query.flatten(1, 2), key.mT).view(hc, group, rows, key.shape[1])

    def transposed_product(self, weights: Tensor, query: Tensor) -> Tensor:
        """[hc, C, d]: the sum over group and rows of weights [hc, G, R, C] times [hc, G, R, d]."""
        return torch.bmm(weights.flatten(1, 2).mT, query.flatten(1, 2))

    def squared_distance(self, pairs: Tensor | None) -> Tensor:
        """Squared distances from differences of these pairs, bool [hc, G, R, C], NaN elsewhere; of all of them where
        many are chosen, or for None. 0 for points that coincide but for rounding.
        """
        chosen, sizes = self.few(pairs), self.points[0].square().sum(-1, keepdim=True)
        if chosen is None or pairs is None:
            squares = self.distances()[-1].view(*self.shape).square_()
        else:
            difference = self.differences(chosen)
            squares = torch.full(
                pairs.shape, torch.nan, dtype=difference.dtype, device=pairs.device
            )
            squares[chosen] = difference.square().sum(-1)
        return squares.masked_fill_(
            squares <= (BLUR * torch.finfo(squares.dtype).eps) ** 2 * sizes, 0.0
        )

    def backward_distances(self, grads: Tensors, d_square: Tensor) -> None:
        """Add what the gradient of `squared_distance`, [hc, G, R, C], makes to those of the points."""
        chosen = self.few(d_square != 0)
        d_query = None if grads.points_query is None else self.of_query(grads.points_query)
        d_key = None if grads.points_key is None else self.of_key(grads.points_key)
        if chosen is None:
            query, key, distance = self.distances()
            slope = (2 * d_square).view(distance.shape) * distance
            if d_query is not None:
                by_query = torch.ops.aten._cdist_backward(slope, query, key, 2.0, distance)
                d_query.add_(by_query.view(d_query.shape))
            if d_key is not None:
                slope, distance_t = slope.mT.contiguous(), distance.mT.contiguous()
                d_key.add_(torch.ops.aten._cdist_backward(slope, key, query, 2.0, distance_t))
            return
        h, g, r, c = chosen
        step = self.differences(chosen) * (2 * d_square[chosen])[:, None]
        if d_query is not None:
            d_query.index_put_((h, g, r), step, accumulate=True)
        if d_key is not None:
            d_key.index_put_((h, c), -step, accumulate=True)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[hc, G, R, C] of the tile."""
        heads, group = self.call.tensors.query[0, self.heads].shape[:2]
        return heads, group, len(self.rows), len(self.columns)

    def few(self, pairs: Tensor | None) -> tuple[Tensor, ...] | None:
        """The places of these pairs; None where it is better to take them all."""
        if pairs is None:
            return None
        chosen = pairs.nonzero(as_tuple=True)
        return None if len(chosen[0]) * FEW > pairs.numel() else chosen

    @property
    def points(self) -> tuple[Tensor, Tensor]:
        """The points of the tile's queries [hc, G, R, p] and keys [hc, C, p], of a call that has some."""
        t = self.call.tensors
        assert t.points_query is not None and t.points_key is not None
        return self.of_query(t.points_query), self.of_key(t.points_key)

    def differences(self, chosen: tuple[Tensor, ...]) -> Tensor:
        """Of chosen pairs query point - key point, [P, p]."""
        (h, g, r, c), (query, key) = chosen, self.points
        return query[h, g, r] - key[h, c]

    def distances(self) -> tuple[Tensor, Tensor, Tensor]:
        """The points [hc, G·R, p] and [hc, C, p], and all their distances [hc, G·R, C] from differences."""
        query, key = self.points
        query, key = query.flatten(1, 2).contiguous(), key.contiguous()
        return query, key, torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist")
