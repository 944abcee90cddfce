"""`hyperbolic_attention` against the exact definition: values, masks, heads, dropout, every engine."""

import pytest
import torch

from hf_hyperattn.functional import hyperbolic_attention, hyperbolic_scores
from tests.mechanisms.hyperbolic.hyperbolic_cases import (
    SETTINGS,
    attend,
    dense,
    every_fast_engine,
    every_setting,
    expected,
    leaves,
    per_head,
)
from tests.oracles import hyperbolic as oracle
from tests.oracles.cases import BACKENDS, DTYPES, MANY_BLOCKS, TOLERANCE, assert_close, qkv
from tests.oracles.marks import causal_or_not, every_backend

# Values.


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@every_setting
@causal_or_not
def test_output_is_the_definition(backend, setting, causal):
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=4, lk=5, d=3, dv=4, scale=2.0)
    c, tau = per_head(4)
    want = expected(q, k, v, setting, causal=causal, curvature=c, temperature=tau)
    got = attend(
        q, k, v, setting, backend, is_causal=causal, enable_gqa=True, curvature=c, temperature=tau
    )
    assert_close(got, want, 1e-9, "output")


@every_backend
@every_setting
def test_one_curvature_for_all_heads(backend, setting):
    q, k, v = qkv(batch=1, heads=4, kv_heads=2, lq=4, lk=5, d=3, seed=1)
    want = expected(q, k, v, setting, curvature=0.6, temperature=1.7, scale=0.9)
    got = attend(
        q, k, v, setting, backend, curvature=0.6, temperature=1.7, scale=0.9, enable_gqa=True
    )
    assert_close(got, want, 1e-9, "output")


@every_backend
@every_setting
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_in_every_dtype(backend, setting, dtype):
    """The oracle sees the same rounded inputs, so only the engine's own error is left."""
    dtype = DTYPES[dtype]
    q, k, v = qkv(batch=2, heads=2, lq=33, lk=40, d=16, dtype=dtype, seed=5, scale=2.0)
    got = attend(q, k, v, setting, backend)
    assert got.dtype == dtype
    assert_close(got, dense(*(t.double() for t in (q, k, v)), setting), TOLERANCE[dtype], "output")


@every_fast_engine
@every_setting
@causal_or_not
@pytest.mark.parametrize("batch, heads, kv_heads, lq, lk", MANY_BLOCKS[:2], ids=str)
def test_output_over_many_blocks(backend, setting, causal, batch, heads, kv_heads, lq, lk):
    q, k, v = qkv(batch, heads, kv_heads, lq, lk, d=4, seed=6, dtype=torch.float32)
    got = attend(q, k, v, setting, backend, is_causal=causal, enable_gqa=True)
    want = dense(*(t.double() for t in (q, k, v)), setting, causal=causal)
    assert_close(got, want, TOLERANCE[torch.float32], "output")


@every_setting
def test_scores_and_attention_are_one_operator(setting):
    q, k, v = qkv(seed=11)
    logits = hyperbolic_scores(
        q, k, curvature=0.8, temperature=1.1, scale=0.7, distance=SETTINGS[setting]["distance"]
    )
    got = attend(q, k, v, setting, "reference", curvature=0.8, temperature=1.1, scale=0.7)
    weights = torch.softmax(logits, -1)
    einstein = SETTINGS[setting]["aggregation"] == "einstein"
    assert_close(
        got,
        oracle.dense_midpoints(weights, v, curvature=0.8, scale=0.7) if einstein else weights @ v,
        1e-10,
    )


@every_backend
def test_inputs_may_be_views(backend):
    q, k, v = (t.transpose(1, 2) for t in qkv(batch=2, heads=5, lq=3, d=4, seed=12))
    got = hyperbolic_attention(q, k, v, backend=backend)
    assert_close(
        got, hyperbolic_attention(*(t.contiguous() for t in (q, k, v)), backend=backend), 1e-12
    )


@every_backend
@pytest.mark.parametrize("c", [1e-10, 1e-16])
def test_without_curvature_it_is_distance_attention_over_the_mean(backend, c):
    q, k, v = qkv(batch=1, heads=2, lq=6, lk=7, d=4, seed=13, dtype=torch.float32)
    flat = torch.softmax(-2 * torch.cdist(q.double(), k.double()) * 0.5 / 0.8, -1) @ v.double()
    assert_close(
        hyperbolic_attention(q, k, v, curvature=c, temperature=0.8, backend=backend), flat, 1e-5
    )


# Masks, heads, dropout.


@every_backend
@every_setting
def test_a_query_that_sees_no_key_gives_zeros(backend, setting):
    inputs = leaves(*qkv(batch=1, heads=2, lq=140, dtype=torch.float32))
    mask = torch.ones(140, 140, dtype=torch.bool)
    mask[3] = False
    out = attend(*inputs, setting, backend, attn_mask=mask)
    assert not out[:, :, 3].any() and out[:, :, 4].any()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), inputs))


@every_backend
@every_setting
def test_dropout_is_of_the_weights(backend, setting):
    """A mean over draws comes near the output without it; a midpoint is a ratio, and only nearly so."""
    q, k, v = qkv(batch=400, heads=1, lq=1, lk=40, d=4, seed=32)
    q, k, v = (t[:1].expand(400, -1, -1, -1) for t in (q, k, v))
    torch.manual_seed(0)
    out = attend(q, k, v, setting, backend, dropout_p=0.3)
    assert out.std(0).max() > 1e-3
    assert_close(
        out.mean(0), attend(q[:1], k[:1], v[:1], setting, backend)[0], 2e-2, "mean over draws"
    )


def test_einstein_differs_from_the_mean():
    q, k, v = qkv(scale=3.0)
    one, other = (hyperbolic_attention(q, k, v, aggregation=a) for a in ("einstein", "mean"))
    assert (one - other).abs().max() > 1e-2
