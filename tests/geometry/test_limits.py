"""Where formulas of hyperbolic space break: flat space, the rim, coinciding points, the origin; and derivatives."""

import pytest
import torch

from hf_hyperattn import geometry as G
from hf_hyperattn.geometry import poincare, scalars
from tests.geometry import oracle
from tests.geometry.spaces import exact_distance, points, tangents
from tests.oracles.cases import assert_close

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])

# Functions of two sets of points and a curvature, in the ball: what gradients are checked of.
FUNCTIONS = {
    "project": lambda x, y, c: poincare.project(3 * x, c),
    "gap": lambda x, y, c: poincare.gap(x, c),
    "expmap0": lambda x, y, c: poincare.expmap0(x, c),
    "logmap0": lambda x, y, c: poincare.logmap0(x, c),
    "mobius_add": poincare.mobius_add,
    "distance": poincare.distance,
    "expmap": poincare.expmap,
    "logmap": poincare.logmap,
    "midpoint": lambda x, y, c: poincare.midpoint(x, c, (y @ x.mT).exp()),
    "midpoint, equal weights": lambda x, y, c: poincare.midpoint(x, c),
    "depth": lambda x, y, c: G.depth(x, c),
    "angular_similarity": lambda x, y, c: G.angular_similarity(x, y),
}


