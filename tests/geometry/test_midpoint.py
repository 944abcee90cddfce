"""Einstein midpoints; and three errors of a published source (reference mathematics B2), each shown to be one.

That source writes the midpoint's Klein formula over Poincaré coordinates, takes the curvature with the wrong sign in
the Lorentz factor, and leaves √c out of artanh. The wrong formulas are written out here; every test fails if ours is
replaced by the wrong one.
"""

import pytest
import torch

from hf_hyperattn import geometry as G
from hf_hyperattn.geometry import klein, poincare
from tests.geometry import oracle
from tests.geometry.spaces import CURVATURES, MAPS, MODELS, points, tangents
from tests.oracles.cases import assert_close

every_curvature = pytest.mark.parametrize("c", CURVATURES)
EXAMPLE = torch.tensor([[0.6, 0.0], [0.0, 0.8]], dtype=torch.float64)


def geodesic_midpoint(x, y, c):
    """Halfway from x to y: of two points of equal weight, the only midpoint that symmetry allows."""
    return poincare.expmap(x, poincare.logmap(x, y, c) / 2, c)


def least_scattered(x, weights, c):
    """The point that minimises Σ w cosh(√c d), by search in 50 digits over points of the plane."""
    start = [float(v) for v in x.mean(0)]
    found = oracle.minimum(
        lambda at: oracle.scattered(oracle.poincare_distance, x.tolist(), weights, at, c),
        start,
        step=0.1 / c**0.5,
    )
    return torch.tensor([float(v) for v in found], dtype=torch.float64)


@every_curvature
def test_of_two_points_it_is_the_middle_of_their_geodesic(c):
    x, y = points(20, 3, c=c, seed=1), points(20, 3, c=c, seed=2)
    m = poincare.midpoint(torch.stack([x, y], dim=-2), c)
    half = poincare.distance(x, y, c) / 2
    assert_close(poincare.distance(x, m, c), half, 1e-9 / c**0.5, "distance from x")
    assert_close(poincare.distance(m, y, c), half, 1e-9 / c**0.5, "distance from y")


@pytest.mark.parametrize("c", [0.3, 1.0, 4.0])
def test_it_has_the_least_squared_lorentz_distance(c):
    x, weights = points(5, 2, c=c, seed=3), [0.1, 0.5, 1.0, 2.0, 0.4]
    m = poincare.midpoint(x, c, torch.tensor([weights], dtype=torch.float64))[0]
    assert_close(m, least_scattered(x, weights, c), 1e-8, "midpoint")


@every_curvature
@pytest.mark.parametrize("name", MAPS)
def test_it_is_the_same_in_every_model(name, c):
    model, x = MODELS[name], points(4, 7, 3, c=c, seed=4)
    weights = tangents(4, 5, 7, seed=5).exp()
    got = model.leave(model.module.midpoint(model.enter(x, c), c, weights), c)
    assert_close(got, poincare.midpoint(x, c, weights), 1e-12 / c**0.5, name)
    equal = model.leave(model.module.midpoint(model.enter(x, c), c), c)
    assert_close(
        equal, poincare.midpoint(x, c, torch.full((4, 1, 7), 3.0))[:, 0], 1e-12 / c**0.5, "equal weights"
    )


@pytest.mark.parametrize("name", MAPS)
def test_it_moves_with_the_points(name):
    """A translation of the space carries midpoints to midpoints."""
    x, a, weights = points(7, 3, seed=6), points(1, 3, seed=7), tangents(5, 7, seed=8).exp()
    model = MODELS[name]

    def midpoint(x):
        return model.leave(model.module.midpoint(model.enter(x, 1.0), 1.0, weights), 1.0)

    moved = midpoint(poincare.mobius_add(a, x, 1.0))
    assert_close(moved, poincare.mobius_add(a, midpoint(x), 1.0), 1e-11, name)


@pytest.mark.parametrize("name", MAPS)
def test_scale_of_the_weights_and_points_of_weight_zero_do_not_matter(name):
    model, x, weights = MODELS[name], points(7, 3, seed=9), tangents(5, 7, seed=10).exp()
    weights[:, 2] = 0
    p = model.enter(x, 1.0)
    keep = [0, 1, 3, 4, 5, 6]
    got = model.module.midpoint(p, 1.0, 100 * weights)
    assert_close(got, model.module.midpoint(p[keep], 1.0, weights[:, keep]), 1e-10, name)


