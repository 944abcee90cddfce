"""Three errors of a published source, each shown to be one by what is independent of it and of ours.

That source writes the midpoint's Klein formula over Poincaré coordinates, takes the curvature with the wrong sign in
the Lorentz factor, and leaves √c out of artanh. The wrong formulas are written out here; every test fails if ours is
replaced by the wrong one.
"""

import pytest
import torch

from hf_hyperattn.geometry import poincare
from tests.geometry import oracle
from tests.geometry.test_poincare import least_scattered
from tests.oracles.cases import assert_close

EXAMPLE = torch.tensor([[0.6, 0.0], [0.0, 0.8]], dtype=torch.float64)


def mean(k, factor):
    """Σ γ k / Σ γ."""
    return (factor @ k) / factor.sum()


def test_klein_formula_over_poincare_coordinates():
    """Off by 0.29 in hyperbolic distance for (0.6, 0) and (0, 0.8) at c = 1."""
    right = poincare.midpoint(EXAMPLE, 1.0)
    wrong = mean(
        EXAMPLE, (1 - EXAMPLE.square().sum(-1)).rsqrt()
    )  # γ of Klein coordinates, given Poincaré ones
    assert poincare.distance(right, wrong, 1.0).item() == pytest.approx(0.29, abs=0.005)
    assert_close(right, least_scattered(EXAMPLE, [1, 1], 1.0), 1e-8, "midpoint by search")
    scatter = lambda at: oracle.scattered(EXAMPLE.tolist(), [1, 1], at.tolist(), 1.0)
    assert scatter(wrong) > scatter(right)


@pytest.mark.parametrize("c", [0.3, 1.0])
def test_lorentz_factor_with_the_curvatures_sign_reversed(c):
    """γ = 1/√(1 + c|k|²) weighs far points least where they must weigh most."""
    k = 2 * EXAMPLE / (1 + c * EXAMPLE.square().sum(-1, keepdim=True))
    factor = (1 - c * k.square().sum(-1)).rsqrt()
    back = lambda k: k / (1 + (1 - c * k.square().sum(-1)).sqrt())
    right, wrong = back(mean(k, factor)), back(mean(k, (1 + c * k.square().sum(-1)).rsqrt()))
    ours = poincare.midpoint(EXAMPLE, c)
    assert_close(ours, right, 1e-12, "Klein formula over Klein coordinates")
    assert_close(ours, least_scattered(EXAMPLE, [1, 1], c), 1e-8, "midpoint by search")
    assert poincare.distance(ours, wrong, c) > {0.3: 0.05, 1.0: 0.3}[c]
    # The factor grows with the distance from the origin, as the time coordinate of the Lorentz form does.
    far = [oracle.poincare_distance([0, 0], x, c) * oracle.mp.sqrt(c) for x in EXAMPLE.tolist()]
    cosh = torch.tensor([float(oracle.mp.cosh(d)) for d in far], dtype=torch.float64)
    assert_close(factor, cosh, 1e-12, "cosh of the distance")


@pytest.mark.parametrize("c", [0.1, 0.5])
def test_artanh_without_the_root_of_c(c):
    """(2/√c) artanh |(-x) ⊕ y| agrees with the distance only at c = 1: here against the length of the geodesic."""
    x, y = EXAMPLE
    length = geodesic_length(x, y, c)
    moved = poincare.mobius_add(-x, y, c).norm()
    right = 2 / c**0.5 * torch.atanh(c**0.5 * moved)
    wrong = 2 / c**0.5 * torch.atanh(moved.clamp_max(1 - 1e-5))
    assert_close(poincare.distance(x, y, c), length, 1e-6, "distance")
    assert_close(right, length, 1e-6, "artanh with the root of c")
    assert wrong - length > 1
    v = poincare.logmap0(x, c)
    assert_close(2 * v.norm(), geodesic_length(torch.zeros_like(x), x, c), 1e-6, "logmap0")
    assert (torch.atanh(x.norm()) / c**0.5 * x / x.norm() - v).norm() > 0.3


def geodesic_length(x, y, c, steps=4000):
    """∫ λ |dx| along the circle through x and y that meets the rim at right angles, by the midpoint rule.

    The geodesic of the plane is that circle or a diameter: nothing but the metric and Euclidean geometry is used.
    """
    (a, b), (p, q) = x.tolist(), y.tolist()
    det = 2 * (a * q - b * p)
    t = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    if abs(det) < 1e-12:
        path = x + t[:, None] * (y - x)
    else:
        # centre o with |o - x|² = |o - y|² = |o|² - 1/c, that is 2 o·x = |x|² + 1/c and the same for y
        r, s = a * a + b * b + 1 / c, p * p + q * q + 1 / c
        centre = torch.tensor([(r * q - s * b) / det, (s * a - r * p) / det], dtype=torch.float64)
        start, end = (torch.atan2(*(z - centre).flip(0)) for z in (x, y))
        turn = torch.remainder(end - start + torch.pi, 2 * torch.pi) - torch.pi
        angle = start + t * turn
        path = centre + (x - centre).norm() * torch.stack([angle.cos(), angle.sin()], dim=-1)
    middle, step = (path[1:] + path[:-1]) / 2, (path[1:] - path[:-1]).norm(dim=-1)
    return (2 / (1 - c * middle.square().sum(-1)) * step).sum()
