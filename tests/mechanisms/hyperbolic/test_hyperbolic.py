"""The hyperbolic scores against their definition. No engine here."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperattn.functional import hyperbolic_scores
from hf_hyperattn.mechanisms.hyperbolic.functional import hyperbolic_space
from hf_hyperattn.mechanisms.hyperbolic.score import squared_lorentz_features
from tests.mechanisms.hyperbolic.hyperbolic_cases import at_radius, per_head
from tests.oracles import hyperbolic as oracle
from tests.oracles.cases import DTYPES, assert_close, qkv, tensor
from tests.oracles.marks import both_dtypes

QUICK = settings(max_examples=10, deadline=None, derandomize=True)
DISTANCES = ("geodesic", "squared_lorentz")
every_distance = pytest.mark.parametrize("distance", DISTANCES)


# Scores.


@every_distance
@pytest.mark.parametrize("d", [2, 3, 16])
def test_both_oracles_agree(distance, d):
    q, k, _ = qkv(batch=1, heads=2, lq=4, lk=5, d=d, seed=d, scale=2.0)
    c, tau = per_head(2)
    space = {"curvature": c, "temperature": tau, "distance_name": distance}
    assert_close(oracle.dense_scores(q, k, **space), oracle.scores(q, k, **space), 1e-11, "oracle")


@every_distance
@pytest.mark.parametrize("d", [2, 3, 16, 64])
def test_scores_are_the_definition(distance, d):
    q, k, _ = qkv(batch=1, heads=2, kv_heads=1, lq=4, lk=5, d=d, seed=10 + d, scale=2.0)
    c, tau = per_head(2)
    expected = oracle.scores(q, k, curvature=c, temperature=tau, distance_name=distance)
    got = hyperbolic_scores(q, k, curvature=c, temperature=tau, distance=distance)
    assert_close(got, expected, 1e-13 * max(100.0, float(np.abs(expected).max())), "scores")


@every_distance
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_scale_multiplies_before_the_lift(distance, scale):
    q, k, _ = qkv(batch=1, heads=2, lq=3, lk=4, d=4, seed=3, scale=2.0)
    got = hyperbolic_scores(q, k, scale=scale, curvature=0.5, distance=distance)
    expected = oracle.scores(q, k, scale=scale, curvature=0.5, distance_name=distance)
    assert_close(got, expected, 1e-11, "scores")
    factor = 0.5 if scale is None else scale
    again = hyperbolic_scores(q * factor, k * factor, scale=1.0, curvature=0.5, distance=distance)
    assert_close(got, again, 1e-12, "scores of scaled vectors")


@pytest.mark.parametrize("radius", [0.5, 2.0, 4.0, 6.0, 8.0])
@pytest.mark.parametrize("apart", [0.0, 1e-3, 1e-2, 1.0, 3.0])
def test_float32_logits_up_to_radius_eight(radius, apart):
    """Pairs on one sphere and across it, near ones included, within 1e-3 of the exact logit of the same numbers."""
    towards = tensor(8, 16, seed=int(10 * radius))
    aside = tensor(8, 16, seed=1) * apart / max(math.sinh(radius), 1.0)
    q = at_radius(towards, radius).float()[None, None]
    k = at_radius(towards / towards.norm(dim=-1, keepdim=True) + aside, radius).float()[None, None]
    got = hyperbolic_scores(q, k, scale=1.0)
    assert_close(got, oracle.scores(q, k, scale=1.0), 1e-3, "scores")


@every_distance
@both_dtypes
def test_adversarial_points(distance, dtype):
    """Zero, tiny, equal, opposite, collinear and clipped vectors in one batch."""
    base = tensor(4, seed=5)
    rows = [base * s for s in (0.0, 1e-30, 1e-12, 1e-3, 1.0, -1.0, 1.0 + 1e-6, 2.0, -3.0)]
    x = torch.stack([*rows, tensor(4, seed=6)]).to(DTYPES[dtype])[None, None]
    got, expected = (
        hyperbolic_scores(x, x, distance=distance),
        oracle.scores(x, x, distance_name=distance),
    )
    size = np.maximum(np.abs(expected), 1.0)
    assert_close(
        got.double() / torch.tensor(size),
        expected / size,
        1e-12 if dtype == "float64" else 1e-5,
        "scores",
    )


@every_distance
@pytest.mark.parametrize("dtype", DTYPES)
def test_points_beyond_the_clip_lie_on_it(distance, dtype):
    """However long the vectors are, up to the largest number there is: |x|√c = 1 - 1e-5 in both forms."""
    direction = torch.tensor([[0.6, 0.8, 0, 0], [0, 0, 1.0, 0]], dtype=torch.float64)
    for size in (1e2, torch.finfo(DTYPES[dtype]).max / 4):
        x = (direction * size).to(DTYPES[dtype])[None, None]
        got = hyperbolic_scores(x, x, scale=1.0, distance=distance)
        expected = oracle.scores(
            direction[None, None] * 100,
            direction[None, None] * 100,
            scale=1.0,
            distance_name=distance,
        )
        assert torch.isfinite(got).all() and not got.diagonal(dim1=-2, dim2=-1).any()
        assert float(got[0, 0, 0, 1]) == pytest.approx(expected[0, 0, 0, 1], rel=1e-3)


def test_the_two_distances_are_of_the_same_points():
    q, k, _ = qkv(batch=1, heads=1, lq=4, lk=5, d=4, seed=9, scale=4.0)
    d = -hyperbolic_scores(q, k, curvature=0.7)
    lorentz = hyperbolic_scores(q, k, curvature=0.7, distance="squared_lorentz")
    assert_close(
        lorentz, -2 / 0.7 * (torch.cosh(math.sqrt(0.7) * d) - 1), 1e-9, "squared Lorentz distance"
    )


@pytest.mark.parametrize(
    "dtype, c, atol", [("float64", 1e-12, 1e-9), ("float32", 1e-8, 1e-5), ("float32", 1e-20, 1e-5)]
)
def test_without_curvature_it_is_twice_the_euclidean_distance(dtype, c, atol):
    q, k, _ = qkv(batch=1, heads=2, lq=5, lk=6, d=4, dtype=DTYPES[dtype])
    flat = torch.cdist(q.double(), k.double()) * 0.5
    assert_close(
        hyperbolic_scores(q, k, curvature=c, temperature=0.8), -2 * flat / 0.8, atol, "geodesic"
    )
    squared = hyperbolic_scores(q, k, curvature=c, distance="squared_lorentz")
    assert_close(squared, -4 * flat.square(), 10 * atol, "squared Lorentz")


# Derivatives.


@every_distance
def test_score_gradients(distance):
    q, k, _ = qkv(batch=1, heads=2, kv_heads=1, lq=3, lk=4, d=3, seed=20)
    inputs = [t.requires_grad_() for t in (q, k, *per_head(2))]

    def run(q, k, c, tau):
        return hyperbolic_scores(q, k, curvature=c, temperature=tau, distance=distance)

    assert torch.autograd.gradcheck(run, inputs)


@every_distance
def test_gradients_at_the_origin(distance):
    """At q = 0 the distance is smooth: its gradient is -2 scale / τ times the direction of the key."""
    k = tensor(1, 1, 1, 3, seed=21).requires_grad_()
    q = torch.zeros_like(k).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: hyperbolic_scores(q, k, distance=distance), (q, k))
    if distance == "geodesic":
        got = torch.autograd.grad(hyperbolic_scores(q, k, scale=0.5, temperature=2.0).sum(), q)[0]
        assert_close(got, (k / k.norm() * 2 * 0.5 / 2.0), 1e-9, "gradient")


@every_distance
@both_dtypes
def test_gradient_at_ties_is_zero_or_symmetric(distance, dtype):
    x = tensor(1, 2, 6, 3, seed=23, dtype=DTYPES[dtype])
    x[:, :, 3], x[:, :, 4] = x[:, :, 0], 0
    weight = tensor(1, 2, 6, 6, seed=24, dtype=DTYPES[dtype])
    grads = []
    for w in (weight, weight.mT):
        q, k = x.clone().requires_grad_(), x.clone().requires_grad_()
        grads.append(
            torch.autograd.grad((hyperbolic_scores(q, k, distance=distance) * w).sum(), (q, k))
        )
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    assert_close(grads[0][0], grads[1][1], tolerance, "dq against dk of the exchanged roles")
    assert_close(grads[0][1], grads[1][0], tolerance, "dk against dq of the exchanged roles")
    q, k = x[:, :, :1].clone().requires_grad_(), x[:, :, :1].clone().requires_grad_()
    alone = torch.autograd.grad(hyperbolic_scores(q, k, distance=distance).sum(), (q, k))
    assert not alone[0].any() and not alone[1].any()


@every_distance
@both_dtypes
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-4, 1.0, 12.2, 1e2, 1e30])
def test_scores_and_gradients_stay_finite(distance, dtype, scale):
    """12.2 puts some of the points at the clip, beyond which a longer vector is the same point."""
    q, k, _ = qkv(batch=1, heads=2, lq=6, lk=6, d=4, scale=scale, dtype=DTYPES[dtype])
    k[:, :, :3] = q[:, :, :3]
    leaves = [t.requires_grad_() for t in (q, k, *per_head(2, DTYPES[dtype]))]
    score = hyperbolic_scores(
        *leaves[:2], curvature=leaves[2], temperature=leaves[3], distance=distance
    )
    assert torch.isfinite(score).all()
    for name, grad in zip(
        ("query", "key", "curvature", "temperature"), torch.autograd.grad(score.sum(), leaves)
    ):
        assert torch.isfinite(grad).all(), f"gradient of {name}"


# Geometry.


@every_distance
@QUICK
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-2, 1.0, 5.0]))
def test_score_is_symmetric_and_turns_with_the_space(distance, seed, scale):
    q, k, _ = qkv(batch=1, heads=2, lq=4, lk=5, d=4, seed=seed, scale=scale)
    turn = torch.linalg.qr(tensor(4, 4, seed=seed + 9))[0]
    got = hyperbolic_scores(q, k, distance=distance)
    tolerance = 1e-10 * float(got.abs().max())
    assert_close(hyperbolic_scores(k, q, distance=distance).mT, got, tolerance, "exchanged")
    assert_close(hyperbolic_scores(q @ turn, k @ turn, distance=distance), got, tolerance, "turned")


@QUICK
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-2, 1.0, 5.0]))
def test_geodesic_distance_obeys_the_triangle_inequality(seed, scale):
    x, y, z = tensor(3, 1, 1, 6, 4, seed=seed, scale=scale)
    xy, yz, xz = (-hyperbolic_scores(a, b, curvature=1.3) for a, b in ((x, y), (y, z), (x, z)))
    through = (xy[..., None] + yz[..., None, :, :]).amin(-2)
    assert (xz <= through + 1e-9).all()


@QUICK
@given(seed=st.integers(0, 10_000))
def test_curvature_is_a_unit_of_length(seed):
    """d at curvature -c of vectors v is d at curvature -1 of √c v, over √c."""
    q, k, _ = qkv(batch=1, heads=1, lq=4, lk=4, d=3, seed=seed, scale=2.0)
    c = 0.3
    unit = hyperbolic_scores(q * math.sqrt(c), k * math.sqrt(c))
    assert_close(hyperbolic_scores(q, k, curvature=c), unit / math.sqrt(c), 1e-10, "scores")


@pytest.mark.parametrize("c", [0.25, 4.0])
@pytest.mark.parametrize(
    "wrong", ["no root of c in artanh", "sign of c", "no root of c in front", "Klein"]
)
def test_known_wrong_formulas_give_other_scores(c, wrong):
    """What a known source, or a slip, makes of d: a missing √c, -c for c, Klein coordinates in the ball's formula."""
    q, k = tensor(1, 1, 1, 3, seed=40), tensor(1, 1, 1, 3, seed=41)
    got = -float(hyperbolic_scores(q, k, scale=0.4, curvature=c))
    with mpmath.workdps(30):
        x, y = (oracle.lift(t[0, 0, 0], mpmath.mpf(c), mpmath.mpf(0.4)) for t in (q, k))
        right, root = oracle.distance(x, y, c), mpmath.sqrt(c)
        assert got == pytest.approx(float(right), rel=1e-10)
        nx, ny = oracle.norm(x) ** 2, oracle.norm(y) ** 2
        if wrong == "no root of c in artanh":
            gyration = mpmath.tanh(root * right / 2) / root  # |(-x) ⊕ y|
            other = 2 / root * mpmath.re(mpmath.atanh(gyration))
        elif wrong == "sign of c":
            apart = oracle.norm([a - b for a, b in zip(x, y, strict=True)]) ** 2
            other = mpmath.acosh(1 + 2 * c * apart / ((1 + c * nx) * (1 + c * ny))) / root
        elif wrong == "no root of c in front":
            other = right * root
        else:
            kx, ky = ([2 * a / (1 + c * n) for a in t] for t, n in ((x, nx), (y, ny)))
            other = oracle.distance(kx, ky, c)
        assert abs(float(other) - got) > 1e-2 * got


@every_distance
def test_linear_features_give_the_squared_lorentz_score(distance):
    q, k, _ = qkv(batch=2, heads=4, kv_heads=2, lq=5, lk=6, d=3, seed=42, scale=2.0)
    for c, tau in ((per_head(4)), (torch.tensor([0.6]).double(), torch.tensor([1.3]).double())):
        space = hyperbolic_space(q, None, c, tau, distance)
        x, y = squared_lorentz_features(q, k, space)
        assert y.shape[1] == (4 if c.numel() > 1 else 2)
        expected = oracle.dense_scores(
            q, k, curvature=c, temperature=tau, distance_name="squared_lorentz"
        )
        got = x @ y.repeat_interleave(4 // y.shape[1], dim=1).mT
        assert_close(got, expected, 1e-12 * float(expected.abs().max()), "product of the features")
