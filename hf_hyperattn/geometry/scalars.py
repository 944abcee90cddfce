"""Scalar functions of u = c·r² that stay smooth if c or r is 0.

Norms here have a finite gradient there, too.

tanh(√u)/√u and similar functions are even in √u, so they are power series in u. Below
`SERIES_LIMIT` the series is summed, which gives exact values and gradients in the vector and in the
curvature as u goes to 0. Above it the plain form is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Below this, eight powers of u suffice: the next one is below 1e-16.
SERIES_LIMIT = 0.01

# Coefficients of u, u², ... in the series of f(√u)/√u - 1.
TANH = (-1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075, -929569 / 638512875)
ARTANH = tuple(1 / (2 * n + 1) for n in range(1, 9))
ASINH = (
    *(-1 / 6, 3 / 40, -15 / 336, 105 / 3456, -945 / 42240),
    *(10395 / 599040, -135135 / 9676800, 2027025 / 175472640),
)


def to_working_dtype(c: Tensor | float, *points: Tensor) -> tuple:
    """Return the points and then c, in float64 if any point has it, else in float32.

    Args:
        c: Curvature -c as a number or a tensor. Values of a tensor are not checked.
        points: The points.

    Raises:
        ValueError: c is a negative or infinite number.
    """
    if not isinstance(c, Tensor) and not 0 <= c < math.inf:
        raise ValueError(
            f"c={c!r} is not allowed; allowed: finite numbers from 0, the curvature is -c"
        )
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in points) else torch.float32
    return *(p.to(dtype) for p in points), c.to(dtype) if isinstance(c, Tensor) else c


def to_float64(x: Tensor) -> Tensor:
    """Return `x` in float64 if its device supports it.

    Sums that cancel far from the origin need it.
    """
    return x if x.device.type == "mps" else x.double()


def squared_norm(x: Tensor) -> Tensor:
    """Return |x|², [...]."""
    return x.square().sum(-1)


def vector_norm(x: Tensor) -> Tensor:
    """Return |x|, [...], with gradient 0 at x = 0."""
    return torch.linalg.vector_norm(x, dim=-1)


def at_least(x: Tensor, low: float) -> Tensor:
    """Return `x` clamped from below. At the bound the gradient still passes."""
    # Not `torch.clamp`: its gradient at the bound is 0 from torch 2.14 on.
    return torch.where(x < low, low, x)


def at_most(x: Tensor, high: float) -> Tensor:
    """Return `x` clamped from above, and let the gradient pass at the bound."""
    # Not `torch.clamp`, see `at_least`.
    return torch.where(x > high, high, x)


def square_root(c: Tensor | float) -> Tensor | float:
    """Return √c."""
    return c.sqrt() if isinstance(c, Tensor) else c**0.5


def _evaluate_even(
    u: Tensor, coefficients: Sequence[float], plain: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return 1 + Σ a_n u^n for small u, and plain(√u)/√u for others."""
    small = u < SERIES_LIMIT
    # Each branch gets harmless arguments where the other one is used. Otherwise its infinite
    # gradient times 0 is NaN.
    near = torch.where(small, u, 0.0)
    series = torch.zeros_like(near)
    for a in reversed(coefficients):
        series = (series + a) * near
    s = torch.where(small, 1.0, u).sqrt()
    return torch.where(small, 1 + series, plain(s) / s)


def tanhc(u: Tensor) -> Tensor:
    """Return tanh(√u)/√u, which is 1 at u = 0."""
    return _evaluate_even(u, TANH, torch.tanh)


def artanhc(u: Tensor) -> Tensor:
    """Return artanh(√u)/√u, which is 1 at u = 0.

    u is clamped below 1, so that the result is finite.
    """
    return _evaluate_even(at_most(u, 1 - 2 * torch.finfo(u.dtype).eps), ARTANH, torch.atanh)


def asinhc(u: Tensor) -> Tensor:
    """Return asinh(√u)/√u, which is 1 at u = 0."""
    return _evaluate_even(u, ASINH, _vectorised_asinh)


def _vectorised_asinh(s: Tensor) -> Tensor:
    """Return asinh(s) for s > 0."""
    # On CPUs torch vectorises log1p but not asinh, which takes five times as long.
    return torch.log1p(s + s * (s / (1 + torch.sqrt(1 + s * s))))
