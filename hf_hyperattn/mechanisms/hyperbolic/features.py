"""From head vectors to what engines see: features, statistics and points of the hyperbolic scores (see terms.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...engines.cpu import norms
from ...engines.halves import unrounded
from ...engines.late import Late, late, value_of
from ...engines.score import TERMS, PairScore, Piece, Points, Reader, Source, repeat_heads, working_dtype
from .points import direction_and_norm, half_radius, shortest
from .score import definition


@dataclass(frozen=True)
class HyperbolicSpace:
    """The distance, what vectors are scaled with, and c and τ per query head: both [H] or both [1]."""

    distance: str
    scale: float
    curvature: Tensor
    temperature: Tensor

    @property
    def beta(self) -> Tensor:
        """What the term multiplies with."""
        c, tau = self.curvature, self.temperature
        return 1 / (tau * c.sqrt()) if self.distance == "geodesic" else 4 / (c * tau)

    def statistics(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """sinh a and cosh a, [B, H, N]; the heads stay shared where the curvature is one number."""
        heads = self.curvature.shape[0]
        a = half_radius(repeat_heads(norm, heads) if heads > 1 else norm, self.curvature[:, None])
        return torch.sinh(a), torch.cosh(a)

    def to(self, dtype: torch.dtype) -> HyperbolicSpace:
        """The space with curvature and temperature in this dtype, and of one shape."""
        c, tau = torch.broadcast_tensors(self.curvature.to(dtype), self.temperature.to(dtype))
        return replace(self, curvature=c, temperature=tau)


def hyperbolic_score(query: Tensor, key: Tensor, space: HyperbolicSpace) -> PairScore:
    """The hyperbolic score by itself: the features are directions.

    Args:
        query: [B, H, N, d], unscaled.
        key: [B, Hkv, M, d].
        space: distance and parameters, checked.
    """
    query, key = unrounded(query), unrounded(key)
    q, k, space, heads = *_sides(query, key, space), query.shape[1]
    piece = Piece(
        TERMS[space.distance],
        _definition(query, key, space),
        row=late(lambda: space.statistics(value_of(q).norm)),
        column=late(lambda: space.statistics(value_of(k).norm)),
        head=(space.beta.expand(heads),),
        features=_features(query, key, space),
        reader=_reader(space, on_product=False),
    )
    features = tuple(late(partial(_directions, side)) for side in (q, k))
    factors = late(lambda: 1 / value_of(q).norm), late(lambda: space.scale / value_of(k).norm)
    source = Source(query, key, space.scale, features, *factors)
    return PairScore(*features, (piece,), partial(_points, q, k), source=source)


def hyperbolic_piece(
    query: Tensor, key: Tensor, scale: float, space: HyperbolicSpace, gate: Tensor | None = None
) -> tuple[Piece, Callable[[], Points]]:
    """The hyperbolic score as a piece beside a dot product: it reads the host's product, scale · q·k.

    Returns:
        The piece, and the function that returns its points.
    """
    q, k, space, heads = *_sides(query, key, space), query.shape[1]
    piece = Piece(
        TERMS[space.distance + "_on_product"],
        _definition(query, key, space),
        row=late(lambda: (*space.statistics(value_of(q).norm), space.scale**2 / scale / value_of(q).norm)),
        column=late(lambda: (*space.statistics(value_of(k).norm), 1 / value_of(k).norm)),
        head=(space.beta.expand(heads),),
        gate=gate,
        features=_features(query, key, space),
        reader=_reader(space, on_product=True),
    )
    return piece, partial(_points, q, k)


@dataclass(frozen=True)
class Side:
    """What is needed of queries or keys: norms of scale · x [B, H or Hkv, L], and directions, made when asked for."""

    norm: Tensor
    directions: Tensor | Late

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype, scale: float) -> Side:
        norm = (scale * norms(x, dtype)).clamp_min(shortest(dtype))
        return cls(norm, late(lambda: direction_and_norm(x.to(dtype), scale)[0]))


def _sides(
    query: Tensor, key: Tensor, space: HyperbolicSpace
) -> tuple[Side | Late, Side | Late, HyperbolicSpace]:
    dtype = working_dtype(query, key)
    return *(late(partial(Side.of, x, dtype, space.scale)) for x in (query, key)), space.to(dtype)


def _directions(side: Side | Late) -> Tensor:
    return value_of(value_of(side).directions)


def _points(q: Side | Late, k: Side | Late) -> Points:
    return Points(_directions(q), _directions(k))


def _reader(space: HyperbolicSpace, on_product: bool) -> Reader:
    """How an engine reads vectors."""
    return Reader(f"hyperbolic::Vectors<{on_product:d}>", (space.curvature, space.scale))


def squared_lorentz_features(query: Tensor, key: Tensor, space: HyperbolicSpace) -> tuple[Tensor, Tensor]:
    """Vectors whose plain dot product is the squared Lorentz score, for what needs a score linear in the keys:

        S = -β (u_q + u_k + 2 u_q u_k - 2 p_q p_k cos θ)        u = sinh² a,  p = sinh a cosh a,  β = 4/(cτ)

    Args:
        query: [B, H, N, d], unscaled.
        key: [B, Hkv, M, d]; its heads are repeated where the curvature differs by query head.
        space: parameters, checked; its `distance` is taken to be "squared_lorentz".

    Returns:
        [B, H, N, d + 2] and [B, Hkv or H, M, d + 2] in the working dtype. Their product loses distances that are
        small against both points' radii, as every product form does.
    """
    dtype = working_dtype(query, key)
    space = replace(space, distance="squared_lorentz").to(dtype)
    (q, norm_q), (k, norm_k) = (direction_and_norm(x.to(dtype), space.scale) for x in (query, key))
    (sinh_q, cosh_q), (sinh_k, cosh_k) = (space.statistics(n) for n in (norm_q, norm_k))
    beta = space.beta.expand(q.shape[1])[:, None, None]
    one, u_k = torch.ones_like(sinh_q)[..., None], sinh_k.square()[..., None]
    q = torch.cat([(2 * sinh_q * cosh_q)[..., None] * q, -sinh_q.square()[..., None], -one], dim=-1)
    k = (sinh_k * cosh_k)[..., None] * repeat_heads(k, sinh_k.shape[1])
    return beta * q, torch.cat([k, 1 + 2 * u_k, u_k], dim=-1)


def _features(query: Tensor, key: Tensor, space: HyperbolicSpace) -> Callable | None:
    """What `Piece.features` returns; the geodesic distance has none."""
    return (
        partial(squared_lorentz_features, query, key, space) if space.distance == "squared_lorentz" else None
    )


def with_own_keys(score: PairScore, heads: int) -> PairScore:
    """The same score with keys repeated for every query head, for values that differ by query head."""
    if score.kv_heads == heads:
        return score
    pieces = tuple(replace(p, column=tuple(repeat_heads(t, heads) for t in p.column)) for p in score.pieces)

    def points():
        found = score.points()
        return replace(found, key=repeat_heads(found.key, heads))

    points = None if score.points is None else points
    return replace(score, key=repeat_heads(score.key, heads), pieces=pieces, points=points)


def _definition(query: Tensor, key: Tensor, space: HyperbolicSpace) -> Callable[[], Tensor]:
    parameters = space.curvature, space.temperature
    return partial(definition, query, key, *parameters, scale=space.scale, distance=space.distance)
