"""Define hyperbolic-distance scores as published (arXiv 1805.09786, sections 3 and 4).

Here you learn the formulas of the scores and of the points in Hyperbolic Attention Networks;
docs/hyperbolic.md derives them.

Queries and keys are lifted into the Poincaré ball of curvature -c: x = tanh(√c |u|) u / (√c |u|) with
u = scale · q. |x|√c is kept at or below 1 - 1e-5. The distance in the ball is

    d(x, y) = (1/√c) · arcosh(1 + 2c |x - y|² / ((1 - c|x|²) (1 - c|y|²)))

and the logit is

    geodesic:         S = -d / τ
    squared_lorentz:  S = (2/c + 2⟨x, y⟩_L) / τ  =  -(2/c) · (cosh(√c d) - 1) / τ

The code uses arcosh(1 + 2s²) = 2 arsinh(s), which is exact for small distances. |x - y| comes from
differences, and 1/(1 - c|x|²) = cosh²(√c |u|) is exact for points near the boundary.

Scores and midpoints need two things of a point: the direction u/|u|, and the *half radius* a = √c |u|.
It is half the geodesic distance to the origin, in units of 1/√c:

    |x|√c = tanh a        1 - c|x|² = 1/cosh² a        x_t = cosh(2a)/√c  (Lorentz form)

Directions do not depend on c, so heads of different curvature can share a key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...engines.cpu import norms
from ...engines.score import euclidean_distances, repeat_heads, working_dtype
from ...geometry.scalars import at_least, at_most

#: |x|√c is kept at or below this.
CLIP = 1 - 1e-5
#: The half radius a is then at most about 6.1.
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
    """Return dense logits, computed from differences of points.

    Arguments are not checked.

    Args:
        query: Queries [B, H, N, d].
        key: Keys [B, Hkv, M, d]; Hkv divides H.
        curvature, temperature: Parameters c and τ, [H] or [1], positive.
        scale: Factor of queries and keys before they are lifted.
        distance: "geodesic" or "squared_lorentz".

    Returns:
        Logits [B, H, N, M] in the working dtype.
    """
    dtype = working_dtype(query, key)
    q, k = query.to(dtype), repeat_heads(key.to(dtype), query.shape[1])
    c = curvature.to(dtype)[:, None, None]
    tau = temperature.to(dtype)[:, None, None]
    x, cosh_q = lift_points(q, c[..., 0], scale)
    y, cosh_k = lift_points(k, c[..., 0], scale)
    # s = sinh(√c d / 2)
    s = euclidean_distances(x, y) * cosh_q[..., None] * cosh_k[..., None, :]
    if distance == "geodesic":
        return -(2 / c.sqrt()) * torch.asinh(s) / tau
    return -(4 / c) * s.square() / tau


def lift_points(x: Tensor, curvature: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the points times √c, [..., d], and cosh(√c |u|) = (1 - c|x|²)^(-1/2), [...]."""
    direction, norm = direction_and_norm(x, scale)
    a = half_radius(norm, curvature)
    return torch.tanh(a)[..., None] * direction, torch.cosh(a)


def direction_and_norm(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return unit vectors [..., d] and norms [...] of u = scale · x.

    No square overflows or underflows. A vector shorter than `shortest` gets that norm and a shorter
    direction. Direction times norm is then still u, and the gradient is right, also at u = 0.
    """
    u = scale * x
    size = u.detach().abs().amax(-1, keepdim=True).clamp_min(shortest(u.dtype))
    u = u / size
    norm = at_least(torch.linalg.vector_norm(u, dim=-1, keepdim=True), 1.0)
    return u / norm, (norm * size).squeeze(-1)


def shortest(dtype: torch.dtype) -> float:
    """Return the norm below which a vector's length no longer matters. Its square is above 0."""
    return 1e-100 if dtype == torch.float64 else 1e-15


def measure_norms(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return norms [...] of u = scale · x in one pass over the vectors, at least `shortest`."""
    return at_least(scale * norms(x, dtype), shortest(dtype))


def read_norm(column, head):
    """Return the norm of a vector's u, at least `shortest`, and its half radius.

    Args:
        column: The last number, and the sum of squares, see `Reader`.
        head: The curvature and the scale.
    """
    _, square = column
    curvature, scale = head
    norm = at_least(scale * square.sqrt(), shortest(torch.float32))
    return norm, half_radius(norm, curvature)


def half_radii(norms: Tensor, curvature: Tensor) -> Tensor:
    """Return half radii [B, H or Hkv, L], with repeated heads if the curvature differs by head.

    Args:
        norms: Norms [B, H or Hkv, L].
        curvature: c, [H] or [1].
    """
    if len(curvature) > 1:
        norms = repeat_heads(norms, len(curvature))
    return half_radius(norms, curvature[:, None])


def half_radius(norm: Tensor, curvature: Tensor) -> Tensor:
    """Return a = √c |u|, at most artanh(1 - 1e-5); curvature broadcasts against `norm`."""
    return at_most(curvature.sqrt() * norm, FARTHEST)
