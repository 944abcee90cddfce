"""Hyperbolic scores inside the engines, beside what a host may bring, and where engines turn to differences."""

import math
from dataclasses import replace

import pytest
import torch

from hf_hyperattn.engines import Options, attention, dot_score
from hf_hyperattn.engines.tiles import Tile
from hf_hyperattn.functional import hyperbolic_scores
from hf_hyperattn.mechanisms.hyperbolic.functional import hyperbolic_space
from tests.mechanisms.hyperbolic.hyperbolic_cases import at_radius, per_head
from tests.oracles import dense, softmax
from tests.oracles import hyperbolic as oracle
from tests.oracles.cases import (
    DTYPES,
    FAST,
    MANY_BLOCKS,
    assert_close,
    assert_gradients,
    qkv,
    tensor,
)
from tests.oracles.marks import both_dtypes, every_backend

every_fast_engine = pytest.mark.parametrize("backend", FAST)
every_distance = pytest.mark.parametrize("distance", ["geodesic", "squared_lorentz"])


def alone(q, k, distance, c=1.0, tau=1.0, scale=None):
    return hyperbolic_space(q, scale, c, tau, distance).score(q, k)


def blend(q, k, distance, gate, c, tau, scale, own=None):
    """dot product of this scale + gate · hyperbolic score of scale `own`."""
    space = hyperbolic_space(q, own, c, tau, distance)
    return dot_score(q, k, scale).plus(*space.score(q, k, scale, gate).terms)


def blend_logits(q, k, distance, gate, c, tau, scale, own=None):
    far = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    other = oracle.dense_scores(
        q, k, curvature=c, temperature=tau, distance_name=distance, scale=own
    )
    return scale * q @ far.mT + gate[:, None, None] * other


@every_backend
@every_distance
@both_dtypes
@pytest.mark.parametrize(
    "asked",
    [{"sinks": [-1.0, 0.5]}, {"softcap": 0.7}, {"sinks": [0.0, 2.0], "softcap": 0.4}],
    ids=str,
)
def test_sinks_and_caps_act_on_the_whole_logit(backend, distance, dtype, asked):
    q, k, v = qkv(batch=2, heads=2, kv_heads=1, lq=17, lk=19, dtype=DTYPES[dtype], seed=90)
    c, tau = per_head(2, DTYPES[dtype])
    sinks = torch.tensor(asked["sinks"], dtype=torch.float64) if "sinks" in asked else None
    options = Options(is_causal=True, sinks=sinks, softcap=asked.get("softcap"))
    out, _ = attention(alone(q, k, distance, c, tau), v, options, backend=backend)
    logits = oracle.dense_scores(
        q.double(),
        k.double(),
        curvature=c.double(),
        temperature=tau.double(),
        distance_name=distance,
    )
    want, _ = softmax.attention(logits, v, causal=True, **{**asked, "sinks": sinks})
    assert_close(out, want, 1e-9 if dtype == "float64" else 2e-4, "output")


@every_backend
@every_distance
def test_windows_offsets_and_bias(backend, distance):
    q, k, v = qkv(batch=1, heads=2, lq=5, lk=12, seed=91)
    bias = tensor(1, 2, 5, 12, seed=92)
    options = Options(is_causal=True, window=4, offset=7, bias=bias)
    out, _ = attention(alone(q, k, distance), v, options, backend=backend)
    want, _ = softmax.attention(
        oracle.dense_scores(q, k, distance_name=distance),
        v,
        causal=True,
        window=4,
        offset=7,
        bias=bias,
    )
    assert_close(out, want, 1e-9, "output")


