"""Autocast rounds projections, not what engines compute: products of statistics and midpoints leave float16's range."""

import pytest
import torch

from hf_hyperattn import HsaConfig, HyperAttnConfig
from hf_hyperattn.engines import Options
from hf_hyperattn.functional import cone_attention, hype_attention, hyperbolic_attention
from hf_hyperattn.integration.attention.hyper import Hyper
from hf_hyperattn.mechanisms.base import Host, HostCall
from tests.oracles.cases import DTYPES, assert_close, assert_gradients, qkv
from tests.oracles.marks import every_backend

CALLS = {
    "cone": cone_attention,
    "hyperbolic": hyperbolic_attention,
    "hype": lambda *a, **k: hype_attention(*a, mu=0.02, tau=20.0, **k),
}
half = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def inputs(length=60):
    q, k, v = qkv(batch=1, heads=2, lq=length, d=8, dtype=torch.float32, seed=3)
    return q, k, 20 * v


@every_backend
@half
@pytest.mark.parametrize("name", CALLS)
def test_a_function_computes_what_it_does_without(name, dtype, backend):
    q, k, v = (t.requires_grad_() for t in inputs())
    expected = CALLS[name](q, k, v, is_causal=True, backend=backend)
    with torch.autocast("cpu", DTYPES[dtype]):
        out = CALLS[name](q, k, v, is_causal=True, backend=backend)
    assert_close(out, expected, 0.0, "output")
    grads, plain = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, expected))
    assert_gradients(grads, plain, 0.0, "qkv")


@half
def test_backward_may_be_called_under_autocast(dtype):
    q, k, v = (t.requires_grad_() for t in inputs())
    out = hyperbolic_attention(q, k, v, backend="blockwise")
    plain = torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True)
    with torch.autocast("cpu", DTYPES[dtype]):
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert_gradients(grads, plain, 0.0, "qkv")


@half
def test_so_does_a_host_under_hsa(dtype):
    hyper = Hyper(
        HyperAttnConfig((HsaConfig(windows=(4, 16), near=8),), mode="replace"),
        Host("x", 2, 2, True, False, 0),
    )
    q, k, v = inputs()
    call = HostCall(q, k, v, 8**-0.5, True, Options(is_causal=True))
    expected, _ = hyper(call)
    with torch.autocast("cpu", DTYPES[dtype]):
        out, _ = hyper(call)
    assert_close(out, expected, 0.0, "output")
