"""Cone attention as the paper has it (Coneheads, arXiv 2306.00392, sections 3 and 4; math in docs/cone.md).

The score of a pair is minus the height of the lowest common ancestor of its cones, times gamma. With D the Euclidean
distance of the horizontal parts, and gamma and r per head:

    umbral:     S = -gamma · max(h_q, h_k, (D / sinh r + h_q + h_k) / 2)
    penumbral:  a = sqrt(r² - h_q²), b = sqrt(r² - h_k²)
                D <= a + b:  H² = max(h_q², h_k², r² - ((a + b - D) / 2)²)
                D >  a + b:  H² = ((D² + h_k² - h_q²) / (2D))² + h_q²
                S = -gamma · H²   (squared, as released)   or   -gamma · H

Points (also Shadow Cones, arXiv 2305.15215): a vector x of dimension d becomes a horizontal part X (d-1 numbers) and a
height h > 0 taken from its last coordinate. In every mapping X is x_1..x_{d-1} times one number per point, the
*stretch*, so that X_q · X_k = stretch_q · stretch_k · (q·k - q_d k_d): engines can take it from the host's own product.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ...engines.score import euclidean_distances, repeat_heads, working_dtype
from ...geometry.scalars import at_least, at_most

Mapping = Literal["xi", "psi", "expmap"]
MAPPINGS = get_args(Mapping)
EXPONENT_LIMIT = 10.0  # of xi, keeps heights within e^±10
NORM_LIMIT = 30.0  # of expmap, longer vectors count as this long
SERIES_LIMIT = 0.04  # of expmap: below this s², the power series is exact to 1e-14
CLAMP = 1 - 1e-3  # clamp_heights keeps h <= CLAMP * r
FLOOR = 1e-6  # of (r² - h²) / r² under the roots, where the sigmoid saturates


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
    """Dense logits [B, H, N, M] of checked arguments, from differences of points.

    Args:
        query: [B, H, N, d].
        key: [B, Hkv, M, d], Hkv dividing H.
        gamma, radius: [H] or [1], positive.
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
    return -gamma * torch.sqrt(
        at_least(height_squared, torch.finfo(dtype).tiny)
    )  # a finite slope at height 0


def inverse_sinh(r: Tensor) -> Tensor:
    """1 / sinh r, which goes to 0 without overflow for large r."""
    return 2 * torch.exp(-r) / -torch.expm1(-2 * r)


def umbral_height(distance: Tensor, hq: Tensor, hk: Tensor, r: Tensor) -> Tensor:
    """Height of the lowest point whose umbral cone holds both points."""
    return torch.maximum(torch.maximum(hq, hk), (distance * inverse_sinh(r) + hq + hk) / 2)


def penumbral_height_squared(distance: Tensor, hq: Tensor, hk: Tensor, r: Tensor) -> Tensor:
    """Squared height of the lowest point whose penumbral cone holds both points; heights are below r."""
    a, b = half_width(hq, r), half_width(hk, r)
    inside = torch.maximum(
        torch.maximum(hq**2, hk**2), r**2 - (at_least(a + b - distance, 0.0) / 2) ** 2
    )
    apart = torch.where(
        distance > a + b, distance, torch.ones_like(distance)
    )  # no 0/0 in the branch not taken
    outside = ((apart**2 + hk**2 - hq**2) / (2 * apart)) ** 2 + hq**2
    return torch.where(distance > a + b, outside, inside)


def half_width(h: Tensor, r: Tensor) -> Tensor:
    """sqrt(r² - h²): half the width of a penumbral cone's base on the boundary."""
    return torch.sqrt(torch.maximum(r**2 - h**2, FLOOR * r**2))


def height_and_stretch(
    x: Tensor, mapping: str, radius: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """Height h and stretch of each vector.

    Args:
        x: [..., d], float32 or float64.
        mapping: "xi": h = stretch = exp(x_d / d). "psi": h = stretch = r·sigmoid(x_d).
            "expmap": h = 1 / (cosh s - (x_d/s) sinh s) with s = |x|, stretch = h·sinh(s)/s.
        radius: r, broadcastable to [...]; only psi uses it.

    Returns:
        h and stretch, each [...].
    """
    side = x[..., :-1].square().sum(-1) if mapping == "expmap" else None
    return of_parts(x[..., -1], side, x.shape[-1], mapping, radius)


def of_parts(
    last: Tensor, side: Tensor | None, dim: int, mapping: str, radius: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same from x_d, |x_1..x_{d-1}|² (only expmap reads it) and d."""
    if mapping == "xi":
        h = xi_height(last, dim)
        return h, h
    if mapping == "psi":
        h = radius * torch.sigmoid(last)
        return h, h
    assert side is not None
    return _expmap(side, last)


def xi_height(last: Tensor, dim: int) -> Tensor:
    """exp(x_d / d), with the exponent kept within EXPONENT_LIMIT."""
    return torch.exp(at_most(at_least(last / dim, -EXPONENT_LIMIT), EXPONENT_LIMIT))


def _expmap(side: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The exponential map at height 1: h = 1 / (cosh s - t sinh s) with t = x_d/s, and stretch = h sinh(s)/s.

    `side` is |x_1..x_{d-1}|². A vector longer than NORM_LIMIT counts as one of that length. Short vectors go by the
    power series in s², which has a gradient at the origin.
    """
    square = side + last.square()
    short = square < SERIES_LIMIT
    # what a branch is not taken for must not reach it: infinite there, it would make the other's gradient NaN
    h_short, stretch_short = _expmap_series(
        torch.where(short, square, 0.0), torch.where(short, last, 0.0)
    )
    h_long, stretch_long = _expmap_factored(
        torch.where(short, 1.0, side), torch.where(short, 0.0, last)
    )
    return torch.where(short, h_short, h_long), torch.where(short, stretch_short, stretch_long)


def _expmap_series(square: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    cosh = 1 + square / 2 * (1 + square / 12 * (1 + square / 30 * (1 + square / 56)))
    sinhc = 1 + square / 6 * (1 + square / 20 * (1 + square / 42 * (1 + square / 72)))
    h = 1 / (cosh - last * sinhc)
    return h, h * sinhc


def _expmap_factored(side: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """exp(-s) is factored out: cosh s - t sinh s = e^s/2 · [(1 - t) + (1 + t) e^-2s].

    Where x_d is nearly s, 1 - t cancels and is taken as side / (s (s + x_d)).
    """
    norm = torch.sqrt(side + last.square())
    s, t = at_most(norm, NORM_LIMIT), last / norm
    one_minus_t = torch.where(last > 0, side / (norm * (norm + last.abs())), 1 - t)
    bracket = one_minus_t + (1 + t) * torch.exp(-2 * s)
    return 2 * torch.exp(-s) / bracket, -torch.expm1(-2 * s) / (norm * bracket)


def horizontal(x: Tensor, stretch: Tensor) -> Tensor:
    """The horizontal part X, [..., d-1]."""
    return x[..., :-1] * stretch[..., None]


def clamp_height(h: Tensor, radius: Tensor | float) -> Tensor:
    """Heights kept below the radius, as the penumbral score needs them: h <= r·(1 - 1e-3)."""
    return torch.minimum(
        h, torch.as_tensor(radius * CLAMP, dtype=h.dtype, device=h.device).expand_as(h)
    )
