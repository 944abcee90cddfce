"""Cone scores inside the engines, beside what a host may bring: sinks, a soft cap, a dot product to blend with.

Terms that are constant in a row drop out of a plain softmax. Here they do not, so an engine that leaves them out
is found.
"""

import pytest
import torch

from hf_hyperattn import ConeConfig
from hf_hyperattn.engines import Options, attention, dot_score
from hf_hyperattn.mechanisms.base import Host, HostCall, Plan
from hf_hyperattn.mechanisms.cone.functional import cone_attention, cone_space
from hf_hyperattn.mechanisms.cone.score import ConeLayer
from tests.oracles import dense, softmax
from tests.oracles.cases import (
    BACKENDS,
    CORE,
    DTYPES,
    MANY_BLOCKS,
    PAIRINGS,
    assert_close,
    assert_gradients,
    per_head,
    qkv,
    tensor,
)
from tests.oracles.marks import both_dtypes, every_backend


def space_of(q, pairing, gamma=1.0, radius=1.0):
    setting = PAIRINGS[pairing]
    mapping = setting["mapping"]
    rest = (gamma, radius, setting["squared"], setting["clamp_heights"])
    return cone_space(q, setting["variant"], mapping, *rest)


def blend_score(q, k, pairing, gate, gamma, radius, scale):
    return dot_score(q, k, scale).plus(
        *space_of(q, pairing, gamma, radius).score(q, k, scale, gate).terms
    )


def blend_logits(q, k, pairing, gate, gamma, radius, scale):
    far = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    cone = dense.scores(q, k, gamma=gamma, radius=radius, **PAIRINGS[pairing])
    return scale * q @ far.mT + gate[:, None, None] * cone


@every_backend
@pytest.mark.parametrize("pairing", CORE)
@both_dtypes
@pytest.mark.parametrize(
    "asked",
    [{"sinks": [-1.0, 0.5]}, {"softcap": 0.7}, {"sinks": [0.0, 2.0], "softcap": 0.4}],
    ids=str,
)
def test_sinks_and_caps_act_on_the_whole_logit(backend, pairing, dtype, asked):
    """A cap and a sink see the score itself, row constants included."""
    q, k, v = qkv(batch=2, heads=2, kv_heads=1, lq=7, lk=9, dtype=DTYPES[dtype], seed=90)
    gamma, radius = per_head(2, DTYPES[dtype])
    sinks = torch.tensor(asked["sinks"], dtype=torch.float64) if "sinks" in asked else None
    options = Options(is_causal=True, sinks=sinks, softcap=asked.get("softcap"))
    out, _ = attention(space_of(q, pairing, gamma, radius).score(q, k), v, options, backend=backend)
    logits = dense.scores(
        q.double(), k.double(), gamma=gamma.double(), radius=radius.double(), **PAIRINGS[pairing]
    )
    expected, _ = softmax.attention(logits, v, causal=True, **{**asked, "sinks": sinks})
    assert_close(out, expected, 1e-9 if dtype == "float64" else 2e-4, "output")


@every_backend
@pytest.mark.parametrize("pairing", CORE)
def test_gradients_beside_sinks_and_a_cap(backend, pairing):
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, lq=3, lk=4, seed=91)
    inputs = [t.clone().requires_grad_() for t in (q, k, v, *per_head(2), tensor(2, seed=92))]

    def run(q, k, v, gamma, radius, sinks):
        score = space_of(q, pairing, gamma, radius).score(q, k)
        return attention(
            score, v, Options(is_causal=True, sinks=sinks, softcap=0.8), backend=backend
        )[0]

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@every_backend
@pytest.mark.parametrize("pairing", CORE)
@both_dtypes
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_blend_is_dot_product_plus_gated_cone(backend, pairing, dtype, scale):
    """S_original + g·S_cone, the cone taking q and k unscaled whatever the scale of the dot product."""
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=7, lk=9, d=4, dtype=DTYPES[dtype], seed=93)
    gamma, radius = per_head(4, DTYPES[dtype])
    gate = tensor(4, seed=94, dtype=DTYPES[dtype])
    out, _ = attention(blend_score(q, k, pairing, gate, gamma, radius, scale), v, backend=backend)
    plain = (t.double() for t in (q, k))
    logits = blend_logits(*plain, pairing, gate.double(), gamma.double(), radius.double(), scale)
    assert_close(
        out,
        dense.softmax_average(logits, v.double()),
        1e-9 if dtype == "float64" else 2e-4,
        "output",
    )