def test_all_weight_on_one_point_near_the_rim_in_float32():
    """t² - c|s|² is 1e-10 of t² there, which float32 sums would lose."""
    x = poincare.project(tangents(9, 5, seed=11, dtype=torch.float32) * 50, 1.0)
    m = poincare.midpoint(x, 1.0, torch.eye(9))
    assert poincare.distance(m, x, 1.0).max() < 0.05
    assert (m.norm(dim=-1) < 1).all()


# The published errors.


def test_klein_formula_over_poincare_coordinates_is_wrong():
    """Off by 0.29 in hyperbolic distance for (0.6, 0) and (0, 0.8) at c = 1."""
    right = poincare.midpoint(EXAMPLE, 1.0)
    factor = klein.lorentz_factor(EXAMPLE, 1.0)  # γ of Klein coordinates, given Poincaré ones
    wrong = (factor @ EXAMPLE) / factor.sum()
    assert poincare.distance(right, wrong, 1.0).item() == pytest.approx(0.29, abs=0.005)
    assert_close(right, geodesic_midpoint(*EXAMPLE, 1.0), 1e-12, "midpoint")
    assert_close(right, least_scattered(EXAMPLE, [1, 1], 1.0), 1e-8, "midpoint by search")
    assert oracle.scattered(oracle.poincare_distance, EXAMPLE.tolist(), [1, 1], wrong.tolist(), 1.0) > (
        oracle.scattered(oracle.poincare_distance, EXAMPLE.tolist(), [1, 1], right.tolist(), 1.0)
    )


@pytest.mark.parametrize("c", [0.3, 1.0])
def test_lorentz_factor_with_the_curvatures_sign_reversed_is_wrong(c):
    """γ = 1/√(1 + c|k|²) weighs far points least where they must weigh most."""
    k = G.poincare_to_klein(EXAMPLE, c)
    factor = (1 + c * k.square().sum(-1)).rsqrt()
    wrong = G.klein_to_poincare((factor @ k) / factor.sum(), c)
    right = G.klein_to_poincare(klein.midpoint(k, c), c)
    assert_close(right, least_scattered(EXAMPLE, [1, 1], c), 1e-8, "midpoint by search")
    assert_close(right, geodesic_midpoint(*EXAMPLE, c), 1e-12, "midpoint")
    assert poincare.distance(right, wrong, c) > {0.3: 0.05, 1.0: 0.3}[c]
    # The factor is the time coordinate of the Lorentz form, which grows with the distance from the origin.
    time = G.poincare_to_lorentz(EXAMPLE, c)[:, 0] * c**0.5
    assert_close(klein.lorentz_factor(k, c), time, 1e-12, "Lorentz factor")
    distance = poincare.distance(torch.zeros(2, dtype=torch.float64), EXAMPLE, c)
    assert_close(klein.lorentz_factor(k, c), torch.cosh(c**0.5 * distance), 1e-12, "cosh of the distance")


@pytest.mark.parametrize("c", [0.1, 0.5])
def test_artanh_without_the_root_of_c_is_wrong(c):
    """(2/√c) artanh |(-x) ⊕ y| agrees with the distance only at c = 1: here against the length of the geodesic."""
    x, y = EXAMPLE
    length = geodesic_length(x, y, c)
    moved = poincare.mobius_add(-x, y, c).norm()
    right, wrong = (
        2 / c**0.5 * torch.atanh(c**0.5 * moved),
        2 / c**0.5 * torch.atanh(moved.clamp_max(1 - 1e-5)),
    )
    assert_close(poincare.distance(x, y, c), length, 1e-6, "distance")
    assert_close(right, length, 1e-6, "artanh with the root of c")
    assert wrong - length > 1
    v = poincare.logmap0(x, c)
    wrong_log = torch.atanh(x.norm()) / c**0.5 * x / x.norm()
    assert_close(2 * v.norm(), geodesic_length(torch.zeros_like(x), x, c), 1e-6, "logmap0")
    assert (wrong_log - v).norm() > 0.3


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
