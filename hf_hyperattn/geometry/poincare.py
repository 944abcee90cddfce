"""The Poincaré ball of curvature -c: points x with √c|x| < 1.

The formulas are from Ganea et al., Hyperbolic Neural Networks (arXiv 1805.09112).

Points are [..., d]. c >= 0 is a float or a tensor that broadcasts to [...], and c = 0 is the flat
limit with the metric 2|dx|. As in that paper, expmap0(v) lies at distance 2|v| from the origin.

Everything is evaluated from differences, never from 1 - cos or arcosh, so that near points keep
their relative accuracy. Half precision is computed and returned in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .scalars import (
    artanhc,
    asinhc,
    at_least,
    square_root,
    squared_norm,
    tanhc,
    to_float64,
    to_working_dtype,
    vector_norm,
)

#: Points are kept at √c|x| <= LIMIT.
LIMIT = 1 - 1e-5


def project(x: Tensor, c: Tensor | float, limit: float = LIMIT) -> Tensor:
    """Move points with √c|x| > limit along their ray to the limit.

    Args:
        x: Points [..., d].
        c: Curvature -c.
        limit: Largest √c|x| of the result. Default: `LIMIT`.

    Returns:
        Points [..., d], finite for every finite x.
    """
    x, c = to_working_dtype(c, x)
    reach = c * squared_norm(x)
    outside = reach > limit**2
    # The root is only taken outside, because it has no gradient at c = 0.
    shrink = limit * torch.where(outside, reach, 1.0).rsqrt()
    return x * torch.where(outside, shrink, 1.0)[..., None]


def gap(x: Tensor, c: Tensor | float) -> Tensor:
    """Return 1 - c|x|², [...], at least one rounding step.

    The conformal factor is λ_x = 2/gap.
    """
    x, c = to_working_dtype(c, x)
    return at_least(1 - c * squared_norm(x), torch.finfo(x.dtype).eps)


def expmap0(v: Tensor, c: Tensor | float) -> Tensor:
    """Return the point tanh(√c|v|) v/(√c|v|) of the tangent vector v at the origin.

    Args:
        v: Tangent vectors [..., d].
        c: Curvature -c.

    Returns:
        Points [..., d], kept in `LIMIT`.
    """
    v, c = to_working_dtype(c, v)
    return project(v * tanhc(c * squared_norm(v))[..., None], c)


def logmap0(x: Tensor, c: Tensor | float) -> Tensor:
    """Return the tangent vector at the origin that leads to x, [..., d].

    It is artanh(√c|x|) x/(√c|x|).
    """
    x, c = to_working_dtype(c, x)
    return x * artanhc(c * squared_norm(x))[..., None]


def mobius_add(x: Tensor, y: Tensor, c: Tensor | float) -> Tensor:
    """Return the Möbius sum x ⊕ y, [..., d] (Ganea et al., equation 4).

    It is written with the sum x + y:

    ((1 - c|x|²)(x + y) + c|x + y|² x) / ((1 - c|x|²)(1 - c|y|²) + c|x + y|²).

    For -x instead of x nothing cancels as y approaches x: (-x) ⊕ y keeps its relative accuracy.
    """
    x, y, c = to_working_dtype(c, x, y)
    total = x + y
    room = gap(x, c)
    far = c * squared_norm(total)
    numerator = room[..., None] * total + far[..., None] * x
    return numerator / (room * gap(y, c) + far)[..., None]


def _squared_chord(x: Tensor, y: Tensor, c: Tensor | float) -> Tensor:
    """Return |x - y|² / ((1 - c|x|²)(1 - c|y|²)) = sinh²(√c d/2) / c, [...]."""
    return squared_norm(x - y) / (gap(x, c) * gap(y, c))


def distance(x: Tensor, y: Tensor, c: Tensor | float) -> Tensor:
    """Return the geodesic distance [...] of points x and y [..., d].

    d = (2/√c) artanh(√c|(-x) ⊕ y|) = (2/√c) asinh(√c|x - y| / √((1 - c|x|²)(1 - c|y|²))).

    Gradients are finite everywhere, and 0 at x = y. Points on or beyond the rim count as just
    inside.
    """
    x, y, c = to_working_dtype(c, x, y)
    # Not the root of `_squared_chord`: a root of the square has no gradient at x = y.
    chord = vector_norm(x - y) / (gap(x, c) * gap(y, c)).sqrt()
    return 2 * chord * asinhc(c * chord.square())


def expmap(x: Tensor, v: Tensor, c: Tensor | float) -> Tensor:
    """Return the point [..., d] that the tangent vector v at x leads to.

    Its distance from x is λ_x|v|.
    """
    x, v, c = to_working_dtype(c, x, v)
    # w = λ_x v / 2, so that exp_x(v) = x ⊕ exp_0(w).
    w = v / gap(x, c)[..., None]
    return project(mobius_add(x, w * tanhc(c * squared_norm(w))[..., None], c), c)


def logmap(x: Tensor, y: Tensor, c: Tensor | float) -> Tensor:
    """Return the tangent vector [..., d] at x that leads to y."""
    x, y, c = to_working_dtype(c, x, y)
    chord = c * _squared_chord(x, y, c)
    # artanh(√c|z|)/(√c|z|) of z = (-x) ⊕ y, written in the chord, which does not saturate as z
    # approaches the rim.
    scale = gap(x, c) * asinhc(chord) * (1 + chord).sqrt()
    return scale[..., None] * mobius_add(-x, y, c)


def midpoint(x: Tensor, c: Tensor | float, weights: Tensor | None = None) -> Tensor:
    """Return the Einstein midpoint of points.

    It is the normalised sum Σ w x of the Lorentz model.

    In Klein coordinates k = 2x/(1 + c|x|²) it is Σ w γ k / Σ w γ, with γ = (1 + c|x|²)/(1 - c|x|²).

    Args:
        x: Points [..., n, d].
        c: Curvature -c; broadcasts to [..., n] and to [..., m], so it has one value for all n.
        weights: Weights [..., m, n], >= 0 and not all 0 in a row; each row gives one midpoint. They
            need not sum to 1. Default: equal weights.

    Returns:
        Midpoints [..., m, d], or [..., d] without weights.
    """
    if weights is None:
        return midpoint(x, c, x.new_ones(1, x.shape[-2])).squeeze(-2)
    x, c = to_working_dtype(c, x)
    dtype = x.dtype
    # Far from the origin, normalising leaves a small part of these sums. That needs float64.
    x, weights = to_float64(x), to_float64(weights)
    room = gap(x, c)
    # Lorentz coordinates: t = (1 + c|x|²)/(1 - c|x|²) and s = 2x/(1 - c|x|²).
    t = (weights @ (2 / room - 1)[..., None]).squeeze(-1)
    s = weights @ (2 * x / room[..., None])
    # The reversed triangle inequality says t² - c|s|² >= (Σ w)². Rounding may break it.
    height = torch.maximum(t.square() - c * squared_norm(s), weights.sum(-1).square()).sqrt()
    return (s / (t + height)[..., None]).to(dtype)


def depth(x: Tensor, c: Tensor | float) -> Tensor:
    """Return √c|x| / (1 - √c|x|), [...]: 0 at the origin, unbounded at the rim.

    It is a proxy of depth in a hierarchy, and grows with the distance from the origin: with ρ = √c
    d(0, x) it is (e^ρ - 1)/2. At c = 1 it is |x|/(1 - |x|).
    """
    x, c = to_working_dtype(c, x)
    # On the rim and beyond it, the result is large instead of infinite or negative.
    reach = square_root(c) * vector_norm(x)
    return reach / at_least(1 - reach, torch.finfo(x.dtype).eps)


def angular_similarity(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine [...] of the angle between x and y at the origin.

    It is 0 if either is the origin. The ball is conformal at the origin, so it is the same for
    points and tangent vectors, and for every c.
    """
    x, y, _ = to_working_dtype(0.0, x, y)
    norm_x, norm_y = vector_norm(x), vector_norm(y)
    # The origin has no direction. The 1 avoids 0/0, also in the gradient.
    unit_x = x / torch.where(norm_x > 0, norm_x, 1.0)[..., None]
    unit_y = y / torch.where(norm_y > 0, norm_y, 1.0)[..., None]
    return (unit_x * unit_y).sum(-1)
