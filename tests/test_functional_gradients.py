"""Gradients of `cone_attention`: gradcheck in float64, the dense oracle's autograd in the rest, ties, checkpoints."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_hyperattn.functional import cone_attention
from tests.oracles import cone as loops
from tests.oracles import dense
from tests.oracles.cases import (
    DTYPES,
    FAST,
    MANY_BLOCKS,
    PAIRINGS,
    assert_close,
    assert_gradients,
    per_head,
    qkv,
    tensor,
)
from tests.oracles.marks import causal_or_not, core_pairing, every_backend, every_pairing

NAMES = ("query", "key", "value", "gamma", "radius", "attn_mask")


def attend(q, k, v, pairing, backend, **rest):
    return cone_attention(q, k, v, backend=backend, **PAIRINGS[pairing], **rest)


def leaves(*tensors):
    return tuple(t.detach().clone().requires_grad_() for t in tensors)


@every_backend
@core_pairing
@causal_or_not
def test_gradcheck(backend, pairing, causal):
    """query, key, value, gamma, radius and an additive per-head mask, with grouped heads."""
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, lq=3, lk=4, d=3, dv=2, seed=40)
    inputs = leaves(q, k, v, *per_head(2), tensor(1, 2, 3, 4, seed=41))

    def run(q, k, v, gamma, radius, mask):
        rest = {"attn_mask": mask, "is_causal": causal, "enable_gqa": True}
        return attend(q, k, v, pairing, backend, gamma=gamma, radius=radius, **rest)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@every_backend
@every_pairing
@causal_or_not
@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-7), ("float32", 2e-3), ("bfloat16", 6e-2)])
def test_gradients_equal_the_oracles(backend, pairing, causal, dtype, rtol):
    dtype = DTYPES[dtype]
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=19, lk=23, d=16, dtype=dtype, seed=42)
    inputs = leaves(q, k, v, *per_head(4, dtype))
    weight = tensor(2, 4, 19, 16, seed=43)
    rest = {"gamma": inputs[3], "radius": inputs[4]}
    out = attend(*inputs[:3], pairing, backend, is_causal=causal, enable_gqa=True, **rest)
    got = torch.autograd.grad((out.double() * weight).sum(), inputs)
    assert all(g.dtype == dtype for g in got)
    plain = leaves(*(t.double() for t in inputs))
    out = dense.attention(
        *plain[:3], None, causal, gamma=plain[3], radius=plain[4], **PAIRINGS[pairing]
    )
    assert_gradients(got, torch.autograd.grad((out * weight).sum(), plain), rtol, NAMES)


@pytest.mark.parametrize("backend", FAST)
@core_pairing
@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-7), ("float32", 2e-3)])
@pytest.mark.parametrize(
    "batch, heads, kv_heads, lq, lk", MANY_BLOCKS[:1] + MANY_BLOCKS[2:], ids=str
)
def test_gradients_over_many_blocks(backend, pairing, dtype, rtol, batch, heads, kv_heads, lq, lk):
    """Every block of rows and of keys adds its share, to the mask as well."""
    q, k, v = qkv(batch, heads, kv_heads, lq, lk, d=4, seed=44)
    inputs = leaves(
        *(
            t.to(DTYPES[dtype])
            for t in (q, k, v, *per_head(heads), tensor(1, heads, lq, lk, seed=45))
        )
    )
    plain = leaves(*(t.double() for t in inputs))
    weight = tensor(batch, heads, lq, 4, seed=46)
    rest = {"attn_mask": inputs[5], "is_causal": True, "enable_gqa": True}
    out = attend(*inputs[:3], pairing, backend, gamma=inputs[3], radius=inputs[4], **rest)
    got = torch.autograd.grad((out.double() * weight).sum(), inputs)
    out = dense.attention(
        *plain[:3], plain[5], True, gamma=plain[3], radius=plain[4], **PAIRINGS[pairing]
    )
    assert_gradients(got, torch.autograd.grad((out * weight).sum(), plain), rtol, NAMES, stray=1e-3)


@every_backend
@pytest.mark.parametrize(
    "shape", [(3, 4), (1, 4), (2, 1, 3, 4), (1, 2, 1, 4), (2, 1, 1, 1)], ids=str
)
def test_gradient_of_a_broadcast_mask(backend, shape):
    """A bias that serves many heads or rows gets the sum of their gradients."""
    q, k, v = qkv(batch=2, heads=2, lq=3, lk=4, seed=47)
    (mask,) = leaves(tensor(*shape, seed=48))
    assert torch.autograd.gradcheck(
        lambda m: attend(q, k, v, "umbral-xi", backend, attn_mask=m), (mask,), fast_mode=True
    )


@every_backend
@pytest.mark.parametrize("wanted", range(5), ids=NAMES[:5])
def test_one_input_alone_may_need_a_gradient(backend, wanted):
    inputs = [*qkv(batch=1, heads=2, lq=5, seed=49), *per_head(2)]
    everything = leaves(*inputs)
    inputs[wanted] = inputs[wanted].clone().requires_grad_()
    grads = []
    for q, k, v, gamma, radius in (inputs, everything):
        out = attend(q, k, v, "penumbral-psi", backend, gamma=gamma, radius=radius)
        target = (q, k, v, gamma, radius)[wanted]
        grads.append(torch.autograd.grad(out.square().sum(), target)[0])
    assert_close(grads[0], grads[1], 1e-12, "gradient")


@every_backend
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_one_parameter_for_all_heads_gets_the_summed_gradient(backend, shape):
    q, k, v = qkv(batch=1, heads=3, lq=4, seed=58)
    gamma, radius = (
        torch.full(shape, x, dtype=torch.float64, requires_grad=True) for x in (0.8, 1.2)
    )

    def run(gamma, radius):
        return attend(q, k, v, "penumbral-psi", backend, gamma=gamma, radius=radius)

    assert torch.autograd.gradcheck(run, (gamma, radius), fast_mode=True)


@every_backend
@core_pairing
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("radius", [1e-4, 100.0])
def test_gradients_at_extreme_radii_stay_finite(backend, pairing, dtype, radius):
    inputs = leaves(
        *qkv(batch=1, heads=2, lq=6, dtype=DTYPES[dtype]),
        torch.full((2,), radius, dtype=DTYPES[dtype]),
    )
    out = attend(*inputs[:3], pairing, backend, radius=inputs[3])
    for name, grad in zip(
        ("q", "k", "v", "radius"), torch.autograd.grad(out.square().sum(), inputs), strict=True
    ):
        assert torch.isfinite(grad).all(), f"gradient of {name}"


@every_backend
@every_pairing
@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-4), ("float32", 1e-2)])
def test_gradient_at_ties(backend, pairing, dtype, rtol):
    """Every query equals its key: the kink is even, so the definition's central difference fixes the gradient."""
    x = tensor(1, 1, 4, 3, seed=50)
    v, weight = tensor(1, 1, 4, 2, seed=51), tensor(1, 1, 4, 2, seed=52).numpy()
    q, k = leaves(x.to(DTYPES[dtype]), x.to(DTYPES[dtype]))
    out = attend(q, k, v.to(DTYPES[dtype]), pairing, backend)
    got = torch.autograd.grad((out.double() * torch.from_numpy(weight)).sum(), (q, k))

    def loss(q, k):
        return float((loops.attention(q, k, v, **PAIRINGS[pairing]) * weight).sum())

    expected = torch.zeros(2, 1, 1, 4, 3, dtype=torch.float64)
    for side, i, c in torch.cartesian_prod(
        torch.arange(2), torch.arange(4), torch.arange(3)
    ).tolist():
        step = torch.zeros_like(x)
        step[0, 0, i, c] = 1e-6
        moved = [(x + s, x) if side == 0 else (x, x + s) for s in (step, -step)]
        expected[side, 0, 0, i, c] = (loss(*moved[0]) - loss(*moved[1])) / 2e-6
    assert_gradients(got, expected, rtol, NAMES)


