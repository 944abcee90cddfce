"""The Poincaré ball against textbook formulas in 50 digits, against geoopt, and by its own laws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperattn import geometry
from hf_hyperattn.geometry import poincare
from tests.geometry import oracle
from tests.geometry.spaces import CURVATURES, exact_distance, points, tangents
from tests.oracles.cases import assert_close

QUICK = settings(max_examples=25, deadline=None)
every_curvature = pytest.mark.parametrize("c", CURVATURES)


@every_curvature
def test_distances_are_the_textbooks(c):
    x, y = points(30, 3, c=c, reach=0.97, seed=1), points(30, 3, c=c, reach=0.97, seed=2)
    assert_close(poincare.distance(x, y, c), exact_distance(x, y, c), 1e-9, "distance")


@pytest.mark.parametrize("c", [0.3, 1.0, 4.0])
def test_geoopt_agrees(c):
    geoopt = pytest.importorskip("geoopt")
    ball = geoopt.PoincareBall(c=torch.tensor(c, dtype=torch.float64))
    x, y = points(40, 4, c=c, seed=1), points(40, 4, c=c, seed=2)
    v = tangents(40, 4, seed=3, scale=0.3 / c**0.5)
    weights = tangents(40, seed=5).exp()
    for what, got, expected in (
        ("distance", poincare.distance(x, y, c), ball.dist(x, y)),
        ("⊕", poincare.mobius_add(x, y, c), ball.mobius_add(x, y)),
        ("expmap", poincare.expmap(x, v, c), ball.expmap(x, v)),
        ("logmap", poincare.logmap(x, y, c), ball.logmap(x, y)),
        ("expmap0", poincare.expmap0(v, c), ball.expmap0(v)),
        ("logmap0", poincare.logmap0(x, c), ball.logmap0(x)),
        ("gap", 2 / poincare.gap(x, c) / c**0.5, ball.lambda_x(x) / c**0.5),
        (
            "midpoint",
            poincare.midpoint(x, c, weights[None])[0],
            ball.weighted_midpoint(x, weights=weights),
        ),
    ):
        assert_close(got, expected, 1e-9 / c**0.5, what)
    x.requires_grad_(), y.requires_grad_()
    ours = torch.autograd.grad(poincare.distance(x, y, c).sum(), (x, y))
    theirs = torch.autograd.grad(ball.dist(x, y).sum(), (x, y))
    for a, b in zip(ours, theirs):
        assert_close(a, b, 1e-7, "gradient of the distance")


@QUICK
@given(
    seed=st.integers(0, 10_000),
    c=st.floats(1e-3, 10),
    t=st.floats(0, 1),
    reach=st.sampled_from([1e-6, 0.5, 0.99, 0.99999]),
)
def test_a_metric_with_geodesics(seed, c, t, reach):
    x, y, z = points(3, 4, c=c, reach=reach, seed=seed)
    xy, yz, xz = (poincare.distance(a, b, c) for a, b in ((x, y), (y, z), (x, z)))
    assert xz <= xy + yz + 1e-9 / c**0.5
    assert abs(xy - poincare.distance(y, x, c)) < 1e-8 / c**0.5
    assert poincare.distance(x, x, c) == 0
    x, y = x * 0.9, y * 0.9
    m = poincare.expmap(x, t * poincare.logmap(x, y, c), c)
    sides = poincare.distance(x, m, c) + poincare.distance(m, y, c)
    assert_close(sides, poincare.distance(x, y, c), 1e-9 / c**0.5, "distances along a geodesic")


@every_curvature
def test_exp_and_log(c):
    """Inverses of each other; the logarithm's length is the distance; at the origin they are exp0 and log0."""
    x, y = points(50, 4, c=c, seed=9), points(50, 4, c=c, seed=10)
    v, origin = tangents(50, 4, seed=11, scale=0.5 / c**0.5), torch.zeros(1, 4, dtype=torch.float64)
    near, log = points(50, 4, c=c, reach=0.6, seed=12), poincare.logmap(x, y, c)
    small = 1e-9 / c**0.5
    assert_close(poincare.expmap(x, log, c), y, small, "exp log")
    assert_close(poincare.logmap(near, poincare.expmap(near, v, c), c), v, small, "log exp")
    assert_close(poincare.expmap0(poincare.logmap0(x, c), c), x, small, "exp0 log0")
    assert_close(poincare.logmap0(poincare.expmap0(v, c), c), v, small, "log0 exp0")
    assert_close(
        2 * log.norm(dim=-1) / poincare.gap(x, c), poincare.distance(x, y, c), small, "length"
    )
    assert_close(poincare.expmap(origin, v, c), poincare.expmap0(v, c), small, "exp at the origin")
    assert_close(poincare.logmap(origin, x, c), poincare.logmap0(x, c), small, "log at the origin")
    assert_close(
        poincare.distance(origin, poincare.expmap0(v, c), c), 2 * v.norm(dim=-1), small, "radius"
    )