def leaves_of(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_in_the_ball(name):
    x, y = (
        points(4, 3, c=1.3, seed=1).requires_grad_(),
        points(4, 3, c=1.3, seed=2).requires_grad_(),
    )
    c = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(FUNCTIONS[name], (x, y, c))


@pytest.mark.parametrize("name", ["tanh", "artanh", "asinh"])
def test_scalars_and_their_derivatives(name):
    """Value and derivative in u, on both sides of the limit of the series."""
    mp, function = oracle.mp, getattr(scalars, name + "c")
    exact = {"artanh": mp.atanh}.get(name) or getattr(mp, name)
    edge = scalars.SERIES_LIMIT
    u = torch.tensor([1e-12, 1e-4, edge * 0.999, edge, edge * 1.001, 0.3, 0.9], dtype=torch.float64)

    def f(v):
        return exact(mp.sqrt(v)) / mp.sqrt(v)

    u.requires_grad_()
    (grad,) = torch.autograd.grad(function(u).sum(), u)
    expected = [
        [float(f(mp.mpf(v))), float(mp.diff(f, mp.mpf(v), h=mp.mpf(v) / 10**15))]
        for v in u.tolist()
    ]
    value, slope = torch.tensor(expected, dtype=torch.float64).unbind(-1)
    assert_close(function(u), value, 1e-15 * 4, "value")
    assert_close(grad, slope, 1e-12, "derivative")
    zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    assert function(zero).item() == 1
    assert torch.autograd.grad(function(zero).sum(), zero)[0].item() == pytest.approx(
        float(slope[0]), abs=1e-9
    )


# c -> 0.


@DTYPES
@pytest.mark.parametrize("c", [0.0, 1e-12, 1e-6])
def test_flat_limit(c, dtype):
    """The ball becomes flat space with the metric 2|dx|."""
    x, y = tangents(20, 4, seed=5, dtype=dtype), tangents(20, 4, seed=6, dtype=dtype)
    weights = tangents(3, 20, seed=7, dtype=dtype).exp()
    tolerance = max(100 * c, 1e-5 if dtype == torch.float32 else 1e-12)
    for what, got, flat in (
        ("expmap0", poincare.expmap0(x, c), x),
        ("logmap0", poincare.logmap0(x, c), x),
        ("mobius_add", poincare.mobius_add(x, y, c), x + y),
        ("distance", poincare.distance(x, y, c), 2 * (x - y).norm(dim=-1)),
        ("expmap", poincare.expmap(x, y, c), x + y),
        ("logmap", poincare.logmap(x, y, c), y - x),
        ("midpoint", poincare.midpoint(x, c, weights), weights @ x / weights.sum(-1, keepdim=True)),
    ):
        assert_close(got, flat, tolerance, what)


@DTYPES
def test_curvature_has_a_gradient_down_to_zero(dtype):
    """d(distance)/dc at c = 0, from the series in c: central differences in 50 digits."""
    x, y = (
        points(8, 3, seed=8, reach=0.5, dtype=dtype),
        points(8, 3, seed=9, reach=0.5, dtype=dtype),
    )
    for start in (0.0, 1e-10, 1e-4):
        c = torch.tensor(start, dtype=dtype, requires_grad=True)
        (grad,) = torch.autograd.grad(poincare.distance(x, y, c).sum(), c)
        h = oracle.mpf("1e-12")
        slope = [
            (
                oracle.poincare_distance(a, b, start + 2 * h)
                - oracle.poincare_distance(a, b, start + h)
            )
            / h
            for a, b in zip(x.tolist(), y.tolist())
        ]
        assert float(grad) == pytest.approx(float(sum(slope)), rel=1e-5)
    for name in set(FUNCTIONS) - {"depth", "angular_similarity"}:
        leaves = leaves_of(x, y, torch.zeros((), dtype=dtype))
        FUNCTIONS[name](*leaves).sum().backward()
        assert all(leaf.grad is None or leaf.grad.isfinite().all() for leaf in leaves), name


# The rim.


@DTYPES
@pytest.mark.parametrize("size", [1.0, 10.0, 1e4, 1e18])
def test_long_tangent_vectors_stay_in_the_ball(size, dtype):
    v = tangents(20, 4, seed=10, dtype=dtype) * size
    for c in (0.1, 1.0, 7.0):
        x = poincare.expmap0(v, c)
        assert (c**0.5 * x.norm(dim=-1) <= poincare.LIMIT + 1e-7).all()
        assert x.isfinite().all() and poincare.logmap0(x, c).isfinite().all()


@DTYPES
@pytest.mark.parametrize("reach", [1 - 1e-5, 1.0, 1.5])
def test_all_is_finite_at_and_beyond_the_rim(reach, dtype):
    directions = tangents(8, 3, seed=11, dtype=dtype)
    rim = directions / directions.norm(dim=-1, keepdim=True) * reach
    others = torch.cat([rim.flip(0)[:4], points(4, 3, seed=12, dtype=dtype)])
    for name, function in FUNCTIONS.items():
        leaves = leaves_of(rim, others, torch.ones((), dtype=dtype))
        out = function(*leaves)
        assert out.isfinite().all(), name
        out.sum().backward()
        assert all(leaf.grad is None or leaf.grad.isfinite().all() for leaf in leaves), name


def test_distances_near_the_rim_in_float64():
    """At 1 - 1e-5, the farthest that `project` lets through: 12 from the origin at c = 1."""
    x = points(40, 3, seed=13)
    x = poincare.project(x / x.norm(dim=-1, keepdim=True) * 2, 1.0)
    y = x.roll(1, 0)
    assert_close(poincare.distance(x, y, 1.0), exact_distance(x, y, 1.0), 1e-9, "distance")


def test_float32_distances_far_out():
    """Of points lifted from float32 tangent vectors of geodesic radius up to 8; exact: lifted in float64."""
    v = tangents(60, 8, seed=14)
    v = (v / v.norm(dim=-1, keepdim=True) * torch.linspace(0.1, 4, 60)[:, None]).float()
    v[30:40] = v[20:30] * 1.0001  # near neighbours
    x, exact = poincare.expmap0(v, 1.0), poincare.expmap0(v.double(), 1.0)
    for shift in (7, 10):
        got = poincare.distance(x, x.roll(shift, 0), 1.0)
        assert_close(got, exact_distance(exact, exact.roll(shift, 0), 1.0), 1e-3, "distance")


# Coinciding points and the origin.


@DTYPES
def test_distance_of_a_point_to_itself_has_gradient_zero(dtype):
    x = points(6, 3, seed=15, dtype=dtype)
    x[0] = 0
    p, q = leaves_of(x, x)
    d = poincare.distance(p, q, 1.0)
    assert d.eq(0).all()
    for grad in torch.autograd.grad(d.sum(), (p, q)):
        assert grad.eq(0).all()


@DTYPES
def test_gradients_at_the_origin(dtype):
    """exp0 and log0 are the identity to first order, and the distance of the origin grows like the metric there."""
    v = torch.zeros(4, dtype=dtype)
    jacobian = torch.func.jacrev(lambda v: poincare.logmap0(poincare.expmap0(v, 1.0), 1.0))(v)
    assert_close(jacobian, torch.eye(4), 1e-6, "log0 exp0")
    y = poincare.expmap0(tangents(4, seed=16, scale=0.5, dtype=dtype), 1.0)
    grad = torch.func.grad(lambda v: poincare.distance(poincare.expmap0(v, 1.0), y, 1.0))(v)
    assert_close(
        grad, -2 * torch.nn.functional.normalize(y, dim=0), 1e-5, "gradient of the distance"
    )


@DTYPES
@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-18])
def test_gradient_of_small_distances_is_the_metric(gap, dtype):
    x = points(10, 3, seed=17, reach=0.5).to(dtype) * 0  # at the origin floats resolve any step
    step = torch.nn.functional.normalize(tangents(10, 3, seed=18, dtype=dtype), dim=-1) * gap
    y = (x + step).requires_grad_()
    (grad,) = torch.autograd.grad(poincare.distance(x, y, 1.0).sum(), y)
    assert_close(grad, 2 * step / gap, 1e-4, "gradient")