@every_backend
@every_distance
@both_dtypes
@pytest.mark.parametrize("scale, own", [(1.0, None), (0.25, 0.6), (-0.5, None)])
def test_a_blend_is_dot_product_plus_gated_distance(backend, distance, dtype, scale, own):
    """The distance takes q and k by its own scale, whatever the scale of the dot product that it reads."""
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=27, lk=29, d=4, dtype=DTYPES[dtype], seed=93)
    (c, tau), gate = per_head(4, DTYPES[dtype]), tensor(4, seed=94, dtype=DTYPES[dtype])
    out, _ = attention(blend(q, k, distance, gate, c, tau, scale, own), v, backend=backend)
    logits = blend_logits(
        *(t.double() for t in (q, k)), distance, gate.double(), c.double(), tau.double(), scale, own
    )
    want = dense.softmax_average(logits, v.double())
    assert_close(out, want, 1e-9 if dtype == "float64" else 2e-4, "output")


@every_backend
@every_distance
@pytest.mark.parametrize("gate", [[0.0, 0.0], [0.7, -0.4]], ids=["closed", "open"])
def test_gradients_of_a_blend(backend, distance, gate):
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, lq=3, lk=4, seed=95)
    inputs = [
        t.clone().requires_grad_() for t in (q, k, v, torch.tensor(gate).double(), *per_head(2))
    ]

    def run(q, k, v, gate, c, tau):
        return attention(blend(q, k, distance, gate, c, tau, 0.5), v, backend=backend)[0]

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@every_fast_engine
@every_distance
@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-7), ("float32", 2e-3)])
def test_gradients_of_a_blend_over_many_blocks(backend, distance, dtype, rtol):
    batch, heads, kv_heads, lq, lk = MANY_BLOCKS[0]
    q, k, v = qkv(batch, heads, kv_heads, lq, lk, d=4, seed=96)
    parts = (q, k, v, tensor(heads, seed=97), *per_head(heads))
    inputs = [t.to(DTYPES[dtype]).requires_grad_() for t in parts]
    plain = [t.detach().double().requires_grad_() for t in inputs]
    pull = tensor(batch, heads, lq, 4, seed=98)
    out, _ = attention(blend(*inputs[:2], distance, *inputs[3:], 0.5), inputs[2], backend=backend)
    want = dense.softmax_average(blend_logits(*plain[:2], distance, *plain[3:], 0.5), plain[2])
    assert_close(out, want, 1e-9 if dtype == "float64" else 2e-4, "output")
    grads = [
        torch.autograd.grad((o.double() * pull).sum(), t) for o, t in ((out, inputs), (want, plain))
    ]
    assert_gradients(*grads, rtol, ("query", "key", "value", "gate", "curvature", "temperature"))


