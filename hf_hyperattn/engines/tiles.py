"""Slice a call into tiles: a block of query rows and the keys they see.

Tensors are grouped by key heads: heads [H] become [Hkv, G], so that one matrix product serves a
whole group. A tile slices all tensors of a call in the same way. Gradients have the same shapes, so
they are sliced by the same methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .options import Options, key_range
from .score import Term
from .serialize import OperatorCall

#: Gathering the points of one pair costs this many times as much as its share of a whole tile of
#: differences.
FEW = 16
#: Points coincide if they differ by less than this many rounding errors, which may separate points
#: of equal vectors.
BLUR = 4.0


@dataclass
class Tensors:
    """All tensors of a call, or all their gradients, grouped by key heads.

    Args:
        query: Query features [B, Hkv, G, N, d].
        key: Key features [B, Hkv, M, d].
        value: Values [B, Hkv, M, dv].
        row: Row statistics, each [B, Hkv, G, N].
        column: Column statistics, each [B, Hkv, G or 1, M].
        head: Head parameters, each [Hkv, G].
        mask, bias: [B|1, Hkv|1, G|1, N|1, M|1], or None.
        sinks: [Hkv, G], or None.
        points_query, points_key: Points in the shapes of `query` and `key`, or None.
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
    """Group the heads of a mask, a bias or points.

    Args:
        t: Tensor [B|1, H|1, N|1, M|1], or None.
        group: (Hkv, G).

    Returns:
        Tensor [B|1, Hkv|1, G|1, N|1, M|1], or None.
    """
    if t is None:
        return None
    return t.unflatten(1, group if t.shape[1] > 1 else (1, 1))


