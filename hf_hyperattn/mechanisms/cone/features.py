"""From head vectors to what engines see: features, statistics and points of the cone scores (see terms.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...engines.cpu import squared_norms
from ...engines.halves import unrounded
from ...engines.late import Late, LateFields, late, value_of
from ...engines.score import TERMS, PairScore, Piece, Points, Reader, Source, repeat_heads, working_dtype
from .points import CLAMP, horizontal, of_parts
from .score import FLOOR, definition, inverse_sinh

#: Mappings whose statistics the CPU engine reads from keys itself (cone.h).
READERS = {"xi": "cone::kXi", "psi": "cone::kPsi"}


@dataclass(frozen=True)
class ConeSpace:
    """The variant, and per head the factors by which heights and distances enter the tile's formula.

    Points are computed once for all heads that share a key, at gamma = 1 and, for psi, at r = 1; gamma and r then
    multiply heights, gaps and the radius. gamma and radius are both [H] or both [1].
    """

    variant: str
    mapping: str
    squared: bool
    clamp_heights: bool
    gamma: Tensor
    radius: Tensor
    height_factor: Tensor | None = None  # these two by `working`
    gap_factor: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """By how much penumbral lengths are stretched so that gamma becomes 1."""
        return self.gamma.sqrt() if self.squared else self.gamma

    def working(self, dtype: torch.dtype) -> ConeSpace:
        """The space in this dtype, with its factors; psi scales lengths with the radius, other mappings know none."""
        gamma, radius = torch.broadcast_tensors(self.gamma.to(dtype), self.radius.to(dtype))
        space = replace(self, gamma=gamma, radius=radius)
        if self.variant == "umbral":
            height_factor = gamma / 2
            gap_factor = height_factor * inverse_sinh(radius)
        else:
            height_factor = gap_factor = space.weight
        if self.mapping == "psi":
            height_factor, gap_factor = radius * height_factor, radius * gap_factor
        return replace(space, height_factor=height_factor, gap_factor=gap_factor)

    @property
    def term(self) -> str:
        return "umbral" if self.variant == "umbral" else "penumbral_squared" if self.squared else "penumbral"

    def own_statistics(self, height: Tensor) -> tuple[Tensor, ...]:
        """(h,) for umbral, (h², sqrt(r² - h²)) for penumbral, of heights at unit scale."""
        h = per_head(height, self.height_factor)
        if self.variant == "umbral":
            return (h,)
        r = (self.radius * self.weight)[:, None]
        if self.clamp_heights:
            h = torch.minimum(h, CLAMP * r)
        floor = FLOOR * r**2
        return h**2, torch.sqrt(torch.maximum(r**2 - h**2, floor))

    def head_parameters(self, heads: int) -> tuple[Tensor, ...]:
        """() for umbral, (r²,) for penumbral, [H]."""
        return () if self.variant == "umbral" else (((self.radius * self.weight) ** 2).expand(heads),)


def per_head(statistic: Tensor, factor: Tensor) -> Tensor:
    """[B, Hkv, M] times a factor per query head; the heads stay shared where the factor is one number."""
    return (
        repeat_heads(statistic, factor.shape[0]) * factor[:, None]
        if factor.shape[0] > 1
        else statistic * factor
    )


@dataclass(frozen=True)
class Side(LateFields):
    """What is needed of queries or keys, without a copy of them: per vector, at unit scale, [B, H or Hkv, L] each."""

    vectors: Tensor  # as the caller has them
    dtype: torch.dtype
    mapping: str
    last: Tensor  # x_d
    norm: Tensor  # |x_1 .. x_{d-1}|²
    height: Tensor
    stretch: Tensor

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype, mapping: str) -> Side:
        dim, last = x.shape[-1], x[..., -1].to(dtype)
        norm = late(lambda: squared_norms(x, dtype, dim - 1))
        side = value_of(norm) if mapping == "expmap" else None
        return cls(x, dtype, mapping, last, norm, *of_parts(last, side, dim, mapping))

    @property
    def square(self) -> Tensor:
        """|X|²"""
        return self.norm * self.stretch.square()

    def horizontal(self) -> Tensor:
        """X, [B, H or Hkv, L, d - 1]."""
        return horizontal(self.vectors.to(self.dtype), self.stretch)


def cone_score(query: Tensor, key: Tensor, space: ConeSpace) -> PairScore:
    """The cone score by itself: the features are the horizontal parts.

    Args:
        query: [B, H, N, d], unscaled.
        key: [B, Hkv, M, d].
        space: variant and parameters, checked.
    """
    query, key = unrounded(query), unrounded(key)
    q, k, space = _sides(query, key, space)
    square = space.gap_factor**2
    piece = Piece(
        TERMS[space.term],
        _definition(query, key, space),
        row=late(lambda: (*space.own_statistics(q.height), per_head(q.square, square))),
        column=late(lambda: _columns(space, value_of(k))),
        head=space.head_parameters(query.shape[1]),
        reader=_reader(q, space, on_product=False),
    )
    features = late(lambda: q.horizontal() * square[:, None, None]), late(lambda: value_of(k).horizontal())
    factors = per_head(q.stretch, square), late(lambda: value_of(k).stretch)
    source = Source(query, key, 1.0, features, *factors, width=query.shape[-1] - 1)
    return PairScore(*features, (piece,), partial(_gap_points, q, k, space), source=source)


def cone_piece(
    query: Tensor, key: Tensor, scale: float, space: ConeSpace, gate: Tensor | None = None
) -> tuple:
    """The cone score as a piece beside a dot product: it reads the host's product, scale · q·k.

    Returns:
        The piece, and the function that returns its points.
    """
    q, k, space = _sides(query, key, space)
    square = space.gap_factor**2
    piece = Piece(
        TERMS[space.term + "_on_product"],
        _definition(query, key, space),
        row=(
            *space.own_statistics(q.height),
            per_head(q.square, square),
            per_head(q.stretch, square / scale),
            q.last * scale,
        ),
        column=late(lambda: (*_columns(space, value_of(k)), value_of(k).stretch, value_of(k).last)),
        head=space.head_parameters(query.shape[1]),
        gate=gate,
        reader=_reader(q, space, on_product=True),
    )
    return piece, partial(_gap_points, q, k, space)


def _sides(query, key, space):
    dtype = working_dtype(query, key)
    q, k = Side.of(query, dtype, space.mapping), late(lambda: Side.of(key, dtype, space.mapping))
    return q, k, space.working(dtype)


def _columns(space: ConeSpace, k: Side) -> tuple[Tensor, ...]:
    return *space.own_statistics(k.height), per_head(k.square, space.gap_factor**2)


def _reader(q: Side, space: ConeSpace, on_product: bool) -> Reader | None:
    """How an engine reads keys; it does not for expmap."""
    if space.mapping not in READERS:
        return None
    heads = q.vectors.shape[1]

    penumbral = space.variant == "penumbral"

    def head():
        found = space.height_factor, space.gap_factor
        if penumbral:
            r = space.radius * space.weight
            found += r, CLAMP * r if space.clamp_heights else torch.full_like(r, torch.inf)
        return tuple(x.expand(heads) for x in found)

    cpp = f"cone::Keys<{READERS[space.mapping]}, {penumbral:d}, {on_product:d}>"
    return Reader(cpp, head, lambda: (q.horizontal(), space.gap_factor.expand(heads)))


def _definition(query, key, space):
    names = {n: getattr(space, n) for n in ("variant", "mapping", "squared", "clamp_heights")}
    return partial(definition, query, key, space.gamma, space.radius, **names)


def _gap_points(q: Side, k: Side | Late, space: ConeSpace) -> Points:
    return Points(q.horizontal(), value_of(k).horizontal(), space.gap_factor.expand(q.vectors.shape[1]))
