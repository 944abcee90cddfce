"""The four models side by side, and seeded points of them."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from hf_hyperattn import geometry as G
from tests.geometry import oracle

torch.set_num_threads(1)

CURVATURES = [0.01, 0.3, 1.0, 4.0]
TINY = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Model:
    """A module of `geometry`, its oracle, and the way to it from the Poincaré ball and back."""

    module: ModuleType
    exact: Callable
    enter: Callable
    leave: Callable


def _same(x, c):
    return x


MODELS = {
    "poincare": Model(G.poincare, oracle.poincare_distance, _same, _same),
    "klein": Model(G.klein, oracle.klein_distance, G.poincare_to_klein, G.klein_to_poincare),
    "lorentz": Model(G.lorentz, oracle.lorentz_distance, G.poincare_to_lorentz, G.lorentz_to_poincare),
    "halfspace": Model(
        G.halfspace, oracle.halfspace_distance, G.poincare_to_halfspace, G.halfspace_to_poincare
    ),
}
MAPS = ["poincare", "klein", "lorentz"]  # those that have exp, log and midpoints


def points(*shape, c=1.0, reach=0.9, seed=0, dtype=torch.float64):
    """Points of the Poincaré ball [*shape], directions uniform, √c|x| uniform on [0, reach]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    radius = torch.rand(*shape[:-1], 1, generator=generator, dtype=torch.float64) * reach
    return (x / x.norm(dim=-1, keepdim=True) * radius / c**0.5).to(dtype)


def exactly(distance, x, y, c):
    """An oracle's distances [n] of points [n, d]."""
    found = [float(distance(a, b, c)) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    return torch.tensor(found, dtype=torch.float64)


def tangents(*shape, seed=0, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