@dataclass
class Call:
    """A call of the blockwise engine.

    Args:
        tensors: All tensors.
        terms: Terms of the score, each with whether it has a gate and whether it is capped.
        options: Options without tensors; those are in `tensors`.
        seed: Seed of dropout.
    """

    tensors: Tensors
    terms: tuple[tuple[Term, bool, bool], ...]
    options: Options
    seed: int = 0

    @classmethod
    def from_operator(cls, call: OperatorCall, gradients: bool = False) -> Call:
        """Return a call, or its gradients, from the arguments of an operator.

        Args:
            call: Arguments of the operator.
            gradients: The tensors are gradients; extras of shape (0,) have none. Default: they are
                the call's tensors.
        """
        kv_heads = call.key.shape[1]
        group = (kv_heads, call.query.shape[1] // kv_heads)
        extras = {n: t for n, t in call.extras.items() if not (gradients and t.shape == (0,))}
        sinks = extras.get("sinks")
        tensors = Tensors(
            query=call.query.unflatten(1, group),
            key=call.key,
            value=call.value,
            row=[t.unflatten(1, group) for t in call.row],
            column=[t.unflatten(1, (kv_heads, -1)) for t in call.column],
            # Views: gradients are added to these buffers in place.
            head=[t.view(group) for t in call.head],
            mask=by_group(extras.get("mask"), group),
            bias=by_group(extras.get("bias"), group),
            sinks=None if sinks is None else sinks.view(group),
            points_query=by_group(extras.get("points_query"), group),
            points_key=extras.get("points_key"),
        )
        # Gradients have no seed: nothing is drawn for them.
        seed = int(extras["seed"]) if "seed" in extras and not gradients else 0
        return cls(tensors=tensors, terms=call.terms, options=call.options, seed=seed)

    def cut_tiles(self, elements: int) -> Iterator[Tile]:
        """Yield tiles of about `elements` pairs.

        They are cut by batch element, by heads and by blocks of query rows.
        """
        batch, kv_heads, group, n, _ = self.tensors.query.shape
        keys = self.tensors.key.shape[2]
        rows = max(1, min(n, elements // max(1, group * keys)))
        # Several heads share a tile only if one head's rows do not fill it.
        together = max(1, min(kv_heads, elements // max(1, group * keys * rows)))
        index = 0
        for b in range(batch):
            for h in range(0, kv_heads, together):
                for i in range(0, n, rows):
                    block = range(i, min(i + rows, n))
                    yield Tile(
                        call=self,
                        batch=b,
                        heads=slice(h, h + together),
                        rows=block,
                        columns=key_range(self.options, block, keys),
                        index=index,
                    )
                    index += 1


@dataclass
class Tile:
    """One block of query rows of a few heads.

    Args:
        call: The call that the tile is cut from.
        batch: Batch element.
        heads: Key heads.
        rows: Queries.
        columns: Keys that causality and the window leave visible to at least one of the queries.
        index: Number of the tile in the call; dropout uses it as an offset of the seed.
    """

    call: Call
    batch: int
    heads: slice
    rows: range
    columns: range
    index: int

    def __post_init__(self):
        self.row_slice = slice(self.rows.start, self.rows.stop)
        self.column_slice = slice(self.columns.start, self.columns.stop)

    # Slices of a call's tensors, and of their gradients. They are views, so that gradients can be
    # added in place. Sizes in a tile: hc key heads, G queries per key head, R rows, C columns.

    def of_query(self, t: Tensor) -> Tensor:
        """Slice [B, Hkv, G, N, d] to [hc, G, R, d]."""
        return t[self.batch, self.heads, :, self.row_slice]

    def of_key(self, t: Tensor) -> Tensor:
        """Slice [B, Hkv, M, d] to [hc, C, d]."""
        return t[self.batch, self.heads, self.column_slice]

    def of_row(self, t: Tensor) -> Tensor:
        """Slice [B, Hkv, G, N] to [hc, G, R, 1]."""
        return t[self.batch, self.heads, :, self.row_slice, None]

    def of_column(self, t: Tensor) -> Tensor:
        """Slice [B, Hkv, G or 1, M] to [hc, G or 1, 1, C]."""
        return t[self.batch, self.heads, :, None, self.column_slice]

    def of_head(self, t: Tensor) -> Tensor:
        """Slice [Hkv, G] to [hc, G, 1, 1]."""
        return t[self.heads, :, None, None]

    def of_pair(self, t: Tensor) -> Tensor:
        """Slice [B|1, Hkv|1, G|1, N|1, M|1] to [hc|1, G|1, R|1, C|1]."""
        # Axes of size 1 broadcast, so they are not sliced.
        t = t[self.batch if t.shape[0] > 1 else 0]
        t = t[self.heads] if t.shape[0] > 1 else t
        t = t[:, :, self.row_slice] if t.shape[2] > 1 else t
        return t[..., self.column_slice] if t.shape[3] > 1 else t

    def multiply_keys(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the product [hc, G, R, C] of queries and keys.

        Args:
            query: Queries [hc, G, R, d].
            key: Keys [hc, C, d]. One matrix product serves all queries of a group.
        """
        hc, group, rows, _ = query.shape
        return torch.bmm(query.flatten(1, 2), key.mT).view(hc, group, rows, key.shape[1])

    def sum_over_rows(self, weights: Tensor, query: Tensor) -> Tensor:
        """Return weights times vectors, summed over group and rows, [hc, C, d].

        Args:
            weights: Weights [hc, G, R, C].
            query: One vector per query [hc, G, R, d].
        """
        return torch.bmm(weights.flatten(1, 2).mT, query.flatten(1, 2))

    def squared_distance(self, pairs: Tensor | None) -> Tensor:
        """Return squared distances [hc, G, R, C], computed from differences.

        Points that differ only by rounding get 0.

        Args:
            pairs: The pairs to compute, bool [hc, G, R, C]; others get NaN. None: all. If many are
                chosen, all are computed.
        """
        chosen = self.find_few(pairs)
        sizes = self.points[0].square().sum(-1, keepdim=True)
        if chosen is None or pairs is None:
            squares = self.all_distances()[-1].view(*self.shape).square_()
        else:
            difference = self.point_differences(chosen)
            squares = torch.full(
                pairs.shape, torch.nan, dtype=difference.dtype, device=pairs.device
            )
            squares[chosen] = difference.square().sum(-1)
        # Relative to the size of the points, because rounding grows with their coordinates.
        blur = (BLUR * torch.finfo(squares.dtype).eps) ** 2
        return squares.masked_fill_(squares <= blur * sizes, 0.0)

    def backward_distances(self, grads: Tensors, d_square: Tensor) -> None:
        """Add the gradient through `squared_distance` to the gradients of the points.

        Args:
            grads: Gradients of the call.
            d_square: Gradient of the squared distances [hc, G, R, C], 0 for pairs from the product.
        """
        chosen = self.find_few(d_square != 0)
        d_query = None if grads.points_query is None else self.of_query(grads.points_query)
        d_key = None if grads.points_key is None else self.of_key(grads.points_key)
        if chosen is None:
            self.backward_all_distances(d_square, d_query, d_key)
            return
        h, g, r, c = chosen
        # d|q - k|² = 2 (q - k) for the query point, and its negative for the key point.
        step = self.point_differences(chosen) * (2 * d_square[chosen])[:, None]
        # A point may be part of several pairs, so its steps accumulate.
        if d_query is not None:
            d_query.index_put_((h, g, r), step, accumulate=True)
        if d_key is not None:
            d_key.index_put_((h, c), -step, accumulate=True)

    def backward_all_distances(
        self, d_square: Tensor, d_query: Tensor | None, d_key: Tensor | None
    ) -> None:
        """Add the gradient through all squared distances of the tile.

        Args:
            d_square: Gradient of the squared distances [hc, G, R, C].
            d_query: Gradient of the query points [hc, G, R, p] to add to, or None.
            d_key: Gradient of the key points [hc, C, p] to add to, or None.
        """
        query, key, distance = self.all_distances()
        # `_cdist_backward` differentiates the distance: d(distance²) = 2 · distance · d(distance).
        slope = (2 * d_square).view(distance.shape) * distance
        if d_query is not None:
            by_query = torch.ops.aten._cdist_backward(slope, query, key, 2.0, distance)
            d_query.add_(by_query.view(d_query.shape))
        if d_key is not None:
            # The same with exchanged roles of queries and keys.
            slope, distance_t = slope.mT.contiguous(), distance.mT.contiguous()
            d_key.add_(torch.ops.aten._cdist_backward(slope, key, query, 2.0, distance_t))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape [hc, G, R, C] of the tile."""
        heads, group = self.call.tensors.query[0, self.heads].shape[:2]
        return heads, group, len(self.rows), len(self.columns)

    def find_few(self, pairs: Tensor | None) -> tuple[Tensor, ...] | None:
        """Return the indices of chosen pairs, or None if all pairs are faster.

        Args:
            pairs: Chosen pairs, bool [hc, G, R, C]; None for all.
        """
        if pairs is None:
            return None
        # Gathering wins only for a small share of the pairs, see FEW.
        chosen = pairs.nonzero(as_tuple=True)
        return None if len(chosen[0]) * FEW > pairs.numel() else chosen

    @property
    def points(self) -> tuple[Tensor, Tensor]:
        """Points of the tile's queries [hc, G, R, p] and keys [hc, C, p]."""
        t = self.call.tensors
        assert t.points_query is not None and t.points_key is not None
        return self.of_query(t.points_query), self.of_key(t.points_key)

    def point_differences(self, chosen: tuple[Tensor, ...]) -> Tensor:
        """Return query point - key point of P chosen pairs, [P, p]."""
        h, g, r, c = chosen
        query, key = self.points
        return query[h, g, r] - key[h, c]

    def all_distances(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the points and all their distances, computed from differences.

        Returns:
            Query points [hc, G·R, p], key points [hc, C, p] and distances [hc, G·R, C].
        """
        query, key = self.points
        # `_cdist_backward` accepts only contiguous points.
        query, key = query.flatten(1, 2).contiguous(), key.contiguous()
        return query, key, torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist")
