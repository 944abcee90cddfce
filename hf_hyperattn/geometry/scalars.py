"""Scalar functions of u = c·r² that stay smooth where c or r is 0, and norms that keep a finite gradient there.

tanh(√u)/√u and its like are even in √u, so they are power series in u. Below `SERIES_LIMIT` they are summed, which
gives exact values and gradients in both the vector and the curvature as u goes to 0; above it the plain form is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SERIES_LIMIT = 0.01  # eight powers beyond it are below 1e-16

TANH = (-1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075, -929569 / 638512875)
ARTANH = tuple(1 / (2 * n + 1) for n in range(1, 9))
ASINH = (
    *(-1 / 6, 3 / 40, -15 / 336, 105 / 3456, -945 / 42240),
    *(10395 / 599040, -135135 / 9676800, 2027025 / 175472640),
)


def working(c: Tensor | float, *points: Tensor) -> tuple:
    """The points and then c, all in float64 if any point has it, else in float32.

    Raises:
        ValueError: c is a number below 0 or not finite. The values of a tensor are not looked at.
    """
    if not isinstance(c, Tensor) and not 0 <= c < math.inf:
        raise ValueError(
            f"c={c!r} is not allowed; allowed: finite numbers from 0, the curvature is -c"
        )
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in points) else torch.float32
    return *(p.to(dtype) for p in points), c.to(dtype) if isinstance(c, Tensor) else c


def precise(x: Tensor) -> Tensor:
    """`x` in float64 where its device has that: for sums that cancel far from the origin."""
    return x if x.device.type == "mps" else x.double()


def square(x: Tensor) -> Tensor:
    """|x|², [...]."""
    return x.square().sum(-1)


def norm(x: Tensor) -> Tensor:
    """|x|, [...], with gradient 0 at x = 0."""
    return torch.linalg.vector_norm(x, dim=-1)


def at_least(x: Tensor, low: float) -> Tensor:
    """`x`, and `low` below that. At the bound the gradient is that of `x`.

    `torch.clamp` has that gradient until torch 2.13, and 0 there from 2.14 on.
    """
    return torch.where(x < low, low, x)


def at_most(x: Tensor, high: float) -> Tensor:
    """`x`, and `high` above that. At the bound the gradient is that of `x`, see `at_least`."""
    return torch.where(x > high, high, x)


def root(c: Tensor | float) -> Tensor | float:
    """√c."""
    return c.sqrt() if isinstance(c, Tensor) else c**0.5


def _even(u: Tensor, coefficients: Sequence[float], plain: Callable[[Tensor], Tensor]) -> Tensor:
    """1 + Σ a_n u^n for small u, `plain`(√u)/√u elsewhere; either branch is kept off the other's ground."""
    small = u < SERIES_LIMIT
    near = torch.where(small, u, 0.0)
    series = torch.zeros_like(near)
    for a in reversed(coefficients):
        series = (series + a) * near
    s = torch.where(small, 1.0, u).sqrt()
    return torch.where(small, 1 + series, plain(s) / s)


def tanhc(u: Tensor) -> Tensor:
    """tanh(√u)/√u, 1 at u = 0."""
    return _even(u, TANH, torch.tanh)


def artanhc(u: Tensor) -> Tensor:
    """artanh(√u)/√u, 1 at u = 0; u is kept below 1 by one rounding step, so the value is always finite."""
    return _even(at_most(u, 1 - 2 * torch.finfo(u.dtype).eps), ARTANH, torch.atanh)


def asinhc(u: Tensor) -> Tensor:
    """asinh(√u)/√u, 1 at u = 0."""
    return _even(u, ASINH, _asinh)


def _asinh(s: Tensor) -> Tensor:
    """asinh of s > 0 by log1p, which torch has vectorised on CPUs, where its own asinh is five times slower."""
    return torch.log1p(s + s * (s / (1 + torch.sqrt(1 + s * s))))
