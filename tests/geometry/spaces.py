"""Seeded points and tangent vectors of the Poincaré ball, and its distances in 50 digits."""

import torch

from tests.geometry import oracle

torch.set_num_threads(1)

CURVATURES = [0.01, 1.0, 4.0]


def points(*shape, c=1.0, reach=0.9, seed=0, dtype=torch.float64):
    """Points of the ball [*shape], directions uniform, √c|x| uniform on [0, reach]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    radius = torch.rand(*shape[:-1], 1, generator=generator, dtype=torch.float64) * reach
    return (x / x.norm(dim=-1, keepdim=True) * radius / c**0.5).to(dtype)


def tangents(*shape, seed=0, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def exact_distance(x, y, c):
    """Distances [n] of points [n, d], evaluated in 50 digits."""
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    return torch.tensor(
        [float(oracle.poincare_distance(a, b, c)) for a, b in pairs], dtype=torch.float64
    )
