"""Head vectors as points of the Poincaré ball (Hyperbolic Attention Networks, arXiv 1805.09786; math in
docs/hyperbolic.md).

A vector times `scale` is a tangent vector u at the origin; its point is x = tanh(√c |u|) u / (√c |u|). All that the
scores and the midpoint need of it is the direction u/|u| and the *half radius* a = √c |u|, half the geodesic distance
to the origin in units of 1/√c: |x|√c = tanh a, 1 - c|x|² = 1/cosh² a, and in the Lorentz form x_t = cosh(2a)/√c.
Directions do not depend on c, so heads of different curvature can share a key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: |x|√c is kept at or below this, and with it a at or below artanh of it, about 6.1.
CLIP = 1 - 1e-5
FARTHEST = math.atanh(CLIP)


def direction_and_norm(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Unit vectors [..., d] and norms [...] of u = scale · x.

    No square overflows or underflows. A vector shorter than `shortest` counts as one of that length in a shorter
    direction, so that direction times norm is u, and its gradient is right, down to u = 0.
    """
    u = scale * x
    size = u.detach().abs().amax(-1, keepdim=True).clamp_min(shortest(u.dtype))
    u = u / size
    norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True).clamp_min(1.0)
    return u / norm, (norm * size).squeeze(-1)


def shortest(dtype: torch.dtype) -> float:
    """The norm below which a vector's length no longer matters; its square is still a number."""
    return 1e-100 if dtype == torch.float64 else 1e-15


def half_radius(norm: Tensor, curvature: Tensor) -> Tensor:
    """a = √c |u|, at most artanh(1 - 1e-5); curvature broadcasts against `norm`."""
    return (curvature.sqrt() * norm).clamp_max(FARTHEST)