@every_curvature
def test_mobius_addition(c):
    a, x, y = (points(50, 4, c=c, seed=s) for s in (17, 18, 19))
    xy, x2, y2 = ((u * v).sum(-1, keepdim=True) for u, v in ((x, y), (x, x), (y, y)))
    textbook = ((1 + 2 * c * xy + c * y2) * x + (1 - c * x2) * y) / (
        1 + 2 * c * xy + c**2 * x2 * y2
    )
    total = poincare.mobius_add(x, y, c)
    assert_close(total, textbook, 1e-12 / c**0.5, "x ⊕ y")
    assert_close(poincare.mobius_add(-x, total, c), y, 1e-10 / c**0.5, "(-x) ⊕ (x ⊕ y)")
    assert_close(poincare.mobius_add(x, torch.zeros_like(x), c), x, 1e-15 / c**0.5, "x ⊕ 0")
    moved = poincare.distance(poincare.mobius_add(a, x, c), poincare.mobius_add(a, y, c), c)
    assert_close(moved, poincare.distance(x, y, c), 1e-9 / c**0.5, "distances after a translation")


def test_near_points_keep_their_digits():
    """The textbook's form of (-x) ⊕ y leaves about 1e-16 of a difference of 1e-12; ours keeps 1e-15 of it."""
    x = points(20, 4, seed=23)
    moved = x + tangents(20, 4, seed=24, scale=1e-12)
    exact = (moved - x) / poincare.gap(x, 1.0)[:, None]
    assert (
        (poincare.mobius_add(-x, moved, 1.0) - exact).norm(dim=-1) <= 1e-9 * exact.norm(dim=-1)
    ).all()
    d = exact_distance(x, moved, 1.0)
    torch.testing.assert_close(poincare.distance(x, moved, 1.0), d, rtol=1e-12, atol=0)


def test_the_cone_rooms_exponential_map_is_this_one():
    """Its points of the half space are the ball's, by the inversion that takes 0 to (0, 1)."""
    from hf_hyperattn.mechanisms.cone.reference import height_and_stretch, horizontal

    v = tangents(30, 4, seed=25)
    height, stretch = height_and_stretch(v, "expmap")
    x = poincare.expmap0(v / 2, 1.0)
    below = x - torch.tensor([0.0, 0.0, 0.0, 1.0])
    image = torch.cat([2 * x[:, :-1], 1 - x.square().sum(-1, keepdim=True)], dim=-1)
    image = image / below.square().sum(-1, keepdim=True)
    assert_close(
        torch.cat([horizontal(v, stretch), height[:, None]], dim=-1), image, 1e-10, "half space"
    )


@every_curvature
def test_depth_grows_with_the_distance_from_the_origin(c):
    x = points(50, 4, c=c, seed=26)
    rho = c**0.5 * poincare.distance(torch.zeros_like(x), x, c)
    assert_close(geometry.depth(x, c), torch.expm1(rho) / 2, 1e-10, "(e^ρ - 1)/2")
    reach = c**0.5 * x.norm(dim=-1)
    assert_close(geometry.depth(x, c), reach / (1 - reach), 1e-10, "√c|x| / (1 - √c|x|)")


def test_angular_similarity():
    x, y = points(50, 4, seed=27), points(50, 4, seed=28)
    assert_close(
        geometry.angular_similarity(x, y), torch.cosine_similarity(x, y, dim=-1), 1e-12, "cosine"
    )
    zero = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    assert geometry.angular_similarity(zero, y).eq(0).all()
    geometry.angular_similarity(zero, y).sum().backward()
    assert zero.grad.isfinite().all()


# Midpoints.


def least_scattered(x, weights, c):
    """The point that minimises Σ w cosh(√c d), by search in 50 digits over points of the plane."""
    at = oracle.minimum(
        lambda at: oracle.scattered(x.tolist(), weights, at, c),
        x.mean(0).tolist(),
        step=0.1 / c**0.5,
    )
    return torch.tensor([float(v) for v in at], dtype=torch.float64)


