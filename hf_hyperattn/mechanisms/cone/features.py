"""From head vectors to what engines see: features, statistics and points of the cone scores (see terms.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ...engines.cpu import squared_norms
from ...engines.cpu.decode import Alone
from ...engines.halves import unrounded
from ...engines.late import Late, LateFields, late, value_of
from ...engines.score import TERMS, PairScore, Piece, Points, Reader, Source, repeat_heads, working_dtype
from .points import CLAMP, horizontal, of_parts
from .score import FLOOR, definition, inverse_sinh

#: Mappings whose statistics the CPU engine reads from vectors itself (cone.h).
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
        return term_of(self.variant, self.squared)

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

    def head_parameters(self, heads: int, dtype: torch.dtype) -> Late:
        """What squared distances are multiplied with, and for penumbral r² before it, [H] each, late."""

        def make():
            own = self.working(dtype)
            square = (own.gap_factor**2).expand(heads)
            if self.variant == "umbral":
                return (square,)
            return ((own.radius * own.weight) ** 2).expand(heads), square

        return late(make)


def term_of(variant: str, squared: bool) -> str:
    """The name of the score's term."""
    return "umbral" if variant == "umbral" else "penumbral_squared" if squared else "penumbral"


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
        """|X|²; 0 too where expmap stretches a vector so far that the square of that is infinite."""
        return self.norm * self.stretch * self.stretch

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
    reader, (q, k, at) = _reader(space, on_product=False), _sides(query, key, space)
    piece = Piece(
        TERMS[space.term],
        _definition(query, key, space),
        row=late(lambda: _statistics(value_of(at), value_of(q))),
        column=late(lambda: _statistics(value_of(at), value_of(k))),
        head=space.head_parameters(query.shape[1], working_dtype(query, key)),
        reader=reader,
    )
    features = _horizontals(q, k)
    factors = late(lambda: value_of(q).stretch), late(lambda: value_of(k).stretch)
    source = Source(query, key, 1.0, features, *factors, width=query.shape[-1] - 1)
    return PairScore(*features, (piece,), partial(_points, *features), source=source)


def cone_piece(
    query: Tensor, key: Tensor, scale: float, space: ConeSpace, gate: Tensor | None = None
) -> tuple:
    """The cone score as a piece beside a dot product: it reads the host's product, scale · q·k.

    Returns:
        The piece, and the function that returns its points.
    """
    reader, (q, k, at) = _reader(space, on_product=True), _sides(query, key, space)

    def row():
        side = value_of(q)
        return *_statistics(value_of(at), side), side.stretch / scale, side.last * scale

    piece = Piece(
        TERMS[space.term + "_on_product"],
        _definition(query, key, space),
        row=late(row),
        column=late(lambda: (*_statistics(value_of(at), value_of(k)), value_of(k).stretch, value_of(k).last)),
        head=space.head_parameters(query.shape[1], working_dtype(query, key)),
        gate=gate,
        reader=reader,
    )
    return piece, partial(_points, *_horizontals(q, k))


def _sides(query, key, space):
    """Queries, keys, and the space in the working dtype, all of them late."""
    dtype = working_dtype(query, key)
    sides = (late(partial(Side.of, x, dtype, space.mapping)) for x in (query, key))
    return *sides, late(lambda: space.working(dtype))


def _statistics(space: ConeSpace, side: Side) -> tuple[Tensor, ...]:
    """The statistics of the score itself, and |X|²."""
    return *space.own_statistics(side.height), side.square


def _horizontals(q: Late, k: Late) -> tuple[Late, Late]:
    """X of queries and of keys. Engines take differences of these very numbers: a factor would be rounded."""
    return late(lambda: value_of(q).horizontal()), late(lambda: value_of(k).horizontal())


def _reader(space: ConeSpace, on_product: bool) -> Reader | None:
    """How an engine reads vectors; it does not for expmap."""
    cpp = _type(space.variant, space.mapping, space.squared, space.clamp_heights, on_product)
    return cpp and Reader(cpp, (space.gamma, space.radius))


def _type(variant: str, mapping: str, *flags: bool) -> str | None:
    """The C++ type that reads vectors."""
    flags = (variant == "penumbral", *flags)
    return (
        f"cone::Vectors<{READERS[mapping]}, {', '.join(str(int(f)) for f in flags)}>"
        if mapping in READERS
        else None
    )


@lru_cache(maxsize=64)
def alone(
    variant: str, mapping: str, squared: bool, clamp_heights: bool, gamma: float, radius: float
) -> Alone | None:
    """The cone score of a few queries, for checked numbers that hold for all heads and learn nothing."""
    cpp = _type(variant, mapping, squared, clamp_heights, False)
    head = () if variant == "umbral" else (radius**2 * (gamma if squared else gamma**2),)
    # the last one is for distances by products, of which there are none here
    return cpp and Alone(term_of(variant, squared), cpp, (gamma, radius), (*head, 1.0))


def _definition(query, key, space):
    names = {n: getattr(space, n) for n in ("variant", "mapping", "squared", "clamp_heights")}
    return partial(definition, query, key, space.gamma, space.radius, **names)


def _points(query: Late, key: Late) -> Points:
    return Points(value_of(query), value_of(key))