@every_backend
@pytest.mark.parametrize("pairing", CORE)
@pytest.mark.parametrize("gate", [[0.0, 0.0], [0.7, -0.4]], ids=["closed", "open"])
def test_gradients_of_a_blend(backend, pairing, gate):
    """A closed gate is exact identity and still learns; geometry learns once it opens."""
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, lq=3, lk=4, seed=95)
    inputs = [
        t.clone().requires_grad_() for t in (q, k, v, torch.tensor(gate).double(), *per_head(2))
    ]

    def run(q, k, v, gate, gamma, radius):
        return attention(blend_score(q, k, pairing, gate, gamma, radius, 0.5), v, backend=backend)[
            0
        ]

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
@pytest.mark.parametrize("pairing", CORE)
@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-7), ("float32", 2e-3)])
def test_gradients_of_a_blend_over_many_blocks(backend, pairing, dtype, rtol):
    batch, heads, kv_heads, lq, lk = MANY_BLOCKS[0]
    q, k, v = qkv(batch, heads, kv_heads, lq, lk, d=4, seed=96)
    parts = (q, k, v, tensor(heads, seed=97), *per_head(heads))
    inputs = [t.to(DTYPES[dtype]).requires_grad_() for t in parts]
    plain = [t.detach().double().requires_grad_() for t in inputs]
    weight = tensor(batch, heads, lq, 4, seed=98)
    out, _ = attention(
        blend_score(*inputs[:2], pairing, *inputs[3:], 0.5), inputs[2], backend=backend
    )
    expected = dense.softmax_average(blend_logits(*plain[:2], pairing, *plain[3:], 0.5), plain[2])
    assert_close(out, expected, 1e-9 if dtype == "float64" else 2e-4, "output")
    grads = [
        torch.autograd.grad((o.double() * weight).sum(), t)
        for o, t in ((out, inputs), (expected, plain))
    ]
    names = ("query", "key", "value", "gate", "gamma", "radius")
    assert_gradients(*grads, rtol, names, stray=1e-3)


@every_backend
@pytest.mark.parametrize("pairing", CORE)
def test_a_cap_acts_alike_on_all_heads_and_on_every_single_one(backend, pairing):
    """Replaced one and all by number, heads are what they are where all are replaced; forward and gradient."""
    q, k, v = (t.requires_grad_() for t in qkv(batch=2, heads=2, kv_heads=1, lq=7, lk=7, seed=93))
    host = Host("x", 2, 1, True, False, 0)
    call = HostCall(q, k, v, 0.5, True, Options(is_causal=True, softcap=0.7))
    outs, grads = [], []
    for heads in (None, (0, 1)):
        layer = ConeLayer(ConeConfig(**PAIRINGS[pairing]), host, "replace", heads).double()
        outs.append(layer(Plan.from_call(call)).run(backend)[0])
        learned = (q, k, v, layer.log_gamma, layer.log_radius)
        grads.append(torch.autograd.grad(outs[-1].square().sum(), learned))
    assert_close(outs[1], outs[0], 1e-12, "output")
    assert_gradients(grads[1], grads[0], 1e-9, [*"qkv", "gamma", "radius"])


NEAR_SETTINGS = [
    {"mapping": "xi"},
    {"mapping": "expmap"},
    {"variant": "penumbral"},
    {"variant": "penumbral", "mapping": "xi", "clamp_heights": True, "squared": False},
]


@pytest.mark.parametrize("backend", ["blockwise", "cpu"])
@pytest.mark.parametrize("magnitude", [0.3, 10.0])
@pytest.mark.parametrize("noise", [1e-5, 1e-3])
@pytest.mark.parametrize("setting", NEAR_SETTINGS, ids=str)
def test_near_pairs_are_as_exact_as_in_the_definition(backend, setting, noise, magnitude):
    """Keys that are a query and a little noise: to 1e-4 of the largest number, or as float32 differences have it."""
    q, v, other = (
        tensor(1, 2, 24, 16, seed=70),
        tensor(1, 2, 24, 4, seed=71),
        tensor(1, 2, 24, 16, seed=72),
    )
    q = q * magnitude
    given = [t.float() for t in (q, q.flip(2) + noise * other, v)]
    given += [torch.tensor([1.0, 1.3]), torch.tensor([1.0, 0.8])]
    pull = tensor(1, 2, 24, 4, seed=73)

    def run(backend, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in given]
        *qkv, gamma, radius = leaves
        out = cone_attention(*qkv, gamma=gamma, radius=radius, backend=backend, **setting)
        return [out.detach(), *torch.autograd.grad((out * pull.to(dtype)).sum(), leaves)]

    exact, own, got = (
        run("reference", torch.float64),
        run("reference", torch.float32),
        run(backend, torch.float32),
    )
    largest = max(float(g.abs().max()) for g in exact[1:])
    for e, o, g in zip(exact, own, got, strict=True):
        allowed = max(1e-4 * largest, 4 * float((o - e).abs().max()))
        assert float((g - e).abs().max()) <= allowed
