"""geoopt as an oracle, where it is installed."""

import pytest
import torch

from hf_hyperattn import geometry as G
from hf_hyperattn.geometry import poincare
from tests.geometry.spaces import points, tangents
from tests.oracles.cases import assert_close

geoopt = pytest.importorskip("geoopt")


@pytest.fixture(params=[0.3, 1.0, 4.0])
def c(request):
    return request.param


@pytest.fixture
def ball(c):
    return geoopt.PoincareBall(c=torch.tensor(c, dtype=torch.float64))


def test_the_ball(ball, c):
    x, y = points(40, 4, c=c, seed=1), points(40, 4, c=c, seed=2)
    v = tangents(40, 4, seed=3, scale=0.3 / c**0.5)
    for what, got, expected in (
        ("distance", poincare.distance(x, y, c), ball.dist(x, y)),
        ("⊕", poincare.mobius_add(x, y, c), ball.mobius_add(x, y)),
        ("expmap", poincare.expmap(x, v, c), ball.expmap(x, v)),
        ("logmap", poincare.logmap(x, y, c), ball.logmap(x, y)),
        ("expmap0", poincare.expmap0(v, c), ball.expmap0(v)),
        ("logmap0", poincare.logmap0(x, c), ball.logmap0(x)),
        ("gap", 2 / poincare.gap(x, c), ball.lambda_x(x)),
    ):
        assert_close(got, expected, 1e-9 / c**0.5 if what != "gap" else 1e-9, what)


def test_midpoints(ball, c):
    x, weights = points(6, 4, c=c, seed=4), tangents(6, seed=5).exp()
    expected = ball.weighted_midpoint(x, weights=weights)
    assert_close(poincare.midpoint(x, c, weights[None])[0], expected, 1e-9 / c**0.5, "midpoint")


def test_gradients(ball, c):
    x, y = points(10, 4, c=c, seed=6).requires_grad_(), points(10, 4, c=c, seed=7).requires_grad_()
    ours = torch.autograd.grad(poincare.distance(x, y, c).sum(), (x, y))
    theirs = torch.autograd.grad(ball.dist(x, y).sum(), (x, y))
    for a, b in zip(ours, theirs):
        assert_close(a, b, 1e-7, "gradient of the distance")


def test_lorentz(c):
    """geoopt's k is 1/c: the squared radius of the hyperboloid."""
    x, y = (G.poincare_to_lorentz(points(40, 4, c=c, seed=s), c) for s in (8, 9))
    manifold = geoopt.Lorentz(k=torch.tensor(1 / c, dtype=torch.float64))
    assert_close(G.lorentz.distance(x, y, c), manifold.dist(x, y), 1e-6 / c**0.5, "distance")
    assert_close(G.lorentz.inner(x, y), manifold.inner(None, x, y), 1e-10 / c, "inner product")
