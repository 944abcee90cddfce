"""Poincaré ball, Klein ball, Lorentz model and half space against textbook formulas in 50 digits, and each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperattn import geometry as G
from hf_hyperattn.geometry import poincare
from tests.geometry import oracle
from tests.geometry.spaces import CURVATURES, MAPS, MODELS, exactly, points, tangents
from tests.oracles.cases import assert_close

QUICK = settings(max_examples=25, deadline=None)
every_curvature = pytest.mark.parametrize("c", CURVATURES)
every_map = pytest.mark.parametrize("name", MAPS)


@every_curvature
@pytest.mark.parametrize("name", MODELS)
def test_distances_are_the_textbooks(name, c):
    model, x, y = MODELS[name], points(20, 3, c=c, seed=1), points(20, 3, c=c, seed=2)
    p, q = model.enter(x, c), model.enter(y, c)
    assert_close(model.module.distance(p, q, c), exactly(model.exact, p, q, c), 1e-9, name)


@every_curvature
@pytest.mark.parametrize("name", MODELS)
def test_models_are_isometric(name, c):
    model, x, y = MODELS[name], points(50, 4, c=c, reach=0.97, seed=3), points(50, 4, c=c, reach=0.97, seed=4)
    exact = exactly(oracle.poincare_distance, x, y, c)
    assert_close(model.module.distance(model.enter(x, c), model.enter(y, c), c), exact, 1e-9, name)


@every_curvature
@pytest.mark.parametrize("name", MODELS)
def test_conversions_and_their_inverses(name, c):
    model, x = MODELS[name], points(50, 4, c=c, seed=5)
    assert_close(model.leave(model.enter(x, c), c), x, 1e-12 / c**0.5, f"there and back through {name}")


@every_curvature
def test_conversions_commute(c):
    x = points(50, 4, c=c, seed=6)
    k, y = G.poincare_to_klein(x, c), G.poincare_to_lorentz(x, c)
    assert_close(G.klein_to_lorentz(k, c), y, 1e-11 / c**0.5, "Klein to Lorentz")
    assert_close(G.lorentz_to_klein(y, c), k, 1e-12 / c**0.5, "Lorentz to Klein")
    assert_close(G.lorentz.inner(y, y) * c, -torch.ones(50, dtype=torch.float64), 1e-12, "the hyperboloid")
    assert_close(G.lorentz.project(y, c), y, 1e-12 / c**0.5, "projected")


@every_curvature
def test_the_squared_lorentz_distance(c):
    x, y = (G.poincare_to_lorentz(points(50, 4, c=c, seed=s), c) for s in (7, 8))
    expected = -2 / c - 2 * G.lorentz.inner(x, y)
    assert_close(G.lorentz.squared_distance(x, y, c), expected, 1e-10 / c, "squared Lorentz distance")


@pytest.mark.parametrize("name", MODELS)
@QUICK
@given(seed=st.integers(0, 10_000), c=st.floats(1e-3, 10), reach=st.sampled_from([1e-6, 0.5, 0.99, 0.99999]))
def test_triangle_inequality(name, seed, c, reach):
    model = MODELS[name]
    p, q, r = model.enter(points(3, 4, c=c, reach=reach, seed=seed), c)
    pq, qr, pr = (model.module.distance(a, b, c) for a, b in ((p, q), (q, r), (p, r)))
    assert pr <= pq + qr + 1e-9 / c**0.5
    assert pq == model.module.distance(q, p, c) or abs(pq - model.module.distance(q, p, c)) < 1e-8 / c**0.5
    assert model.module.distance(p, p, c) == 0


@QUICK
@given(seed=st.integers(0, 10_000), c=st.floats(1e-3, 10), t=st.floats(0, 1))
def test_triangle_equality_on_a_geodesic(seed, c, t):
    x, y = points(2, 3, c=c, seed=seed)
    m = poincare.expmap(x, t * poincare.logmap(x, y, c), c)
    sides = poincare.distance(x, m, c) + poincare.distance(m, y, c)
    assert_close(sides, poincare.distance(x, y, c), 1e-10 / c**0.5, "distances along a geodesic")


# Exp and log.


@every_curvature
@every_map
def test_exp_of_log(name, c):
    model, x, y = MODELS[name], points(50, 4, c=c, seed=9), points(50, 4, c=c, seed=10)
    p, q = model.enter(x, c), model.enter(y, c)
    there = model.module.expmap(p, model.module.logmap(p, q, c), c)
    assert_close(model.leave(there, c), y, 1e-9 / c**0.5, "exp log")
    assert_close(
        model.leave(model.module.expmap0(model.module.logmap0(p, c), c), c), x, 1e-12 / c**0.5, "exp0 log0"
    )


@every_curvature
@every_map
def test_log_of_exp(name, c):
    module, v = MODELS[name].module, tangents(50, 4, seed=11, scale=0.5 / c**0.5)
    assert_close(module.logmap0(module.expmap0(v, c), c), v, 1e-11 / c**0.5, "log0 exp0")
    p = MODELS[name].enter(points(50, 4, c=c, reach=0.6, seed=12), c)
    if name == "lorentz":
        v = torch.cat([(v * p[:, 1:]).sum(-1, keepdim=True) / p[:, :1], v], dim=-1)  # tangent: ⟨p,v⟩_L = 0
    assert_close(module.logmap(p, module.expmap(p, v, c), c), v, 1e-9 / c**0.5, "log exp")


@every_curvature
def test_distance_is_the_length_of_the_logarithm(c):
    x, y = points(50, 4, c=c, seed=13), points(50, 4, c=c, seed=14)
    d = poincare.distance(x, y, c)
    assert_close(2 * poincare.logmap(x, y, c).norm(dim=-1) / poincare.gap(x, c), d, 1e-9 / c**0.5, "Poincaré")
    u = G.lorentz.logmap(G.poincare_to_lorentz(x, c), G.poincare_to_lorentz(y, c), c)
    assert_close(G.lorentz.inner(u, u).sqrt(), d, 1e-7 / c**0.5, "Lorentz")


@every_curvature
@every_map
def test_maps_at_the_origin(name, c):
    """exp at the origin is exp0, and tangent vectors of the Poincaré ball count twice: expmap0(v) lies at 2|v|."""
    module, v = MODELS[name].module, tangents(50, 4, seed=15, scale=0.5 / c**0.5)
    origin = MODELS[name].enter(torch.zeros(1, 4, dtype=torch.float64), c)
    at = torch.nn.functional.pad(v, (1, 0)) if name == "lorentz" else v
    p = module.expmap(origin, at, c)
    assert_close(p, module.expmap0(v, c), 1e-12 / c**0.5, "exp at the origin")
    assert_close(module.logmap(origin, p, c), at, 1e-11 / c**0.5, "log at the origin")
    assert_close(
        module.distance(origin, p, c), v.norm(dim=-1) * (2 if name == "poincare" else 1), 1e-10, "radius"
    )


@every_curvature
@every_map
def test_exp_of_one_tangent_vector_is_the_same_point_everywhere(name, c):
    """The differential of the conversion carries a tangent vector from the ball into the other model."""
    x, v = points(20, 3, c=c, reach=0.7, seed=16), tangents(20, 3, seed=17, scale=0.2 / c**0.5)
    model = MODELS[name]
    p, u = torch.func.jvp(lambda x: model.enter(x, c), (x,), (v,))
    assert_close(model.leave(model.module.expmap(p, u, c), c), poincare.expmap(x, v, c), 1e-11 / c**0.5, name)


# Möbius addition.


@every_curvature
def test_mobius_addition(c):
    x, y = points(50, 4, c=c, seed=18), points(50, 4, c=c, seed=19)
    xy, x2, y2 = ((a * b).sum(-1, keepdim=True) for a, b in ((x, y), (x, x), (y, y)))
    textbook = ((1 + 2 * c * xy + c * y2) * x + (1 - c * x2) * y) / (1 + 2 * c * xy + c**2 * x2 * y2)
    total = poincare.mobius_add(x, y, c)
    assert_close(total, textbook, 1e-12 / c**0.5, "x ⊕ y")
    assert_close(poincare.mobius_add(-x, total, c), y, 1e-10 / c**0.5, "(-x) ⊕ (x ⊕ y)")
    assert_close(poincare.mobius_add(x, torch.zeros_like(x), c), x, 1e-15 / c**0.5, "x ⊕ 0")


@every_curvature
def test_mobius_translations_keep_distances(c):
    a, x, y = (points(50, 4, c=c, seed=s) for s in (20, 21, 22))
    moved = poincare.distance(poincare.mobius_add(a, x, c), poincare.mobius_add(a, y, c), c)
    assert_close(moved, poincare.distance(x, y, c), 1e-9 / c**0.5, "distances")


def test_difference_of_near_points_keeps_its_digits():
    """The textbook's form of (-x) ⊕ y leaves about 1e-16 of a difference of 1e-12; ours keeps 1e-15 of it."""
    x = points(20, 4, seed=23)
    step = tangents(20, 4, seed=24, scale=1e-12)
    moved = x + step
    exact = (moved - x) / poincare.gap(x, 1.0)[:, None]
    assert ((poincare.mobius_add(-x, moved, 1.0) - exact).norm(dim=-1) <= 1e-9 * exact.norm(dim=-1)).all()
    d = [float(oracle.poincare_distance(a, b, 1.0)) for a, b in zip(x.tolist(), moved.tolist())]
    assert torch.allclose(
        poincare.distance(x, moved, 1.0), torch.tensor(d, dtype=torch.float64), rtol=1e-12, atol=0
    )


