"""The Lorentz model of curvature -c: points x of R^(d+1) with ⟨x,x⟩_L = -1/c and x_0 > 0 (the hyperboloid).

The time coordinate comes first: ⟨x,y⟩_L = -x_0 y_0 + x_1 y_1 + ... + x_d y_d. Points are [..., d+1]; c > 0 as in
`poincare`, and c = 0 has no hyperboloid. Tangent vectors at the origin (1/√c, 0) are given by their d space
coordinates; expmap0(u) lies at distance |u|, so u is twice the tangent vector of the Poincaré ball.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .scalars import asinhc, norm, precise, root, sinhc, square, working


def inner(x: Tensor, y: Tensor) -> Tensor:
    """⟨x,y⟩_L, [...]."""
    x, y, _ = working(0.0, x, y)
    return (x[..., 1:] * y[..., 1:]).sum(-1) - x[..., 0] * y[..., 0]


def lift(space: Tensor, c: Tensor | float) -> Tensor:
    """The point [..., d+1] over the space coordinates [..., d]: x_0 = √(1/c + |x_s|²)."""
    space, c = working(c, space)
    return torch.cat([(1 / c + square(space)).sqrt()[..., None], space], dim=-1)


def project(x: Tensor, c: Tensor | float) -> Tensor:
    """`x` [..., d+1] put back onto the hyperboloid by its time coordinate."""
    return lift(x[..., 1:], c)


def expmap0(u: Tensor, c: Tensor | float) -> Tensor:
    """(cosh(√c|u|)/√c, sinh(√c|u|) u/(√c|u|)), [..., d+1], for the tangent vector u [..., d] at the origin."""
    u, c = working(c, u)
    return lift(u * sinhc(c * square(u))[..., None], c)


def logmap0(x: Tensor, c: Tensor | float) -> Tensor:
    """asinh(√c|x_s|) x_s/(√c|x_s|), [..., d]."""
    x, c = working(c, x)
    space = x[..., 1:]
    return space * asinhc(c * square(space))[..., None]


def _half_chord(x: Tensor, y: Tensor, c: Tensor | float) -> Tensor:
    """sinh(√c d/2)/√c, [...], by the points' images in the Poincaré ball: |x - y|_L itself cancels far out."""
    up_x, up_y = 1 + root(c) * x[..., 0], 1 + root(c) * y[..., 0]
    apart = x[..., 1:] / up_x[..., None] - y[..., 1:] / up_y[..., None]
    return norm(apart) * (up_x * up_y).sqrt() / 2


def distance(x: Tensor, y: Tensor, c: Tensor | float) -> Tensor:
    """The geodesic distance [...] = arcosh(-c⟨x,y⟩_L)/√c, from differences. Gradients are finite, 0 at x = y."""
    x, y, c = working(c, x, y)
    half = _half_chord(x, y, c)
    return 2 * half * asinhc(c * half.square())


def squared_distance(x: Tensor, y: Tensor, c: Tensor | float) -> Tensor:
    """The squared Lorentz distance [...] = ⟨x-y,x-y⟩_L = -2/c - 2⟨x,y⟩_L, from differences."""
    x, y, c = working(c, x, y)
    return 4 * _half_chord(x, y, c).square()


def expmap(x: Tensor, u: Tensor, c: Tensor | float) -> Tensor:
    """The point [..., d+1] reached from x along u [..., d+1], a tangent vector at x: ⟨x,u⟩_L = 0."""
    x, u, c = working(c, x, u)
    length = c * inner(u, u).clamp_min(0.0)
    # cosh s = 1 + s²/2 · (sinh(s/2)/(s/2))²
    cosh = 1 + length / 2 * sinhc(length / 4).square()
    return project(cosh[..., None] * x + sinhc(length)[..., None] * u, c)


def logmap(x: Tensor, y: Tensor, c: Tensor | float) -> Tensor:
    """The tangent vector [..., d+1] at x that leads to y."""
    x, y, c = working(c, x, y)
    half = c * _half_chord(x, y, c).square()
    # y - cosh(s) x has length sinh(s)/√c, with s = √c d and cosh s = 1 + 2·half
    toward = y - x - 2 * half[..., None] * x
    scale = asinhc(half) / (1 + half).sqrt()
    return toward * scale[..., None]


def midpoint(x: Tensor, c: Tensor | float, weights: Tensor | None = None) -> Tensor:
    """Σ w x, normalised to the hyperboloid: the Einstein midpoint. Shapes as in `poincare.midpoint`."""
    if weights is None:
        return midpoint(x, c, x.new_ones(1, x.shape[-2])).squeeze(-2)
    x, c = working(c, x)
    dtype, weights = x.dtype, precise(weights)
    total = weights @ project(precise(x), c)
    # By the reversed triangle inequality c|⟨s,s⟩_L| >= (Σ w)², which rounding may break
    length = torch.maximum(-c * inner(total, total), weights.sum(-1).square()).sqrt()
    return project(total / length[..., None], c).to(dtype)