@every_backend
def test_all_points_coincide(backend):
    """Every pair is a tie: weights are even, no query gets a gradient, and the keys' cancel."""
    x = tensor(1, 1, 1, 3, seed=56).expand(-1, -1, 6, -1)
    q, k, v = leaves(x, x, tensor(1, 1, 6, 3, seed=57))
    out = attend(q, k, v, "umbral-xi", backend)
    assert_close(out, v.mean(2, keepdim=True).expand_as(out), 1e-9, "output")
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert_close(dv, torch.ones_like(dv), 1e-9, "gradient of value")
    assert_close(dq, torch.zeros_like(dq), 1e-9, "gradient of query")
    assert_close(dk.sum(2), torch.zeros(1, 1, 3), 1e-9, "summed gradient of key")


@every_backend
def test_second_derivative_is_right_or_refused(backend):
    """An engine with its own backward must not pass a wrong second derivative in silence."""
    q, k, v = leaves(*qkv(batch=1, heads=1, lq=3, d=3, seed=53))
    out = attend(q, k, v, "umbral-xi", backend)
    try:
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), q)
    except (RuntimeError, NotImplementedError):
        return
    (first,) = torch.autograd.grad(
        dense.attention(q, k, v, **PAIRINGS["umbral-xi"]).square().sum(), q, create_graph=True
    )
    assert_gradients([second], torch.autograd.grad(first.square().sum(), q), 1e-6, NAMES)


@every_backend
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_gradient_checkpointing_changes_nothing(backend, reentrant, dropout_p):
    inputs = leaves(*qkv(batch=1, heads=2, lq=9, seed=54), *per_head(2))

    def run(q, k, v, gamma, radius):
        rest = {"gamma": gamma, "radius": radius, "dropout_p": dropout_p, "is_causal": True}
        return attend(q, k, v, "umbral-xi", backend, **rest)

    grads = []
    for call in (run, lambda *a: checkpoint(run, *a, use_reentrant=reentrant)):
        torch.manual_seed(0)
        out = call(*inputs)
        out.square().sum().backward()
        grads.append([t.grad for t in inputs])
        for t in inputs:
            t.grad = None
    assert_gradients(grads[1], grads[0], 1e-12, NAMES)


@every_backend
@core_pairing
def test_autocast(backend, pairing):
    """Arithmetic inside stays in float32; the output keeps the query's dtype, also with bfloat16 values."""
    q, k, v = leaves(*qkv(batch=1, heads=2, lq=17, d=8, dtype=torch.float32, seed=55))
    expected = attend(q, k, v, pairing, backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, k, v.bfloat16(), pairing, backend)
    assert out.dtype == torch.float32
    assert_close(out, expected, 3e-2, "output")
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    plain = torch.autograd.grad(expected.square().sum(), (q, k, v))
    assert_gradients(grads, plain, 6e-2, NAMES)