# The cone room's own exponential map is the same map.


def test_the_cone_rooms_half_space_is_this_one():
    from hf_hyperattn.mechanisms.cone.points import height_and_stretch, horizontal

    v = tangents(30, 4, seed=25)
    height, stretch = height_and_stretch(v, "expmap")
    cone = torch.cat([horizontal(v, stretch), height[:, None]], dim=-1)
    assert_close(cone, G.poincare_to_halfspace(poincare.expmap0(v / 2, 1.0), 1.0), 1e-10, "half-space points")


# Depth and angle.


@every_curvature
def test_depth_grows_with_the_distance_from_the_origin(c):
    x = points(50, 4, c=c, seed=26)
    rho = c**0.5 * poincare.distance(torch.zeros_like(x), x, c)
    assert_close(G.depth(x, c), torch.expm1(rho) / 2, 1e-10, "(e^ρ - 1)/2")
    reach = c**0.5 * x.norm(dim=-1)
    assert_close(G.depth(x, c), reach / (1 - reach), 1e-10, "√c|x| / (1 - √c|x|)")


def test_angular_similarity():
    x, y = points(50, 4, seed=27), points(50, 4, seed=28)
    assert_close(G.angular_similarity(x, y), torch.cosine_similarity(x, y, dim=-1), 1e-12, "cosine")
    assert_close(
        G.angular_similarity(G.poincare_to_klein(x, 1.0), y),
        G.angular_similarity(x, y),
        1e-12,
        "conformal at 0",
    )
    zero = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    assert G.angular_similarity(zero, y).eq(0).all()
    G.angular_similarity(zero, y).sum().backward()
    assert zero.grad.isfinite().all()


