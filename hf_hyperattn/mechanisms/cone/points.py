"""Head vectors as points of the half space (Coneheads, arXiv 2306.00392, section 3; Shadow Cones, 2305.15215).

A vector x of dimension d becomes a horizontal part X (d-1 numbers) and a height h > 0 taken from its last
coordinate. In every mapping the horizontal part is x_1..x_{d-1} times one number per point, the *stretch*, so that
X_q · X_k = stretch_q · stretch_k · (q·k - q_d k_d): engines can take it from the host's own product.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Mapping = Literal["xi", "psi", "expmap"]
MAPPINGS = get_args(Mapping)
EXPONENT_LIMIT = 10.0  # of xi, keeps heights within e^±10
NORM_LIMIT = 30.0  # of expmap, longer vectors count as this long
SERIES_LIMIT = 0.04  # of expmap: below this s², the power series is exact to 1e-14
CLAMP = 1 - 1e-3  # clamp_heights keeps h <= CLAMP * r


def height_and_stretch(x: Tensor, mapping: str, radius: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Height h and stretch of each vector.

    Args:
        x: [..., d], float32 or float64.
        mapping: "xi": h = stretch = exp(x_d / d). "psi": h = stretch = r·sigmoid(x_d).
            "expmap": h = 1 / (cosh s - (x_d/s) sinh s) with s = |x|, stretch = h·sinh(s)/s.
        radius: r, broadcastable to [...]; only psi uses it.

    Returns:
        h and stretch, each [...].
    """
    side = x[..., :-1].square().sum(-1) if mapping == "expmap" else None
    return of_parts(x[..., -1], side, x.shape[-1], mapping, radius)


def of_parts(
    last: Tensor, side: Tensor | None, dim: int, mapping: str, radius: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same from x_d, |x_1..x_{d-1}|² (only expmap reads it) and d."""
    if mapping == "xi":
        h = torch.exp((last / dim).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT))
        return h, h
    if mapping == "psi":
        h = radius * torch.sigmoid(last)
        return h, h
    return _expmap(side, last)


def _expmap(side: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The exponential map at height 1: h = 1 / (cosh s - t sinh s) with t = x_d/s, and stretch = h sinh(s)/s.

    `side` is |x_1..x_{d-1}|². A vector longer than NORM_LIMIT counts as one of that length. Short vectors go by the
    power series in s², which has a gradient at the origin.
    """
    square = side + last.square()
    short = square < SERIES_LIMIT
    # what a branch is not taken for must not reach it: infinite there, it would make the other's gradient NaN
    h_short, stretch_short = _expmap_series(torch.where(short, square, 0.0), torch.where(short, last, 0.0))
    h_long, stretch_long = _expmap_factored(torch.where(short, 1.0, side), torch.where(short, 0.0, last))
    return torch.where(short, h_short, h_long), torch.where(short, stretch_short, stretch_long)


def _expmap_series(square: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    cosh = 1 + square / 2 * (1 + square / 12 * (1 + square / 30 * (1 + square / 56)))
    sinhc = 1 + square / 6 * (1 + square / 20 * (1 + square / 42 * (1 + square / 72)))
    h = 1 / (cosh - last * sinhc)
    return h, h * sinhc


def _expmap_factored(side: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """exp(-s) is factored out: cosh s - t sinh s = e^s/2 · [(1 - t) + (1 + t) e^-2s].

    Where x_d is nearly s, 1 - t cancels and is taken as side / (s (s + x_d)).
    """
    norm = torch.sqrt(side + last.square())
    s, t = norm.clamp_max(NORM_LIMIT), last / norm
    one_minus_t = torch.where(last > 0, side / (norm * (norm + last.abs())), 1 - t)
    bracket = one_minus_t + (1 + t) * torch.exp(-2 * s)
    return 2 * torch.exp(-s) / bracket, -torch.expm1(-2 * s) / (norm * bracket)


def horizontal(x: Tensor, stretch: Tensor) -> Tensor:
    """The horizontal part X, [..., d-1]."""
    return x[..., :-1] * stretch[..., None]


def clamp_height(h: Tensor, radius: Tensor | float) -> Tensor:
    """Heights kept below the radius, as the penumbral score needs them: h <= r·(1 - 1e-3)."""
    return torch.minimum(h, torch.as_tensor(radius * CLAMP, dtype=h.dtype, device=h.device).expand_as(h))
