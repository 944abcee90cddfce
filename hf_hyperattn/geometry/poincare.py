"""The Poincaré ball of curvature -c: points x with √c|x| < 1 (Ganea et al., Hyperbolic Neural Networks, 1805.09112).

Points are [..., d]; c >= 0 is a float or a tensor that broadcasts to [...], and c = 0 is the limit: flat space with
the metric 2|dx|. Everything is evaluated from differences, never from 1 - cos or arcosh, so that near points keep
their relative accuracy. Half precisions are computed in float32 and come back so. The tangent space at the origin is
scaled as in that paper: expmap0(v) lies at distance 2|v| from the origin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .scalars import artanhc, asinhc, at_least, norm, precise, root, square, tanhc, working

LIMIT = 1 - 1e-5  # points are kept at √c|x| <= LIMIT


def project(x: Tensor, c: Tensor | float, limit: float = LIMIT) -> Tensor:
    """`x` [..., d], drawn in along its ray where √c|x| > limit; finite for every finite x."""
    x, c = working(c, x)
    reach = c * square(x)
    outside = reach > limit**2
    # √c is taken only where it is used: at c = 0 it has no gradient
    return (
        x * torch.where(outside, limit * torch.where(outside, reach, 1.0).rsqrt(), 1.0)[..., None]
    )


def gap(x: Tensor, c: Tensor | float) -> Tensor:
    """1 - c|x|², [...], kept at one rounding step or more: half the inverse of the conformal factor λ_x = 2/gap."""
    x, c = working(c, x)
    return at_least(1 - c * square(x), torch.finfo(x.dtype).eps)


def expmap0(v: Tensor, c: Tensor | float) -> Tensor:
    """tanh(√c|v|) v/(√c|v|): the point [..., d] that the tangent vector v at the origin leads to, kept in LIMIT."""
    v, c = working(c, v)
    return project(v * tanhc(c * square(v))[..., None], c)


def logmap0(x: Tensor, c: Tensor | float) -> Tensor:
    """artanh(√c|x|) x/(√c|x|): the tangent vector [..., d] at the origin that leads to x."""
    x, c = working(c, x)
    return x * artanhc(c * square(x))[..., None]


def mobius_add(x: Tensor, y: Tensor, c: Tensor | float) -> Tensor:
    """x ⊕ y, [..., d] (Ganea et al., equation 4), written from the sum x + y:

    ((1 - c|x|²)(x + y) + c|x + y|² x) / ((1 - c|x|²)(1 - c|y|²) + c|x + y|²).

    With -x for x nothing cancels as y nears x: (-x) ⊕ y keeps its relative accuracy.
    """
    x, y, c = working(c, x, y)
    total, room = x + y, gap(x, c)
    far = c * square(total)
    return (room[..., None] * total + far[..., None] * x) / (room * gap(y, c) + far)[..., None]


def _chord(x: Tensor, y: Tensor, c: Tensor | float) -> Tensor:
    """|x - y|² / ((1 - c|x|²)(1 - c|y|²)) = sinh²(√c d/2) / c, [...]."""
    return square(x - y) / (gap(x, c) * gap(y, c))


def distance(x: Tensor, y: Tensor, c: Tensor | float) -> Tensor:
    """The geodesic distance [...] of points x and y [..., d]:

    d = (2/√c) artanh(√c|(-x) ⊕ y|) = (2/√c) asinh(√c|x - y| / √((1 - c|x|²)(1 - c|y|²))).

    Gradients are finite everywhere, and 0 at x = y. Points on or beyond the rim count as just inside it.
    """
    x, y, c = working(c, x, y)
    chord = norm(x - y) / (gap(x, c) * gap(y, c)).sqrt()
    return 2 * chord * asinhc(c * chord.square())


def expmap(x: Tensor, v: Tensor, c: Tensor | float) -> Tensor:
    """The point [..., d] reached from x along the tangent vector v at x; their distance is λ_x|v|."""
    x, v, c = working(c, x, v)
    w = v / gap(x, c)[..., None]
    return project(mobius_add(x, w * tanhc(c * square(w))[..., None], c), c)


def logmap(x: Tensor, y: Tensor, c: Tensor | float) -> Tensor:
    """The tangent vector [..., d] at x that leads to y."""
    x, y, c = working(c, x, y)
    chord = c * _chord(x, y, c)
    # artanh(√c|z|)/(√c|z|) of z = (-x) ⊕ y, written in the chord, which does not saturate as |z| nears the rim
    scale = gap(x, c) * asinhc(chord) * (1 + chord).sqrt()
    return scale[..., None] * mobius_add(-x, y, c)


def midpoint(x: Tensor, c: Tensor | float, weights: Tensor | None = None) -> Tensor:
    """The Einstein midpoint of points of the ball, which is the normalised Σ w x of the Lorentz form.

    In Klein coordinates k = 2x/(1 + c|x|²) it is Σ w γ k / Σ w γ, with γ = (1 + c|x|²)/(1 - c|x|²).

    Args:
        x: [..., n, d], the points.
        c: broadcasts to [..., n] and to [..., m], so it has one value for all n.
        weights: [..., m, n], >= 0 and not all 0 in a row: one midpoint a row; they need not sum to 1. None: equal.
            Sums are float64, since what is left of them after normalising is a small part of them far out.

    Returns:
        [..., m, d]; without weights, [..., d].
    """
    if weights is None:
        return midpoint(x, c, x.new_ones(1, x.shape[-2])).squeeze(-2)
    x, c = working(c, x)
    dtype, x, weights = x.dtype, precise(x), precise(weights)
    room = gap(x, c)
    t, s = (weights @ (2 / room - 1)[..., None]).squeeze(-1), weights @ (2 * x / room[..., None])
    # By the reversed triangle inequality t² - c|s|² >= (Σ w)², which rounding may break
    height = torch.maximum(t.square() - c * square(s), weights.sum(-1).square()).sqrt()
    return (s / (t + height)[..., None]).to(dtype)


def depth(x: Tensor, c: Tensor | float) -> Tensor:
    """√c|x| / (1 - √c|x|), [...]: 0 at the origin, growing without bound to the rim.

    A proxy of depth in a hierarchy. It grows with the distance from the origin: with ρ = √c d(0, x) it is
    (e^ρ - 1)/2. At c = 1 it is |x|/(1 - |x|).
    """
    x, c = working(c, x)
    reach = root(c) * norm(x)
    return reach / at_least(1 - reach, torch.finfo(x.dtype).eps)


def angular_similarity(x: Tensor, y: Tensor) -> Tensor:
    """The cosine [...] of the angle between x and y [..., d] as seen from the origin; 0 where either is the origin.

    The ball is conformal at the origin, so it is the same for points and tangent vectors, and at every c.
    """
    x, y, _ = working(0.0, x, y)
    nx, ny = norm(x), norm(y)
    unit_x = x / torch.where(nx > 0, nx, 1.0)[..., None]
    unit_y = y / torch.where(ny > 0, ny, 1.0)[..., None]
    return (unit_x * unit_y).sum(-1)
