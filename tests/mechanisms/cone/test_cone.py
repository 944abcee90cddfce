"""The cone score against its definition: values, mappings, ancestors, ties, symmetries. No softmax here."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperattn.functional import cone_scores
from tests.oracles import ancestors, dense
from tests.oracles import cone as loops
from tests.oracles.cases import (
    DTYPES,
    PAIRINGS,
    assert_close,
    assert_gradients,
    per_head,
    qkv,
    tensor,
)
from tests.oracles.marks import core_pairing, every_pairing

QUICK = settings(max_examples=15, deadline=None, derandomize=True)


def scored(q, k, pairing, gamma=1.0, radius=1.0):
    return cone_scores(q, k, gamma=gamma, radius=radius, **PAIRINGS[pairing])


def heights_of(x, pairing):
    """Heights of the first head's points, from the definition."""
    heights = [loops.point(row, PAIRINGS[pairing]["mapping"])[1] for row in x[0, 0]]
    return torch.tensor(heights, dtype=torch.float64)


@every_pairing
@pytest.mark.parametrize("d", [2, 3, 16])
def test_loops_and_dense_oracle_agree(pairing, d):
    q, k, _ = qkv(batch=1, heads=2, lq=4, lk=6, d=d, seed=d)
    gamma, radius = per_head(2)
    expected = loops.scores(q, k, gamma=gamma, radius=radius, **PAIRINGS[pairing])
    got = dense.scores(q, k, gamma=gamma, radius=radius, **PAIRINGS[pairing])
    assert_close(got, expected, 1e-11, "oracle")


@every_pairing
@pytest.mark.parametrize("d", [2, 3, 16, 64])
def test_scores_are_the_definition(pairing, d):
    q, k, _ = qkv(batch=2, heads=2, lq=5, lk=7, d=d, seed=10 + d)
    gamma, radius = per_head(2)
    expected = loops.scores(q, k, gamma=gamma, radius=radius, **PAIRINGS[pairing])
    assert_close(scored(q, k, pairing, gamma, radius), expected, 1e-9, "scores")


@every_pairing
def test_both_scalar_and_per_head_parameters(pairing):
    q, k, _ = qkv(heads=3)
    even = torch.full((3,), 0.7, dtype=torch.float64), torch.full((3,), 1.3, dtype=torch.float64)
    assert_close(scored(q, k, pairing, 0.7, 1.3), scored(q, k, pairing, *even), 1e-12, "scores")
    expected = loops.scores(q, k, gamma=0.7, radius=1.3, **PAIRINGS[pairing])
    assert_close(scored(q, k, pairing, 0.7, 1.3), expected, 1e-9, "scores")


@pytest.mark.parametrize("variant, mapping", [("umbral", "xi"), ("penumbral", "psi")])
def test_default_mapping_is_the_released_pairing(variant, mapping):
    q, k, _ = qkv()
    rest = {"gamma": 1.0, "radius": 1.0, "squared": True, "clamp_heights": False}
    default = cone_scores(q, k, variant=variant, mapping=None, **rest)
    assert torch.equal(default, cone_scores(q, k, variant=variant, mapping=mapping, **rest))


@every_pairing
def test_float32_scores_of_duplicates_and_neighbours(pairing):
    base = tensor(1, 2, 1, 16, seed=3)
    q = (base + tensor(1, 2, 9, 16, seed=4, scale=1e-4)).float()
    k = torch.cat([q[:, :, :4], q[:, :, 4:] + 1e-5], dim=2)
    assert_close(scored(q, k, pairing), loops.scores(q, k, **PAIRINGS[pairing]), 2e-4, "scores")


# The closed forms against a search for the lowest common ancestor.


def plane_points(seed):
    """Two points (X, h) over the plane, from three-wide head vectors under psi with radius 1.2."""
    p, q = tensor(2, 3, seed=seed, scale=2.0)
    return loops.point(p, "psi", 1.2), loops.point(q, "psi", 1.2)


