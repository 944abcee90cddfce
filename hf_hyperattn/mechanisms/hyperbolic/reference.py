"""Hyperbolic-distance scores: the definition (Hyperbolic Attention Networks, arXiv 1805.09786, sections 3 and 4).

Queries and keys are lifted into the Poincaré ball of curvature -c, x = tanh(√c |u|) u / (√c |u|) with u = scale · q,
|x|√c kept at or below 1 - 1e-5. With the ball's distance

    d(x, y) = (1/√c) · arcosh(1 + 2c |x - y|² / ((1 - c|x|²) (1 - c|y|²)))

the logit is

    geodesic:         S = -d / τ
    squared_lorentz:  S = (2/c + 2⟨x, y⟩_L) / τ  =  -(2/c) · (cosh(√c d) - 1) / τ

It is evaluated as arcosh(1 + 2s²) = 2 arsinh(s), which keeps small distances, with |x - y| from differences and
1/(1 - c|x|²) = cosh²(√c |u|), which keeps points near the boundary.

Points: A vector times `scale` is a tangent vector u at the origin; its point is x = tanh(√c |u|) u / (√c |u|). All
that the scores and the midpoint need of it is the direction u/|u| and the *half radius* a = √c |u|, half the geodesic
distance to the origin in units of 1/√c: |x|√c = tanh a, 1 - c|x|² = 1/cosh² a, and in the Lorentz form x_t =
cosh(2a)/√c. Directions do not depend on c, so heads of different curvature can share a key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...engines.score import euclidean_distances, repeat_heads, working_dtype
from ...geometry.scalars import at_least, at_most

#: |x|√c is kept at or below this, and with it a at or below artanh of it, about 6.1.
CLIP = 1 - 1e-5
FARTHEST = math.atanh(CLIP)


def definition(
    query: Tensor,
    key: Tensor,
    curvature: Tensor,
    temperature: Tensor,
    *,
    scale: float,
    distance: str,
) -> Tensor:
    """Dense logits [B, H, N, M] of checked arguments, from differences of points.

    Args:
        query: [B, H, N, d].
        key: [B, Hkv, M, d], Hkv dividing H.
        curvature, temperature: c and τ, [H] or [1], positive.
        scale: what queries and keys are multiplied with before they are lifted.
        distance: "geodesic" or "squared_lorentz".
    """
    dtype = working_dtype(query, key)
    q, k = query.to(dtype), repeat_heads(key.to(dtype), query.shape[1])
    c, tau = (t.to(dtype)[:, None, None] for t in (curvature, temperature))
    (x, cosh_q), (y, cosh_k) = lift(q, c[..., 0], scale), lift(k, c[..., 0], scale)
    s = euclidean_distances(x, y) * cosh_q[..., None] * cosh_k[..., None, :]  # sinh(√c d / 2)
    if distance == "geodesic":
        return -(2 / c.sqrt()) * torch.asinh(s) / tau
    return -(4 / c) * s.square() / tau


def lift(x: Tensor, curvature: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The points times √c, [..., d], and cosh(√c |u|) = (1 - c|x|²)^(-1/2), [...]."""
    direction, norm = direction_and_norm(x, scale)
    a = half_radius(norm, curvature)
    return torch.tanh(a)[..., None] * direction, torch.cosh(a)


def direction_and_norm(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Unit vectors [..., d] and norms [...] of u = scale · x.

    No square overflows or underflows. A vector shorter than `shortest` counts as one of that length in a shorter
    direction, so that direction times norm is u, and its gradient is right, down to u = 0.
    """
    u = scale * x
    size = u.detach().abs().amax(-1, keepdim=True).clamp_min(shortest(u.dtype))
    u = u / size
    norm = at_least(torch.linalg.vector_norm(u, dim=-1, keepdim=True), 1.0)
    return u / norm, (norm * size).squeeze(-1)


def shortest(dtype: torch.dtype) -> float:
    """The norm below which a vector's length no longer matters; its square is still a number."""
    return 1e-100 if dtype == torch.float64 else 1e-15


def half_radius(norm: Tensor, curvature: Tensor) -> Tensor:
    """a = √c |u|, at most artanh(1 - 1e-5); curvature broadcasts against `norm`."""
    return at_most(curvature.sqrt() * norm, FARTHEST)