@pytest.mark.parametrize("c", [0.3, 4.0])
def test_the_midpoint_has_the_least_squared_lorentz_distance(c):
    x, weights = points(5, 2, c=c, seed=3), [0.1, 0.5, 1.0, 2.0, 0.4]
    m = poincare.midpoint(x, c, torch.tensor([weights], dtype=torch.float64))[0]
    assert_close(m, least_scattered(x, weights, c), 1e-8, "midpoint")


@every_curvature
def test_the_midpoint_of_two_points_is_the_middle_of_their_geodesic(c):
    x, y = points(20, 3, c=c, seed=1), points(20, 3, c=c, seed=2)
    m = poincare.midpoint(torch.stack([x, y], dim=-2), c)
    half = poincare.distance(x, y, c) / 2
    assert_close(poincare.distance(x, m, c), half, 1e-9 / c**0.5, "distance from x")
    assert_close(poincare.distance(m, y, c), half, 1e-9 / c**0.5, "distance from y")


def test_midpoints_move_with_the_points_and_ignore_the_weights_scale():
    x, a, weights = points(7, 3, seed=6), points(1, 3, seed=7), tangents(5, 7, seed=8).exp()
    weights[:, 2] = 0
    m = poincare.midpoint(x, 1.0, weights)
    moved = poincare.midpoint(poincare.mobius_add(a, x, 1.0), 1.0, weights)
    assert_close(moved, poincare.mobius_add(a, m, 1.0), 1e-11, "after a translation")
    keep = [0, 1, 3, 4, 5, 6]
    assert_close(
        poincare.midpoint(x[keep], 1.0, 100 * weights[:, keep]), m, 1e-10, "without weight zero"
    )
    equal = poincare.midpoint(x, 1.0, torch.full((1, 7), 3.0))[0]
    assert_close(poincare.midpoint(x, 1.0), equal, 1e-12, "equal weights")


def test_all_weight_on_one_point_near_the_rim_in_float32():
    """t² - c|s|² is 1e-10 of t² there, which float32 sums would lose."""
    x = poincare.project(tangents(9, 5, seed=11, dtype=torch.float32) * 50, 1.0)
    m = poincare.midpoint(x, 1.0, torch.eye(9))
    assert poincare.distance(m, x, 1.0).max() < 0.05
    assert (m.norm(dim=-1) < 1).all()


# Arguments.


@pytest.mark.parametrize("c", [-1.0, float("nan"), float("inf")])
def test_a_curvature_out_of_range_is_refused(c):
    with pytest.raises(ValueError, match=r"c=.* is not allowed; allowed: finite numbers from 0"):
        poincare.distance(points(2, 3), points(2, 3), c)


def test_one_curvature_per_head():
    """c [H, 1] with points [B, H, N, d] equals one head at a time."""
    c = torch.tensor([[0.2], [1.0], [3.0]], dtype=torch.float64)
    v, w = tangents(2, 3, 5, 4, seed=29, scale=0.3), tangents(2, 3, 5, 4, seed=30, scale=0.3)

    def all_of(v, w, c):
        x, y = poincare.expmap0(v, c), poincare.expmap0(w, c)
        there = poincare.mobius_add(poincare.expmap(x, poincare.logmap(x, y, c) / 2, c), y, c)
        middle = poincare.midpoint(there, c, (w @ v.mT).exp())
        return middle * (poincare.distance(x, y, c) + geometry.depth(x, c))[..., None]

    each = torch.stack([all_of(v[:, h], w[:, h], c[h, 0]) for h in range(3)], dim=1)
    assert_close(all_of(v, w, c), each, 1e-10, "per head")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    x, y = points(9, 4, seed=31, dtype=dtype), points(9, 4, seed=32, dtype=dtype)
    d = poincare.distance(x, y, 1.0)
    assert d.dtype == torch.float32
    assert_close(d, poincare.distance(x.double(), y.double(), 1.0), 1e-4, "distance")


@pytest.mark.parametrize(
    "name, instead",
    [("lorentz", "geoopt.Lorentz"), ("klein", "PoincareBall"), ("halfspace", "docs/geometry.md")]
    + [(f"{a}_to_poincare", "docs/geometry.md") for a in ("klein", "lorentz", "halfspace")]
    + [(f"poincare_to_{a}", "docs/geometry.md") for a in ("klein", "lorentz", "halfspace")],
)
def test_what_left_the_package_says_what_serves_instead(name, instead):
    with pytest.raises(
        AttributeError, match=f"hf_hyperattn.geometry.{name} left the package; use .*{instead}"
    ):
        getattr(geometry, name)
    with pytest.raises(
        AttributeError, match="has no 'kleins'; it has: angular_similarity, depth, poincare$"
    ):
        geometry.kleins  # noqa: B018
