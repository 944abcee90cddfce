"""Define cone attention as published (Coneheads, arXiv 2306.00392, sections 3 and 4).

Here you learn the formulas of the scores and of the points; docs/cone.md derives them.

The score of a pair is minus the height of the lowest common ancestor of its cones, times gamma. D is
the Euclidean distance of the horizontal parts. Each head has its own gamma and r:

    umbral:     S = -gamma · max(h_q, h_k, (D / sinh r + h_q + h_k) / 2)
    penumbral:  a = sqrt(r² - h_q²), b = sqrt(r² - h_k²)
                D <= a + b:  H² = max(h_q², h_k², r² - ((a + b - D) / 2)²)
                D >  a + b:  H² = ((D² + h_k² - h_q²) / (2D))² + h_q²
                S = -gamma · H²   (squared, as released)   or   -gamma · H

Points (also in Shadow Cones, arXiv 2305.15215): a vector x of dimension d becomes a horizontal part
X (d - 1 numbers) and a height h > 0. The height comes from the last coordinate. In every mapping, X
is x_1..x_{d-1} times one number per point, the *stretch*. Therefore engines can compute X_q · X_k
from the layer's own product: stretch_q · stretch_k · (q·k - q_d k_d).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ...engines.score import euclidean_distances, repeat_heads, working_dtype
from ...geometry.scalars import at_least, at_most

Mapping = Literal["xi", "psi", "expmap"]
MAPPINGS = get_args(Mapping)
#: Mapping xi: limit of the exponent, which keeps heights within e^±10.
EXPONENT_LIMIT = 10.0
#: Mapping expmap: longer vectors count as this long.
NORM_LIMIT = 30.0
#: Mapping expmap: below this s², the power series is exact to 1e-14.
SERIES_LIMIT = 0.04
#: `clamp_heights` keeps h <= CLAMP * r.
CLAMP = 1 - 1e-3
#: Lower bound of (r² - h²) / r² under a root. It acts where the sigmoid of psi saturates.
FLOOR = 1e-6


def definition(
    query: Tensor,
    key: Tensor,
    gamma: Tensor,
    radius: Tensor,
    *,
    variant: str,
    mapping: str,
    squared: bool,
    clamp_heights: bool,
) -> Tensor:
    """Return dense logits, computed from differences of points.

    Arguments are not checked.

    Args:
        query: Queries [B, H, N, d].
        key: Keys [B, Hkv, M, d]; Hkv divides H.
        gamma, radius: Parameters [H] or [1], positive.
        variant: "umbral" or "penumbral".
        mapping: "xi", "psi" or "expmap".
        squared: Penumbral only: squared heights instead of heights.
        clamp_heights: Penumbral only: clamp heights below the radius.

    Returns:
        Logits [B, H, N, M] in the working dtype.
    """
    dtype = working_dtype(query, key)
    q, k = query.to(dtype), repeat_heads(key.to(dtype), query.shape[1])
    gamma, r = gamma.to(dtype)[:, None, None], radius.to(dtype)[:, None, None]
    hq, stretch_q = height_and_stretch(q, mapping, r[..., 0])
    hk, stretch_k = height_and_stretch(k, mapping, r[..., 0])
    distance = euclidean_distances(horizontal(q, stretch_q), horizontal(k, stretch_k))
    if variant == "umbral":
        return -gamma * umbral_height(distance, hq[..., None], hk[..., None, :], r)
    if clamp_heights:
        hq, hk = clamp_height(hq, r[..., 0]), clamp_height(hk, r[..., 0])
    height_squared = penumbral_height_squared(distance, hq[..., None], hk[..., None, :], r)
    if squared:
        return -gamma * height_squared
    # The lower bound gives the root a finite slope at height 0.
    return -gamma * torch.sqrt(at_least(height_squared, torch.finfo(dtype).tiny))


def inverse_sinh(r: Tensor) -> Tensor:
    """Return 1 / sinh r. For large r it goes to 0 without overflow."""
    return 2 * torch.exp(-r) / -torch.expm1(-2 * r)


def umbral_height(distance: Tensor, hq: Tensor, hk: Tensor, r: Tensor) -> Tensor:
    """Return the height of the lowest point whose umbral cone contains both points.

    Args:
        distance: D [B, H, N, M].
        hq, hk: Heights of queries [B, H, N, 1] and of keys [B, H, 1, M].
        r: Radius, broadcastable.
    """
    return torch.maximum(torch.maximum(hq, hk), (distance * inverse_sinh(r) + hq + hk) / 2)


def penumbral_height_squared(distance: Tensor, hq: Tensor, hk: Tensor, r: Tensor) -> Tensor:
    """Return the squared height of the lowest point whose penumbral cone contains both points.

    Arguments are as in `umbral_height`. Heights must be below r.
    """
    a, b = half_width(hq**2, r**2), half_width(hk**2, r**2)
    inside = torch.maximum(
        torch.maximum(hq**2, hk**2), r**2 - (at_least(a + b - distance, 0.0) / 2) ** 2
    )
    # A denominator of 1 where this branch is not taken. Its 0/0 would make the gradient NaN.
    apart = torch.where(distance > a + b, distance, torch.ones_like(distance))
    outside = ((apart**2 + hk**2 - hq**2) / (2 * apart)) ** 2 + hq**2
    return torch.where(distance > a + b, outside, inside)


def half_width(height_squared: Tensor, radius_squared: Tensor) -> Tensor:
    """Return sqrt(r² - h²), half the width of a penumbral cone's base on the boundary."""
    # The lower bound keeps the slope of the root finite if the height reaches the radius.
    return torch.sqrt(torch.maximum(radius_squared - height_squared, FLOOR * radius_squared))


