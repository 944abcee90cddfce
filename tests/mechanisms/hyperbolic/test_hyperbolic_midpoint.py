"""The Einstein midpoint against its definition. No engine here."""

import mpmath
import numpy as np
import pytest
import torch

from hf_hyperattn.functional import hyperbolic_scores
from hf_hyperattn.mechanisms.hyperbolic.midpoint import midpoint, midpoint_columns
from tests.mechanisms.hyperbolic.hyperbolic_cases import at_radius
from tests.oracles import hyperbolic as oracle
from tests.oracles.cases import DTYPES, assert_close, assert_gradients, tensor
from tests.oracles.marks import both_dtypes


def middle(weights, v, curvature=1.0, scale=1.0, **rest):
    """Midpoints of values [L, d] by weights [N, L], through the columns."""
    c = torch.as_tensor(curvature, dtype=torch.float64).reshape(-1)
    columns = midpoint_columns(v[None, None], c, scale)
    return midpoint(weights.to(columns.dtype)[None, None] @ columns, c, scale, **rest)[0, 0]


@pytest.mark.parametrize("c", [0.2, 1.0, 3.0])
def test_midpoint_is_the_klein_midpoint(c):
    v, weights = (
        tensor(6, 3, seed=50, scale=1.5),
        torch.softmax(tensor(4, 6, seed=51, scale=3.0), -1),
    )
    expected = oracle.midpoints(weights[None, None], v[None, None], curvature=c, scale=0.7)[0, 0]
    assert_close(middle(weights, v, c, 0.7), expected, 1e-10, "midpoint")


@pytest.mark.parametrize("c", [0.2, 3.0])
def test_midpoint_minimises_the_squared_lorentz_distance(c):
    """A search around it finds no point with a smaller weighted sum: a property no formula above knows of."""
    v, weights = tensor(5, 3, seed=52, scale=1.5), torch.softmax(tensor(1, 5, seed=53), -1)

    def cost(u):
        return (
            weights
            * -hyperbolic_scores(
                u[None, None], v[None, None], scale=1.0, curvature=c, distance="squared_lorentz"
            )[0, 0]
        ).sum(-1)

    best = middle(weights, v, c)
    steps = tensor(200, 3, seed=54)
    for size in (1e-1, 1e-3):
        assert (cost(best + steps * size) > cost(best)).all()


def test_midpoint_of_two_equal_weights_is_halfway():
    x, y = tensor(2, 1, 3, seed=55)
    half = middle(torch.full((1, 2), 0.5), torch.cat([x, y]))[None, None]
    to_x, to_y, across = (
        -hyperbolic_scores(a, b, scale=1.0)
        for a, b in ((half, x[None, None]), (half, y[None, None]), (x[None, None], y[None, None]))
    )
    assert_close(to_x, across / 2, 1e-10, "distance to one end")
    assert_close(to_y, across / 2, 1e-10, "distance to the other end")


@pytest.mark.parametrize("c", [0.25, 4.0])
@pytest.mark.parametrize(
    "wrong", ["Poincaré coordinates taken for Klein", "sign of c", "no root of c in artanh"]
)
def test_known_wrong_midpoints_are_others(c, wrong):
    """The three slips of a known source: no conversion to Klein, 1 + c|k|² in the Lorentz factor, artanh without √c."""
    v, w = tensor(2, 2, seed=56, scale=0.9), [0.3, 0.7]
    got = middle(torch.tensor([w], dtype=torch.float64), v, c)[0]
    with mpmath.workdps(30):
        points = [oracle.lift(x, mpmath.mpf(c), mpmath.mpf(1)) for x in v]
        right = oracle.logmap0(oracle.klein_midpoint(w, points, c), c)
        assert_close(got, np.array([float(a) for a in right]), 1e-10, "midpoint")
        if wrong == "no root of c in artanh":
            m = oracle.klein_midpoint(w, points, c)
            r = oracle.norm(m)
            other = [mpmath.re(mpmath.atanh(r)) * a / r for a in m]
        else:
            plain = wrong.startswith("Poincaré")
            klein = (
                points
                if plain
                else [[2 * a / (1 + c * oracle.norm(x) ** 2) for a in x] for x in points]
            )
            gamma = [
                1 / mpmath.sqrt(1 - (1 if plain else -1) * c * oracle.norm(k) ** 2) for k in klein
            ]
            total = sum(a * g for a, g in zip(w, gamma))
            m = [sum(a * g * k[i] for a, g, k in zip(w, gamma, klein)) / total for i in range(2)]
            m = m if plain else [a / (1 + mpmath.sqrt(1 - c * oracle.norm(m) ** 2)) for a in m]
            other = oracle.logmap0(m, c)
    assert max(abs(float(a) - float(g)) for a, g in zip(other, got)) > 2e-3


@both_dtypes
@pytest.mark.parametrize("length", [1e-6, 1.0, 4.0, 6.0])
def test_midpoint_of_one_value_is_that_value(dtype, length):
    """Out to a geodesic radius of 12: what a token that sees only itself gets back."""
    v = at_radius(tensor(5, 8, seed=57), 2 * length).to(DTYPES[dtype])
    v = torch.cat([v, v[:1]])
    got = middle(torch.eye(6), v)
    assert_close(got, v, (1e-12 if dtype == "float64" else 1e-6) * length, "midpoint")
    same = middle(torch.full((1, 2), 0.5), v[[0, 5]])
    assert_close(
        same[0], v[0], (1e-12 if dtype == "float64" else 1e-5) * length, "midpoint of equal values"
    )


