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
    x = working(x)
    return 2 * x / (1 + c * square(x))[..., None]


def klein_to_poincare(k: Tensor, c: Tensor | float) -> Tensor:
    """x = k/(1 + √(1 - c|k|²)), [..., d]."""
    k = working(k)
    return k / (1 + gap(k, c).sqrt())[..., None]


def poincare_to_lorentz(x: Tensor, c: Tensor | float) -> Tensor:
    """((1 + c|x|²)/√c, 2x) / (1 - c|x|²), [..., d+1]."""
    x = working(x)
    room = gap(x, c)[..., None]
    return torch.cat([(2 - room) / column(root(c)), 2 * x], dim=-1) / room


def lorentz_to_poincare(x: Tensor, c: Tensor | float) -> Tensor:
    """x_s/(1 + √c x_0), [..., d]."""
    x = working(x)
    return x[..., 1:] / (1 + root(c) * x[..., 0])[..., None]


def klein_to_lorentz(k: Tensor, c: Tensor | float) -> Tensor:
    """γ (1/√c, k), [..., d+1]."""
    k = working(k)
    factor = gap(k, c).rsqrt()[..., None]
    return torch.cat([factor / column(root(c)), factor * k], dim=-1)


def lorentz_to_klein(x: Tensor, c: Tensor | float) -> Tensor:
    """x_s/(√c x_0), [..., d]."""
    x = working(x)
    return x[..., 1:] / (root(c) * x[..., 0])[..., None]
