"""From one model of hyperbolic space to another. All are isometries: distances are the same in every model.

Shapes and c as in `poincare`; the Lorentz model has one coordinate more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .poincare import gap
from .scalars import column, root, square, working


def poincare_to_klein(x: Tensor, c: Tensor | float) -> Tensor:
    """k = 2x/(1 + c|x|²), [..., d]."""
    x, c = working(c, x)
    return 2 * x / (1 + c * square(x))[..., None]


def klein_to_poincare(k: Tensor, c: Tensor | float) -> Tensor:
    """x = k/(1 + √(1 - c|k|²)), [..., d]."""
    k, c = working(c, k)
    return k / (1 + gap(k, c).sqrt())[..., None]


def poincare_to_lorentz(x: Tensor, c: Tensor | float) -> Tensor:
    """((1 + c|x|²)/√c, 2x) / (1 - c|x|²), [..., d+1]."""
    x, c = working(c, x)
    room = gap(x, c)[..., None]
    return torch.cat([(2 - room) / column(root(c)), 2 * x], dim=-1) / room


def lorentz_to_poincare(x: Tensor, c: Tensor | float) -> Tensor:
    """x_s/(1 + √c x_0), [..., d]."""
    x, c = working(c, x)
    return x[..., 1:] / (1 + root(c) * x[..., 0])[..., None]


def klein_to_lorentz(k: Tensor, c: Tensor | float) -> Tensor:
    """γ (1/√c, k), [..., d+1]."""
    k, c = working(c, k)
    factor = gap(k, c).rsqrt()[..., None]
    return torch.cat([factor / column(root(c)), factor * k], dim=-1)


def lorentz_to_klein(x: Tensor, c: Tensor | float) -> Tensor:
    """x_s/(√c x_0), [..., d]."""
    x, c = working(c, x)
    return x[..., 1:] / (root(c) * x[..., 0])[..., None]


def poincare_to_halfspace(x: Tensor, c: Tensor | float) -> Tensor:
    """The image [..., d] of a point of the ball under the inversion that takes 0 to (0, 1).

    With y = √c x: (2y_1..2y_{d-1}, 1 - |y|²) / (|y|² - 2y_d + 1), whose denominator is |y - (0, 1)|².
    """
    x, c = working(c, x)
    y = x * column(root(c))
    side, last = y[..., :-1], y[..., -1:]
    height = (1 - square(y)).clamp_min(torch.finfo(y.dtype).eps)
    return torch.cat([2 * side, height[..., None]], dim=-1) / (square(side)[..., None] + (1 - last).square())


def halfspace_to_poincare(p: Tensor, c: Tensor | float) -> Tensor:
    """The inverse: (2X, |X|² + h² - 1) / (|X|² + (1 + h)²) / √c, [..., d]."""
    p, c = working(c, p)
    side, height = p[..., :-1], p[..., -1:]
    far = square(side)[..., None]
    y = torch.cat([2 * side, far + (height - 1) * (height + 1)], dim=-1) / (far + (1 + height).square())
    return y / column(root(c))