@pytest.mark.parametrize("seed", range(8))
def test_umbral_height_is_the_lowest_common_ancestor(seed):
    p, q = plane_points(seed)
    found = ancestors.lowest_apex(p, q, ancestors.umbral_descends, radius=1.2, ceiling=50.0)
    height = loops.umbral_height(math.dist(p[0], q[0]), p[1], q[1], 1.2)
    assert found == pytest.approx(height, abs=1e-4)


@pytest.mark.parametrize("seed", range(12))
def test_penumbral_height_is_the_lowest_common_ancestor(seed):
    p, q = plane_points(seed)
    found = ancestors.lowest_apex(p, q, ancestors.penumbral_descends, radius=1.2, ceiling=1.2)
    height = math.sqrt(loops.penumbral_height_squared(math.dist(p[0], q[0]), p[1], q[1], 1.2))
    expected = ancestors.geodesic_apex(p, q) if found is None else found
    assert expected == pytest.approx(height, abs=1e-4)


def test_both_penumbral_branches_were_searched():
    kinds = set()
    for seed in range(12):
        p, q = plane_points(seed)
        reach = sum(math.sqrt(1.44 - x[1] ** 2) for x in (p, q))
        kinds.add(math.dist(p[0], q[0]) <= reach)
    assert kinds == {True, False}


# Mappings.


@pytest.mark.parametrize("last", [-100.0, -25.0, 19.0, 25.0, 100.0])
def test_xi_exponent_is_clamped_to_ten(last):
    q = torch.tensor([0.0, last], dtype=torch.float64).view(1, 1, 1, 2)
    got = scored(q, q, "umbral-xi")
    assert float(got) == pytest.approx(-math.exp(min(max(last / 2, -10), 10)), rel=1e-9)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("last", [-29.0, -8.0, -1e-3, 0.0, 1e-3, 8.0, 29.0])
def test_expmap_along_the_vertical_is_the_exponential(last, dtype):
    """exp of the tangent vector (0, s) at (0, 1) is the point (0, e^s)."""
    q = torch.tensor([0.0, 0.0, last], dtype=DTYPES[dtype]).view(1, 1, 1, 3)
    got = scored(q, q, "umbral-expmap")
    assert float(got) == pytest.approx(-math.exp(last), rel=1e-9 if dtype == "float64" else 1e-4)


