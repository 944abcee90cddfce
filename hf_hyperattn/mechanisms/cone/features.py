"""From head vectors to what engines see: features, statistics and points of the cone scores (see terms.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...engines.score import TERMS, PairScore, Piece, Points, repeat_heads, working_dtype
from .points import CLAMP, height_and_stretch, horizontal
from .score import FLOOR, definition, inverse_sinh


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

    @property
    def unit(self) -> Tensor:
        """The length that psi scales with; other mappings know no radius."""
        return self.radius if self.mapping == "psi" else torch.ones_like(self.radius)

    @property
    def weight(self) -> Tensor:
        """By how much penumbral lengths are stretched so that gamma becomes 1."""
        return self.gamma.sqrt() if self.squared else self.gamma

    @property
    def height_factor(self) -> Tensor:
        return self.unit * (self.gamma / 2 if self.variant == "umbral" else self.weight)

    @property
    def gap_factor(self) -> Tensor:
        umbral = self.variant == "umbral"
        return self.unit * (self.gamma / 2 * inverse_sinh(self.radius) if umbral else self.weight)

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


def cone_score(query: Tensor, key: Tensor, space: ConeSpace) -> PairScore:
    """The cone score by itself: the features are the horizontal parts.

    Args:
        query: [B, H, N, d], unscaled.
        key: [B, Hkv, M, d].
        space: variant and parameters, checked.
    """
    q, k, space = _working(query, key, space)
    (hq, xq), (hk, xk) = _points(q, space.mapping), _points(k, space.mapping)
    square = space.gap_factor**2
    norms = per_head(xq.square().sum(-1), square), per_head(xk.square().sum(-1), square)
    piece = Piece(
        TERMS[space.term],
        _definition(query, key, space),
        row=(*space.own_statistics(hq), norms[0]),
        column=(*space.own_statistics(hk), norms[1]),
        head=space.head_parameters(q.shape[1]),
    )
    return PairScore(xq * square[:, None, None], xk, (piece,), partial(_gap_points, q, k, space))


def cone_piece(
    query: Tensor, key: Tensor, scale: float, space: ConeSpace, gate: Tensor | None = None
) -> tuple:
    """The cone score as a piece beside a dot product: it reads the host's product, scale · q·k.

    Returns:
        The piece, and the function that returns its points.
    """
    q, k, space = _working(query, key, space)
    (hq, stretch_q), (hk, stretch_k) = (height_and_stretch(x, space.mapping) for x in (q, k))
    square = space.gap_factor**2
    norm_q, norm_k = (_side(x) * stretch.square() for x, stretch in ((q, stretch_q), (k, stretch_k)))
    piece = Piece(
        TERMS[space.term + "_on_product"],
        _definition(query, key, space),
        row=(
            *space.own_statistics(hq),
            per_head(norm_q, square),
            per_head(stretch_q, square / scale),
            q[..., -1] * scale,
        ),
        column=(*space.own_statistics(hk), per_head(norm_k, square), stretch_k, k[..., -1]),
        head=space.head_parameters(q.shape[1]),
        gate=gate,
    )
    return piece, partial(_gap_points, q, k, space)


def _working(query, key, space):
    dtype = working_dtype(query, key)
    gamma, radius = torch.broadcast_tensors(space.gamma.to(dtype), space.radius.to(dtype))
    return query.to(dtype), key.to(dtype), replace(space, gamma=gamma, radius=radius)


def _definition(query, key, space):
    names = {n: getattr(space, n) for n in ("variant", "mapping", "squared", "clamp_heights")}
    return partial(definition, query, key, space.gamma, space.radius, **names)


def _side(x: Tensor) -> Tensor:
    """|x_1 .. x_{d-1}|²"""
    return x[..., :-1].square().sum(-1)


def _points(x: Tensor, mapping: str) -> tuple[Tensor, Tensor]:
    """Height and horizontal part at unit scale."""
    height, stretch = height_and_stretch(x, mapping)
    return height, horizontal(x, stretch)


def _gap_points(q: Tensor, k: Tensor, space: ConeSpace) -> Points:
    return Points(
        _points(q, space.mapping)[1], _points(k, space.mapping)[1], space.gap_factor.expand(q.shape[1])
    )