@pytest.mark.parametrize("radius, atol", [(1.0, 1e-5), (2.0, 1e-5), (4.0, 1e-4), (6.0, 1e-3)])
def test_float32_midpoints_far_out(radius, atol):
    towards = tensor(6, 8, seed=58) * 0.4 + tensor(8, seed=59)
    v, weights = (
        at_radius(towards, radius).float(),
        torch.softmax(tensor(5, 6, seed=60, scale=3.0), -1).float(),
    )
    expected = oracle.midpoints(weights[None, None], v[None, None], scale=1.0)[0, 0]
    assert_close(middle(weights, v), expected, atol, "midpoint")


@pytest.mark.parametrize("dtype, c", [("float64", 1e-12), ("float32", 1e-8), ("float32", 1e-20)])
def test_without_curvature_the_midpoint_is_the_mean(dtype, c):
    v, weights = (
        tensor(6, 3, seed=61, dtype=DTYPES[dtype]),
        torch.softmax(tensor(4, 6, seed=62), -1),
    )
    got = middle(weights, v, c, 0.6)
    assert_close(got, weights @ v.double(), 1e-9 if dtype == "float64" else 1e-6, "midpoint")


def test_weight_that_a_sink_takes_lies_at_the_origin():
    v, weights = tensor(6, 3, seed=63), torch.softmax(tensor(4, 6, seed=64), -1) * 0.6
    expected = oracle.midpoints(weights[None, None], v[None, None], curvature=0.8, scale=1.0)[0, 0]
    assert_close(middle(weights, v, 0.8, sinks=True), expected, 1e-10, "midpoint")
    flat = middle(weights, v, 1e-12, sinks=True)
    assert_close(flat, weights @ v, 1e-9, "limit c -> 0")


def test_midpoint_gradients():
    v, c = (
        tensor(5, 3, seed=65).requires_grad_(),
        torch.tensor([0.7], dtype=torch.float64, requires_grad=True),
    )
    weights = torch.softmax(tensor(4, 5, seed=66), -1).requires_grad_()
    assert torch.autograd.gradcheck(lambda w, v, c: middle(w, v, c, 0.6), (weights, v, c))
    zeros = torch.zeros(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: middle(weights.detach(), v), (zeros,))
    eye = torch.eye(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: middle(eye, v), (v,))


@both_dtypes
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-4, 1.0, 6.1, 1e2, 1e30])
def test_midpoints_and_gradients_stay_finite(dtype, scale):
    v = tensor(6, 4, seed=67, scale=scale, dtype=DTYPES[dtype])
    v[1], v[2] = v[0], -v[0]
    weights = torch.cat(
        [torch.softmax(tensor(3, 6, seed=68), -1), torch.eye(6)[:2], torch.zeros(1, 6)]
    )
    leaves = [weights.to(v.dtype).requires_grad_(), v.requires_grad_()]
    out = middle(*leaves)
    assert torch.isfinite(out).all() and not out[-1].any()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), leaves))


def test_dense_midpoints_agree_with_the_loops():
    v, weights = tensor(1, 1, 6, 3, seed=69), torch.softmax(tensor(1, 2, 4, 6, seed=70), -1)
    c = torch.tensor([0.4, 1.7], dtype=torch.float64)
    assert_close(
        oracle.dense_midpoints(weights, v, curvature=c),
        oracle.midpoints(weights, v, curvature=c),
        1e-11,
        "",
    )
    leaves = [weights.requires_grad_(), v.requires_grad_(), c.requires_grad_()]
    ours = midpoint(weights @ midpoint_columns(v, c, 3**-0.5), c, 3**-0.5)
    plain = oracle.dense_midpoints(*leaves[:2], curvature=c)
    pull = tensor(*plain.shape, seed=71)
    grads = [torch.autograd.grad((o * pull).sum(), leaves) for o in (ours, plain)]
    # the sum of a row's weights is 1: only then does the Lorentz form know where the origin is
    assert_gradients(grads[0][1:], grads[1][1:], 1e-8, ("value", "curvature"))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_columns_without_gradients_are_those_with(heads, dtype):
    """Vectors of length 0, tiny, long, and as long as float32 holds among them."""
    value = torch.randn(
        2, 2, 3000, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    value *= torch.tensor([0.0, 1e-30, 1e-15, 1e-4, 1.0, 30.0, 1e5, 1e30]).repeat(375)[:, None]
    value, curvature = value.to(dtype), torch.linspace(0.5, 3, heads)
    expected = midpoint_columns(value.clone().requires_grad_(), curvature, 0.3).detach()
    found = midpoint_columns(value, curvature, 0.3)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert_close(found, expected, 1e-6 * expected.abs().max(), "columns")
    assert_close(
        found[:, :, 3::8],
        expected[:, :, 3::8],
        1e-6 * expected[:, :, 3::8].abs().max(),
        "short ones",
    )