def height_and_stretch(
    x: Tensor, mapping: str, radius: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the height h and the stretch of each vector.

    Args:
        x: Vectors [..., d], float32 or float64.
        mapping: "xi": h = stretch = exp(x_d / d). "psi": h = stretch = r·sigmoid(x_d).
            "expmap": h = 1 / (cosh s - (x_d/s) sinh s) with s = |x|, stretch = h·sinh(s)/s.
        radius: r, broadcastable to [...]; only psi uses it. None (default): 1.

    Returns:
        h and stretch, each [...].
    """
    # Only expmap reads the sum of squares.
    side = x[..., :-1].square().sum(-1) if mapping == "expmap" else None
    return height_and_stretch_from_parts(x[..., -1], side, x.shape[-1], mapping, radius)


def height_and_stretch_from_parts(
    last: Tensor, side: Tensor | None, dim: int, mapping: str, radius: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the height and the stretch of vectors that are given by two numbers.

    Args:
        last: Last coordinate x_d, [...].
        side: |x_1..x_{d-1}|² [...]; only expmap reads it.
        dim: Dimension d of the vectors.
        mapping, radius: As in `height_and_stretch`.
    """
    if mapping == "xi":
        h = torch.exp(at_most(at_least(last / dim, -EXPONENT_LIMIT), EXPONENT_LIMIT))
        return h, h
    if mapping == "psi":
        h = torch.sigmoid(last)
        h = h if radius is None else radius * h
        return h, h
    assert side is not None
    return _map_exponentially(side, last)


def _map_exponentially(side: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return height and stretch of the exponential map at height 1.

    h = 1 / (cosh s - t sinh s) with t = x_d/s, and stretch = h sinh(s)/s. A vector longer than
    NORM_LIMIT counts as one of that length.

    Args:
        side: |x_1..x_{d-1}|², [...].
        last: x_d, [...].
    """
    square = side + last.square()
    short = square < SERIES_LIMIT
    # Short vectors use the power series in s², which has a gradient at the origin. Each branch gets
    # harmless arguments where the other one is used. Its infinite gradient times 0 would be NaN.
    h_short, stretch_short = _expmap_series(
        torch.where(short, square, 0.0), torch.where(short, last, 0.0)
    )
    h_long, stretch_long = _expmap_factored(
        torch.where(short, 1.0, side), torch.where(short, 0.0, last)
    )
    return torch.where(short, h_short, h_long), torch.where(short, stretch_short, stretch_long)


def _expmap_series(square: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return height and stretch of short vectors, from s² and x_d."""
    # Taylor series of cosh s and sinh(s)/s in s².
    cosh = 1 + square / 2 * (1 + square / 12 * (1 + square / 30 * (1 + square / 56)))
    sinhc = 1 + square / 6 * (1 + square / 20 * (1 + square / 42 * (1 + square / 72)))
    h = 1 / (cosh - last * sinhc)
    return h, h * sinhc


def _expmap_factored(side: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return height and stretch of longer vectors, without overflow.

    exp(-s) is factored out: cosh s - t sinh s = e^s/2 · [(1 - t) + (1 + t) e^-2s].
    """
    norm = torch.sqrt(side + last.square())
    s, t = at_most(norm, NORM_LIMIT), last / norm
    # If x_d is nearly s, 1 - t would cancel. It equals side / (s (s + x_d)).
    one_minus_t = torch.where(last > 0, side / (norm * (norm + last.abs())), 1 - t)
    bracket = one_minus_t + (1 + t) * torch.exp(-2 * s)
    return 2 * torch.exp(-s) / bracket, -torch.expm1(-2 * s) / (norm * bracket)


def horizontal(x: Tensor, stretch: Tensor) -> Tensor:
    """Return the horizontal part X, [..., d - 1]."""
    return x[..., :-1] * stretch[..., None]


def clamp_height(h: Tensor, radius: Tensor) -> Tensor:
    """Return heights clamped to r·(1 - 1e-3), because the penumbral score needs h < r."""
    return torch.minimum(h, CLAMP * radius)
