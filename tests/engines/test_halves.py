"""Gradients in half precision where points coincide or nearly do: what nearly cancels is added before it is rounded."""

import pytest
import torch

from hf_hyperattn import ConeConfig, HyperbolicConfig
from hf_hyperattn.engines import Options
from hf_hyperattn.engines.score import upcast_for_grad
from hf_hyperattn.functional import cone_attention, hyperbolic_attention
from hf_hyperattn.mechanisms.base import Host, HostCall, Plan
from hf_hyperattn.registry import get_mechanism
from tests.oracles.cases import FAST, assert_gradients, qkv

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
CALLS = {
    "umbral": cone_attention,
    "penumbral": lambda *x, **rest: cone_attention(*x, variant="penumbral", **rest),
    "geodesic": lambda *x, **rest: hyperbolic_attention(*x, aggregation="mean", **rest),
}


def close_pairs(dtype):
    """Every key a query, or near to one, though not nearer than a product in float32 tells apart."""
    q, _, v = qkv(batch=1, heads=2, lq=24, d=33, dtype=dtype)
    k = q.clone()
    k[:, :, ::3, 0] += 0.05
    return q, k.flip(2), v


def gradients(call, dtype, tensors):
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    out = call(*leaves)
    return torch.autograd.grad((out.double() * torch.arange(out.shape[-1]).cos()).sum(), leaves)


@HALVES
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_points_that_nearly_coincide(name, backend, dtype):
    tensors = close_pairs(dtype)
    exact = gradients(lambda *x: CALLS[name](*x, backend="reference"), torch.float64, tensors)
    got = gradients(lambda *x: CALLS[name](*x, backend=backend), dtype, tensors)
    assert_gradients([g.double() for g in got], exact, 6e-2, "qkv")


@HALVES
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(
    "config", [ConeConfig(), HyperbolicConfig(aggregation="mean")], ids=lambda c: c.mechanism
)
def test_gradients_of_a_blend_of_points_that_nearly_coincide(config, backend, dtype):
    layer = get_mechanism(config.mechanism).layer(
        config, Host("host", 2, 2, False, False, 0), "blend"
    )
    with torch.no_grad():
        layer.gate.fill_(0.7)

    def run(engine):
        def call(q, k, v):
            out, _ = layer(Plan.from_call(HostCall(q, k, v, 0.2, False, Options()))).run(engine)
            assert out.dtype == q.dtype
            return out

        return call

    tensors = close_pairs(dtype)
    exact = gradients(run("reference"), torch.float64, tensors)
    assert_gradients(
        [g.double() for g in gradients(run(backend), dtype, tensors)], exact, 6e-2, "qkv"
    )


def test_nothing_is_copied_without_need():
    half = torch.zeros(2, dtype=torch.bfloat16)
    assert upcast_for_grad(half) is half
    half.requires_grad_()
    assert upcast_for_grad(half).dtype == torch.float32
    with torch.no_grad():
        assert upcast_for_grad(half) is half
    whole = torch.zeros(2, requires_grad=True)
    assert upcast_for_grad(whole) is whole
