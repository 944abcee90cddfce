"""Gradients of `hyperbolic_attention`, and of its compiled and exported forms, every engine."""

import pytest
import torch

from hf_hyperattn.functional import hyperbolic_attention
from tests.mechanisms.hyperbolic.hyperbolic_cases import (
    NAMES,
    SETTINGS,
    attend,
    dense,
    every_fast_engine,
    every_setting,
    leaves,
    per_head,
)
from tests.oracles.cases import DTYPES, assert_close, assert_gradients, qkv, tensor
from tests.oracles.marks import causal_or_not, every_backend


@every_backend
@every_setting
@causal_or_not
def test_gradcheck(backend, setting, causal):
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, lq=3, lk=4, d=3, dv=2, seed=40)
    inputs = leaves(q, k, v, *per_head(2), tensor(1, 2, 3, 4, seed=41))

    def run(q, k, v, c, tau, mask):
        rest = {"attn_mask": mask, "is_causal": causal, "enable_gqa": True}
        return attend(q, k, v, setting, backend, curvature=c, temperature=tau, **rest)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@every_fast_engine
@every_setting
@pytest.mark.parametrize("dtype, rtol", [("float64", 1e-7), ("float32", 2e-3), ("bfloat16", 6e-2)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gradients_equal_the_oracles(backend, setting, dtype, rtol, kv_heads):
    dtype = DTYPES[dtype]
    q, k, v = qkv(batch=2, heads=4, kv_heads=kv_heads, lq=119, lk=123, d=16, dtype=dtype, seed=42)
    inputs = leaves(
        q, k, v, *(t.to(dtype) if dtype == torch.float64 else t.float() for t in per_head(4))
    )
    plain = leaves(*(t.double() for t in inputs))
    pull = tensor(2, 4, 119, 16, seed=43)
    out = attend(
        *inputs[:3],
        setting,
        backend,
        is_causal=True,
        enable_gqa=True,
        curvature=inputs[3],
        temperature=inputs[4],
    )
    want = dense(*plain[:3], setting, causal=True, curvature=plain[3], temperature=plain[4])
    grads = [
        torch.autograd.grad((o.double() * pull).sum(), t) for o, t in ((out, inputs), (want, plain))
    ]
    assert_gradients(*grads, rtol, NAMES)


@every_fast_engine
def test_memory_holds_no_matrix_of_logits(backend):
    """No tensor that autograd keeps grows with the product of the lengths."""
    kept = []
    q, k, v = leaves(*qkv(batch=1, heads=1, lq=700, d=4, dtype=torch.float32))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        hyperbolic_attention(q, k, v, backend=backend)
    assert kept and max(kept) < 700 * 700 / 10


# The compiler.


class Attention(torch.nn.Module):
    """Causal hyperbolic attention with per-head parameters, as a model would hold it."""

    def __init__(self, backend, setting):
        super().__init__()
        self.curvature, self.temperature = (
            torch.nn.Parameter(p) for p in per_head(4, torch.float32)
        )
        self.setting = {"backend": backend, **SETTINGS[setting]}

    def forward(self, q, k, v):
        space = {"curvature": self.curvature, "temperature": self.temperature}
        return hyperbolic_attention(
            q, k, v, is_causal=True, enable_gqa=True, **space, **self.setting
        )


def grouped(length):
    return leaves(*qkv(batch=1, heads=4, kv_heads=2, lq=length, d=8, dtype=torch.float32, seed=60))


@every_backend
@pytest.mark.parametrize("setting", ["geodesic-einstein"])
def test_exports_with_a_dynamic_length(backend, setting):
    model = Attention(backend, setting).eval()
    shapes = {name: {2: torch.export.Dim("length", min=2, max=4096)} for name in "qkv"}
    with torch.no_grad():
        program = torch.export.export(model, grouped(12), dynamic_shapes=shapes)
        for other in (12, 2, 300):
            inputs = grouped(other)
            assert_close(
                program.module()(*inputs), model(*inputs), 1e-5, f"exported output, length {other}"
            )