def test_expmap_near_the_vertical_in_float32():
    """1 - x_d/s has few digits left in float32 here; the height must keep its own."""
    q = torch.tensor([[1e-2, -2e-2, 8.0], [1e-4, 1e-3, 12.0], [0.3, 0.1, 20.0]]).view(1, 1, 3, 3)
    expected = loops.scores(q, q, variant="umbral", mapping="expmap")
    got = scored(q, q, "umbral-expmap")
    assert np.allclose(got.double().numpy(), expected, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("norm", [31.0, 90.0])
def test_expmap_shortens_longer_vectors_to_thirty(norm, dtype):
    """Upright vectors show it: unshortened, their heights would grow as e^norm."""
    direction = torch.tensor(
        [[0.0, 0.0, 1.0], [0.0, 1e-6, 1.0], [0.6, 0.0, 0.8]], dtype=torch.float64
    )
    q = (direction / direction.norm(dim=-1, keepdim=True)).view(1, 1, 3, 3)
    ratio = scored(
        (q * norm).to(DTYPES[dtype]), (q * norm).to(DTYPES[dtype]), "umbral-expmap"
    ).double()
    ratio = ratio / scored(q * 30, q * 30, "umbral-expmap")
    assert_close(ratio, torch.ones(1, 1, 3, 3), 1e-9 if dtype == "float64" else 1e-4, "ratio")


@pytest.mark.parametrize("pairing", [p for p in PAIRINGS if "penumbral" in p and "psi" not in p])
def test_clamped_heights_reach_the_root_only(pairing):
    """Points above the light are brought under it, and the clamped height is their score."""
    q = torch.tensor([0.0, 0.0, 9.0], dtype=torch.float64).view(1, 1, 1, 3)
    height = 0.8 * (1 - 1e-3)
    expected = height**2 if PAIRINGS[pairing]["squared"] else height
    assert float(scored(q, q, pairing, radius=0.8)) == pytest.approx(-expected, rel=1e-9)


# Derivatives.


@every_pairing
def test_score_gradients(pairing):
    q, k, _ = qkv(batch=1, heads=2, lq=3, lk=4, d=3, seed=20)
    inputs = [t.requires_grad_() for t in (q, k, *per_head(2))]
    assert torch.autograd.gradcheck(lambda q, k, g, r: scored(q, k, pairing, g, r), inputs)


@every_pairing
def test_score_gradients_equal_the_oracles(pairing):
    q, k, _ = qkv(batch=2, heads=2, lq=9, lk=11, d=16, seed=21)
    leaves = [t.requires_grad_() for t in (q, k, *per_head(2))]
    weight = tensor(2, 2, 9, 11, seed=22)
    got = torch.autograd.grad((scored(*leaves[:2], pairing, *leaves[2:]) * weight).sum(), leaves)
    plain = dense.scores(*leaves[:2], gamma=leaves[2], radius=leaves[3], **PAIRINGS[pairing])
    expected = torch.autograd.grad((plain * weight).sum(), leaves)
    assert_gradients(got, expected, 1e-8, ("query", "key", "gamma", "radius"))


@every_pairing
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gradient_at_ties_is_finite_and_symmetric(pairing, dtype):
    """S(q, k) = S(k, q), so exchanging the roles of equal q and k exchanges their gradients."""
    x = tensor(1, 2, 6, 3, seed=23, dtype=DTYPES[dtype])
    x[:, :, 3] = x[:, :, 0]
    x[:, :, 4] = 0
    weight = tensor(1, 2, 6, 6, seed=24, dtype=DTYPES[dtype])
    grads = []
    for w in (weight, weight.mT):
        q, k = x.clone().requires_grad_(), x.clone().requires_grad_()
        grads.append(torch.autograd.grad((scored(q, k, pairing) * w).sum(), (q, k)))
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    assert_close(grads[0][0], grads[1][1], tolerance, "dq against dk of the exchanged roles")
    assert_close(grads[0][1], grads[1][0], tolerance, "dk against dq of the exchanged roles")


@every_pairing
def test_gradient_at_a_tie_is_the_central_difference(pairing):
    """The kink at q = k is even, so the central difference of the definition fixes the gradient."""
    x = tensor(1, 1, 1, 3, seed=25)
    q, k = x.clone().requires_grad_(), x.clone().requires_grad_()
    got = torch.autograd.grad(scored(q, k, pairing).sum(), (q, k))
    for c in range(3):
        step = torch.zeros_like(x)
        step[..., c] = 1e-5
        up, down = (loops.scores(x + s, x, **PAIRINGS[pairing]).item() for s in (step, -step))
        assert float(got[0][..., c]) == pytest.approx((up - down) / 2e-5, abs=1e-4)
        assert float(got[1][..., c]) == pytest.approx((up - down) / 2e-5, abs=1e-4)


@every_pairing
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e2])
def test_scores_and_gradients_stay_finite(pairing, dtype, scale):
    q, k, _ = qkv(batch=1, heads=2, lq=6, lk=6, d=4, scale=scale, dtype=DTYPES[dtype])
    k[:, :, :3] = q[:, :, :3]
    leaves = [t.requires_grad_() for t in (q, k, *per_head(2, DTYPES[dtype]))]
    score = scored(*leaves[:2], pairing, *leaves[2:])
    assert torch.isfinite(score).all()
    grads = torch.autograd.grad(score.sum(), leaves)
    for name, grad in zip(("query", "key", "gamma", "radius"), grads):
        assert torch.isfinite(grad).all(), f"gradient of {name}"


