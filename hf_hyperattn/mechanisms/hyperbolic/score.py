"""Hyperbolic-distance scores: the definition (Hyperbolic Attention Networks, arXiv 1805.09786, sections 3 and 4).

Queries and keys are lifted into the Poincaré ball of curvature -c, x = tanh(√c |u|) u / (√c |u|) with u = scale · q,
|x|√c kept at or below 1 - 1e-5. With the ball's distance

    d(x, y) = (1/√c) · arcosh(1 + 2c |x - y|² / ((1 - c|x|²) (1 - c|y|²)))

the logit is

    geodesic:         S = -d / τ
    squared_lorentz:  S = (2/c + 2⟨x, y⟩_L) / τ  =  -(2/c) · (cosh(√c d) - 1) / τ

It is evaluated as arcosh(1 + 2s²) = 2 arsinh(s), which keeps small distances, with |x - y| from differences and
1/(1 - c|x|²) = cosh²(√c |u|), which keeps points near the boundary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines.score import repeat_heads, working_dtype
from .points import direction_and_norm, half_radius


def definition(
    query: Tensor, key: Tensor, curvature: Tensor, temperature: Tensor, *, scale: float, distance: str
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
    s = euclidean(x, y) * cosh_q[..., None] * cosh_k[..., None, :]  # sinh(√c d / 2)
    if distance == "geodesic":
        return -(2 / c.sqrt()) * torch.asinh(s) / tau
    return -(4 / c) * s.square() / tau


def lift(x: Tensor, curvature: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The points times √c, [..., d], and cosh(√c |u|) = (1 - c|x|²)^(-1/2), [...]."""
    direction, norm = direction_and_norm(x, scale)
    a = half_radius(norm, curvature)
    return torch.tanh(a)[..., None] * direction, torch.cosh(a)


def euclidean(x: Tensor, y: Tensor) -> Tensor:
    """Distances [..., N, M] from direct differences; the gradient at distance 0 is 0."""
    return torch.cdist(x.contiguous(), y.contiguous(), compute_mode="donot_use_mm_for_euclid_dist")
