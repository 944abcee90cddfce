"""Gradients of `hype_attention`, all its ways against each other, and its compiled form."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_hyperattn.functional import hype_attention
from tests.mechanisms.hype.hype_cases import NAMES, WAYS, every_form, every_way, per_head
from tests.oracles.cases import BACKENDS, DTYPES, assert_close, assert_gradients, qkv, tensor
from tests.oracles.marks import first_always


@every_way
@every_form
@pytest.mark.parametrize("lq", [3, 17])
def test_gradcheck(backend, form, lq):
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, lq=lq, lk=lq + 1, d=2, dv=2, seed=40)
    mu, tau = per_head(2)
    inputs = [t.clone().requires_grad_() for t in (q, k, v, mu, tau)]

    def run(q, k, v, mu, tau):
        return hype_attention(
            q, k, v, is_causal=True, enable_gqa=True, mu=mu, tau=tau, form=form, backend=backend
        )

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@every_form
@pytest.mark.parametrize("backend", [*BACKENDS[1:], "sdpa", "auto"])
@pytest.mark.parametrize("dtype, rtol, causal", [("float64", 1e-9, False), ("float32", 2e-3, True)])
def test_gradients_over_many_blocks(backend, form, dtype, rtol, causal):
    """Against the reference in float64, at the bend that a long model would have."""
    q, k, v = qkv(1, 4, 2, 701, 703, d=4, seed=44)
    mu, tau = torch.tensor([1 / 700, 1 / 500, 1 / 900, 1 / 700]), torch.tensor([350.0, 90, 20, 3])
    weight = tensor(1, 4, 701, 4, seed=45)

    def grads(backend, dtype):
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v, mu, tau)]
        rest = dict(mu=inputs[3], tau=inputs[4], form=form, is_causal=causal, enable_gqa=True)
        out = hype_attention(*inputs[:3], backend=backend, **rest)
        return torch.autograd.grad((out * weight.to(dtype)).sum(), inputs)

    assert_gradients(grads(backend, DTYPES[dtype]), grads("reference", torch.float64), rtol, NAMES)


@every_form
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gradients_take_the_way_that_is_exact_enough(form, dtype):
    """Columns are refused where mu and tau learn in half precision; `auto` evaluates the bias instead."""
    q, k, v = qkv(1, 2, lq=300, d=16, dtype=DTYPES[dtype])
    mu, tau = torch.tensor([1 / 300, 1 / 500]), torch.tensor([150.0, 20.0])

    def grads(dtype, backend):
        wide = torch.promote_types(dtype, torch.float32)
        inputs = [t.detach().clone().to(dtype) for t in (q, k, v)] + [
            t.clone().to(wide) for t in (mu, tau)
        ]
        inputs = [t.requires_grad_() for t in inputs]
        out = hype_attention(
            *inputs[:3], is_causal=True, mu=inputs[3], tau=inputs[4], form=form, backend=backend
        )
        return torch.autograd.grad(out.double().square().sum(), inputs)

    exact = grads(torch.float64, "reference")
    assert_gradients(grads(DTYPES[dtype], "auto"), exact, 6e-2, NAMES)
    with pytest.raises(ValueError, match="half precision is too coarse for the gradients"):
        grads(DTYPES[dtype], "sdpa")
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    out = hype_attention(*inputs, is_causal=True, mu=mu, tau=tau, form=form, backend="sdpa")
    got = torch.autograd.grad(out.double().square().sum(), inputs)
    assert_gradients(got, exact[:3], 6e-2, NAMES[:3])


@every_form
@given(
    seed=st.integers(0, 10_000), lq=st.integers(1, 30), lk=st.integers(1, 30), causal=st.booleans()
)
def test_all_ways_agree(form, seed, lq, lk, causal):
    q, k, v = qkv(batch=2, heads=2, kv_heads=1, lq=lq, lk=lk, d=5, seed=seed)
    mu, tau = (t.abs() + 0.01 for t in (tensor(2, seed=seed) * 0.1, tensor(2, seed=seed + 1) * 5))
    outs = [
        hype_attention(
            q, k, v, is_causal=causal, enable_gqa=True, mu=mu, tau=tau, form=form, backend=backend
        )
        for backend in WAYS
    ]
    for out in outs[1:]:
        assert_close(out, outs[0], 1e-9, "output")


# Exported.


class Module(torch.nn.Module):
    """Causal attention with HyPE and learned numbers, as a model would hold them."""

    def __init__(self, backend, form):
        super().__init__()
        self.mu, self.tau = (torch.nn.Parameter(t) for t in per_head(4, torch.float32))
        self.setting = dict(backend=backend, form=form, is_causal=True, enable_gqa=True)

    def forward(self, q, k, v):
        return hype_attention(q, k, v, mu=self.mu, tau=self.tau, **self.setting)


@first_always("backend, form", [("auto", "cosh"), ("reference", "cosh"), ("blockwise", "sinh")])
def test_exports_with_a_dynamic_length(backend, form):
    model, length = Module(backend, form), torch.export.Dim("length", min=2, max=4096)
    with torch.no_grad():
        inputs = tuple(qkv(1, 4, 2, 12, d=8, dtype=torch.float32))
        program = torch.export.export(model, inputs, dynamic_shapes={n: {2: length} for n in "qkv"})
        longer = qkv(1, 4, 2, 300, d=8, dtype=torch.float32)
        assert_close(program.module()(*longer), model(*longer), 1e-4, "exported output")