@every_pairing
@pytest.mark.parametrize("radius", [1e-3, 1e-2, 0.1, 5.0, 20.0])
def test_small_and_large_radii_in_float64(pairing, radius):
    """Constants that keep roots away from zero must not show at any scale: the error is relative to the score."""
    q, k, _ = qkv(batch=1, heads=2, lq=6, lk=7, d=3, seed=26)
    expected = loops.scores(q, k, radius=radius, **PAIRINGS[pairing])
    size = float(np.abs(expected).max())
    assert_close(
        scored(q, k, pairing, radius=radius) / size, expected / size, 1e-9, "scores over their size"
    )


@every_pairing
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("radius", [1e-4, 100.0, 1000.0])
def test_gradients_at_extreme_radii_stay_finite(pairing, dtype, radius):
    """sinh r overflows float32 at 89 and float64 at 710; nothing may turn into 0·inf."""
    q, k, _ = qkv(batch=1, heads=2, lq=6, d=3, dtype=DTYPES[dtype])
    leaves = [t.requires_grad_() for t in (q, k, torch.full((2,), radius, dtype=DTYPES[dtype]))]
    score = scored(*leaves[:2], pairing, radius=leaves[2])
    assert torch.isfinite(score).all()
    for name, grad in zip(
        ("query", "key", "radius"), torch.autograd.grad(score.sum(), leaves), strict=True
    ):
        assert torch.isfinite(grad).all(), f"gradient of {name}"


# Symmetries.


@core_pairing
@QUICK
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([1e-2, 0.5, 1.0]))
def test_score_is_symmetric(pairing, seed, scale):
    q, k, _ = qkv(batch=1, heads=2, lq=4, lk=5, d=3, seed=seed, scale=scale)
    assert_close(scored(q, k, pairing), scored(k, q, pairing).mT, 1e-12, "transposed scores")


@pytest.mark.parametrize(
    "pairing", [p for p in PAIRINGS if "expmap" not in p and "penumbral-xi" not in p]
)
@QUICK
@given(seed=st.integers(0, 10_000), shift=st.floats(-3, 3))
def test_horizontal_translation_changes_nothing(pairing, seed, shift):
    """xi and psi: X = x·h with h from the last coordinate alone, so x + t/h moves X by t and keeps h."""
    q, k, _ = qkv(batch=1, heads=1, lq=4, lk=5, d=4, seed=seed)
    by = tensor(3, seed=seed + 7) * shift

    def moved(x):
        heights = heights_of(x, pairing)
        return torch.cat([x[..., :-1] + by / heights[:, None], x[..., -1:]], dim=-1)

    assert_close(scored(moved(q), moved(k), pairing), scored(q, k, pairing), 1e-9, "moved scores")


@core_pairing
@QUICK
@given(seed=st.integers(0, 10_000))
def test_horizontal_rotation_changes_nothing(pairing, seed):
    q, k, _ = qkv(batch=1, heads=1, lq=4, lk=5, d=4, seed=seed)
    turn = torch.linalg.qr(tensor(3, 3, seed=seed + 9))[0]

    def turned(x):
        return torch.cat([x[..., :-1] @ turn, x[..., -1:]], dim=-1)

    assert_close(
        scored(turned(q), turned(k), pairing), scored(q, k, pairing), 1e-9, "turned scores"
    )


@core_pairing
def test_gamma_scales_the_score(pairing):
    q, k, _ = qkv()
    assert_close(scored(q, k, pairing, gamma=2.5), 2.5 * scored(q, k, pairing), 1e-12, "scores")


def test_an_ancestor_is_never_lower_than_either_point():
    q, k, _ = qkv(batch=1, heads=1, lq=7, lk=7, d=3, scale=2.0, seed=31)
    for pairing in ("umbral-xi", "umbral-psi", "umbral-expmap", "penumbral-psi-unsquared"):
        height = -scored(q, k, pairing)[0, 0]
        hq, hk = heights_of(q, pairing), heights_of(k, pairing)
        assert (height >= torch.maximum(hq[:, None], hk[None, :]) - 1e-12).all()