# Arguments.


@pytest.mark.parametrize("c", [-1.0, float("nan"), float("inf")])
def test_a_curvature_out_of_range_is_refused(c):
    with pytest.raises(ValueError, match=r"c=.* is not allowed; allowed: finite numbers from 0"):
        poincare.distance(points(2, 3), points(2, 3), c)


def test_one_curvature_per_head():
    """c [H, 1] with points [B, H, N, d] equals one head at a time."""
    c = torch.tensor([[0.2], [1.0], [3.0]], dtype=torch.float64)
    v, w = tangents(2, 3, 5, 4, seed=29, scale=0.3), tangents(2, 3, 5, 4, seed=30, scale=0.3)

    def each(f):
        return torch.stack([f(v[:, h], w[:, h], c[h, 0]) for h in range(3)], dim=1)

    for name in MAPS:
        module = MODELS[name].module
        for f in (
            lambda v, w, c, m=module: m.distance(m.expmap0(v, c), m.expmap0(w, c), c),
            lambda v, w, c, m=module: m.expmap(
                m.expmap0(v, c), m.logmap(m.expmap0(v, c), m.expmap0(w, c), c), c
            ),
            lambda v, w, c, m=module: m.midpoint(m.expmap0(v, c), c, (w @ v.mT).exp()),
        ):
            assert_close(f(v, w, c), each(f), 1e-10, name)
    for name in ("klein", "lorentz", "halfspace"):
        f = lambda v, w, c, m=MODELS[name]: m.leave(m.enter(poincare.expmap0(v, c), c), c)
        assert_close(f(v, w, c), each(f), 1e-12, name)
    f = lambda v, w, c: poincare.mobius_add(poincare.expmap0(v, c), poincare.expmap0(w, c), c)
    assert_close(f(v, w, c), each(f), 1e-12, "⊕")
    f = lambda v, w, c: G.halfspace.distance(v.abs(), w.abs(), c)
    assert_close(f(v, w, c), each(f), 1e-12, "half space")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    x, y = points(9, 4, seed=31, dtype=dtype), points(9, 4, seed=32, dtype=dtype)
    for name in MODELS:
        model = MODELS[name]
        d = model.module.distance(model.enter(x, 1.0), model.enter(y, 1.0), 1.0)
        assert d.dtype == torch.float32
        assert_close(d, poincare.distance(x.double(), y.double(), 1.0), 1e-4, name)