@every_backend
@every_distance
@pytest.mark.parametrize("zero", ["query", "key"])
def test_gradients_at_zero_vectors(backend, distance, zero):
    """A query or a key at the origin: the distance is smooth there."""
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, lq=3, lk=4, seed=99)
    (q if zero == "query" else k)[:, :, 1] = 0
    leaves, gate = [t.requires_grad_() for t in (q, k)], torch.tensor([0.8, -0.3]).double()

    def by_itself(q, k):
        return attention(alone(q, k, distance), v, backend=backend)[0]

    def blended(q, k):
        return attention(blend(q, k, distance, gate, 1.0, 1.0, 0.5), v, backend=backend)[0]

    assert torch.autograd.gradcheck(by_itself, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(blended, leaves, fast_mode=True)


# Differences.


def counted(monkeypatch):
    """How many pairs were taken from differences: of whole tiles, and chosen ones."""
    counts, gap = [0, 0], Tile.squared_distance

    def noted(self, pairs):
        found = gap(self, pairs)
        chosen = int((~found.isnan()).sum())
        counts[chosen < found.numel()] += chosen
        return found

    monkeypatch.setattr(Tile, "squared_distance", noted)
    return counts


def test_scattered_points_need_no_differences(monkeypatch):
    counts = counted(monkeypatch)
    q, k, v = qkv(batch=1, heads=2, lq=200, d=64, seed=102, scale=8.0, dtype=torch.float32)
    attention(alone(q, k, "geodesic"), v, backend="blockwise")
    assert counts == [0, 0]


@pytest.mark.parametrize("blended", [False, True])
def test_only_near_pairs_are_taken_from_differences(monkeypatch, blended):
    counts = counted(monkeypatch)
    q, k, v = qkv(batch=1, heads=2, lq=300, d=64, seed=103, scale=8.0, dtype=torch.float32)
    k[:, :, :5] = q[:, :, :5] * (1 + 1e-6)
    score = (
        blend(q, k, "geodesic", torch.ones(2), 1.0, 1.0, 0.3)
        if blended
        else alone(q, k, "geodesic")
    )
    attention(score, v, backend="blockwise")
    assert counts == [0, 10]


def test_crowds_far_out_are_taken_from_differences_whole(monkeypatch):
    counts = counted(monkeypatch)
    x = at_radius(tensor(1, 1, 200, 8, seed=104) * 0.01 + tensor(8, seed=105), 7.0).float()
    attention(alone(x, x, "geodesic", scale=1.0), x, backend="blockwise")
    assert counts[0] == 200 * 200 and not counts[1]


@every_fast_engine
@pytest.mark.parametrize("radius", [4.0, 8.0])
def test_a_blend_is_as_exact_far_out(backend, radius):
    """Near pairs among far ones, read from the host's product at an odd scale."""
    x = tensor(400, 16, seed=106)
    x[200:260] = x[:60] + tensor(60, 16, seed=107) * 0.5 / math.sinh(radius)
    x = at_radius(x, radius).float()[None, None]
    gate, one = torch.tensor([1.0]), torch.ones(1)
    eye = torch.eye(400)[None, None]
    score = blend(x, x, "geodesic", gate, one, one, 1e-3, own=1.0)
    out, _ = attention(score, eye, backend=backend)
    got = out.double().log() - out.double().log()[..., :1]
    exact = oracle.dense_scores(x.double(), x.double(), scale=1.0)
    exact[..., :60, 200:260] = torch.tensor(
        oracle.scores(x[:, :, :60], x[:, :, 200:260], scale=1.0)
    )
    exact = exact + 1e-3 * x.double() @ x.double().mT
    rows = slice(1, 60)
    assert_close(
        got[..., rows, 200:260] - got[..., rows, 300:301],
        exact[..., rows, 200:260] - exact[..., rows, 300:301],
        2e-3,
        "differences of logits",
    )


@every_fast_engine
@pytest.mark.parametrize("radius, rtol", [(2.0, 1e-4), (4.0, 1e-3), (6.0, 1e-2)])
def test_float32_gradients_far_out(backend, radius, rtol):
    x = at_radius(tensor(2, 1, 1, 300, 16, seed=108), radius).float()
    q, k = (t.clone().requires_grad_() for t in x)
    plain = [t.detach().double().requires_grad_() for t in (q, k)]
    v, pull = tensor(1, 1, 300, 4, seed=109), tensor(1, 1, 300, 4, seed=110)
    out, _ = attention(alone(q, k, "geodesic", scale=1.0), v.float(), backend=backend)
    want = dense.softmax_average(oracle.dense_scores(*plain, scale=1.0), v)
    grads = [
        torch.autograd.grad((o.double() * pull).sum(), t) for o, t in ((out, (q, k)), (want, plain))
    ]
    assert_gradients(*grads, rtol, ("query", "key"))


def logits_of(score, keys, reference):
    """The logits an engine computes, from its weights of one-hot values, given the first one of each row."""
    weights, _ = attention(score, torch.eye(keys)[None, None], backend="blockwise")
    logits = weights.double().log()
    return logits - logits[..., :1] + reference[..., :1]


def neighbours(radius, spacing, count=40):
    """float32 points of one sphere around one direction, c = 1, scale 1."""
    towards = tensor(16, seed=111) + tensor(count, 16, seed=112) * spacing / math.sinh(radius)
    return at_radius(towards, radius).float()[None, None]


def test_without_differences_the_product_is_useless_at_radius_eight():
    """Why engines must ask: the same score without its points."""
    x = neighbours(8.0, 1.0)
    exact = torch.tensor(oracle.scores(x, x, scale=1.0))
    watched = alone(x, x, "geodesic", scale=1.0)
    assert_close(logits_of(watched, 40, exact), exact, 1e-3, "logits")
    unwatched = replace(watched, terms=tuple(replace(t, points=None) for t in watched.terms))
    assert (logits_of(unwatched, 40, exact) - exact).abs().max() > 0.1


@pytest.mark.parametrize("radius", [4.0, 8.0])
@pytest.mark.parametrize("spacing", [1e-3, 0.3, 2.0, 20.0])
def test_float32_squared_lorentz_far_out(radius, spacing):
    """Logits as far as weights tell them apart: the temperature brings the largest to 30."""
    x = neighbours(radius, spacing)
    exact = torch.tensor(oracle.scores(x, x, scale=1.0, distance_name="squared_lorentz"))
    tau = max(1.0, float(exact.abs().max()) / 30)
    got = logits_of(alone(x, x, "squared_lorentz", scale=1.0, tau=tau), 40, exact / tau) * tau
    size = exact.abs() + exact[..., :1].abs()  # each is read beside the first one of its row
    assert ((got - exact).abs() <= 1e-3 + 1e-5 * size + 1e-5 * tau).all()


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("radius", [0.6, 4.0, 8.0])
def test_pairs_that_differ_by_rounding_get_the_gradient_of_equal_ones(radius, blended):
    """And no gradient is steeper than the distance can be, 2 sinh(r)/r a unit of the tangent vector."""
    q = at_radius(tensor(1, 1, 200, 16, seed=113), radius).float()
    gate, eye = torch.ones(1), torch.eye(200)[None, None]
    pull = tensor(
        1, 1, 200, 200, seed=115
    ).float()  # at most 1: a row's logits get gradients of at most 2 together

    def gradients(k):
        leaves = [t.clone().requires_grad_() for t in (q, k)]
        score = (
            blend(*leaves, "geodesic", gate, 1.0, 1.0, 1e-9, own=1.0)
            if blended
            else alone(*leaves, "geodesic", scale=1.0)
        )
        out, _ = attention(score, eye, backend="blockwise")
        return torch.autograd.grad((out * pull).sum(), leaves)

    up, down = torch.tensor(9.0), torch.tensor(-9.0)
    equal, moved = (
        gradients(q),
        gradients(torch.nextafter(q, torch.where(tensor(*q.shape, seed=114) > 0, up, down))),
    )
    steepest = 2 * max(1.0, math.sinh(radius) / radius)
    assert equal[0].norm(dim=-1).max() <= 2 * steepest
    assert_gradients(moved, [g.double() for g in equal], 1e-2, ("query", "key"))


@every_fast_engine
@pytest.mark.parametrize("apart", [2e-4, 5e-4])
def test_float32_gradients_of_near_pairs(backend, apart):
    """Every query has a key so near that the product cannot tell how near, though it errs little in the logit."""
    q = at_radius(tensor(1, 1, 300, 16, seed=116), 0.8).float()
    k = (
        q + torch.nn.functional.normalize(tensor(*q.shape, seed=117), dim=-1).float() * apart
    ).detach()
    q, k = (t.clone().requires_grad_() for t in (q, k))
    plain = [t.detach().double().requires_grad_() for t in (q, k)]
    eye, pull = torch.eye(300)[None, None], tensor(1, 1, 300, 300, seed=118)
    out, _ = attention(alone(q, k, "geodesic", scale=1.0), eye, backend=backend)
    want = dense.softmax_average(hyperbolic_scores(*plain, scale=1.0), eye.double())
    grads = [
        torch.autograd.grad((o.double() * pull).sum(), t) for o, t in ((out, (q, k)), (want, plain))
    ]
    assert_gradients(*grads, 1e-2, ("query", "key"))
