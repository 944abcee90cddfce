"""The Klein ball of curvature -c: points k with √c|k| < 1, geodesics are straight lines.

Points are [..., d]; c as in `poincare`. The metric at the origin is |dk|: expmap0(u) lies at distance |u|, so u is
twice the tangent vector of the Poincaré ball. Einstein midpoints are taken here (Gulcehre et al., Hyperbolic Attention
Networks, 1805.09786, section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import poincare
from .poincare import gap
from .scalars import artanhc, asinhc, square, tanhc, working

LIMIT = 2 * poincare.LIMIT / (1 + poincare.LIMIT**2)  # the Poincaré ball's, as a Klein radius: 1 - 5e-11


def project(k: Tensor, c: Tensor | float) -> Tensor:
    """`k` [..., d], drawn in along its ray where √c|k| > LIMIT, or > 1 - 1.2e-7 in float32, which holds no more."""
    k, c = working(c, k)
    return poincare.project(k, c, min(LIMIT, 1 - torch.finfo(k.dtype).eps))


def lorentz_factor(k: Tensor, c: Tensor | float) -> Tensor:
    """γ = 1/√(1 - c|k|²), [...]."""
    return gap(k, c).rsqrt()


def expmap0(u: Tensor, c: Tensor | float) -> Tensor:
    """tanh(√c|u|) u/(√c|u|), [..., d]."""
    u, c = working(c, u)
    return project(u * tanhc(c * square(u))[..., None], c)


def logmap0(k: Tensor, c: Tensor | float) -> Tensor:
    """artanh(√c|k|) k/(√c|k|), [..., d]."""
    k, c = working(c, k)
    return k * artanhc(c * square(k))[..., None]


def _along(k: Tensor, u: Tensor, c: Tensor | float) -> tuple[Tensor, Tensor]:
    """Squared length of the tangent vector u at k, |u|²/g + c⟨k,u⟩²/g² with g = 1 - c|k|², and c⟨k,u⟩/g."""
    room = gap(k, c)
    inner = (k * u).sum(-1) / room
    return square(u) / room + c * inner.square(), c * inner


def distance(k: Tensor, l: Tensor, c: Tensor | float) -> Tensor:
    """The geodesic distance [...]: c sinh² d√c is the squared length of l - k at k, times (1 - c|k|²)/(1 - c|l|²)."""
    k, l, c = working(c, k, l)
    squared = _along(k, l - k, c)[0] * gap(k, c) / gap(l, c)
    apart = squared > 0
    sine = torch.where(apart, squared, 1.0).sqrt()
    return torch.where(apart, sine * asinhc(c * sine.square()), 0.0)


def expmap(k: Tensor, u: Tensor, c: Tensor | float) -> Tensor:
    """The point [..., d] reached from k along the tangent vector u at k, which lies on the line k + s·u."""
    k, u, c = working(c, k, u)
    squared, along = _along(k, u, c)
    t = tanhc(c * squared)
    return project(k + u * (t / (1 + t * along))[..., None], c)


def logmap(k: Tensor, l: Tensor, c: Tensor | float) -> Tensor:
    """The tangent vector [..., d] at k that leads to l."""
    k, l, c = working(c, k, l)
    ratio = gap(k, c) / gap(l, c)
    scale = asinhc(c * _along(k, l - k, c)[0] * ratio) * ratio.sqrt()
    return (l - k) * scale[..., None]


def midpoint(k: Tensor, c: Tensor | float, weights: Tensor | None = None) -> Tensor:
    """The Einstein midpoint Σ w γ k / Σ w γ. Shapes as in `poincare.midpoint`."""
    if weights is None:
        return midpoint(k, c, k.new_ones(1, k.shape[-2])).squeeze(-2)
    k, c = working(c, k)
    weighted = weights.to(k.dtype) * lorentz_factor(k, c)[..., None, :]
    return weighted @ k / weighted.sum(-1, keepdim=True)
