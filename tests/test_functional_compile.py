"""`cone_attention` under torch.compile and torch.export: one graph, dynamic lengths, the same numbers."""

from functools import partial

import pytest
import torch
from torch.export import Dim
from torch.func import grad, jvp

from hf_hyperattn.functional import cone_attention, hype_attention, sparse_attention
from hf_hyperattn.mechanisms.sparse import Exact, Pages, Window
from tests.oracles.cases import BACKENDS, PAIRINGS, assert_close, assert_gradients, per_head, qkv
from tests.oracles.marks import first_always

every_backend = first_always("backend", ["cpu", *(b for b in BACKENDS if b != "cpu")])
with_auto = first_always("backend", ["auto", *BACKENDS])
two_variants = pytest.mark.parametrize("pairing", ["umbral-xi", "penumbral-psi"])
NAMES = ("query", "key", "value", "gamma", "radius")


class Attention(torch.nn.Module):
    """Causal cone attention with per-head parameters, as a model would hold it."""

    def __init__(self, backend, pairing, heads=4, dtype=torch.float32):
        super().__init__()
        self.gamma, self.radius = (torch.nn.Parameter(p) for p in per_head(heads, dtype))
        self.setting = {"backend": backend, **PAIRINGS[pairing]}

    def forward(self, q, k, v, mask=None):
        rest = {"gamma": self.gamma, "radius": self.radius, "enable_gqa": True}
        return cone_attention(q, k, v, attn_mask=mask, is_causal=True, **rest, **self.setting)


def inputs(length, dtype=torch.float32):
    return [
        t.requires_grad_()
        for t in qkv(batch=1, heads=4, kv_heads=2, lq=length, d=8, dtype=dtype, seed=60)
    ]


@every_backend
@two_variants
def test_compiles_into_one_graph_forward_and_backward(backend, pairing):
    torch._dynamo.reset()
    model = Attention(backend, pairing)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (9, 17):  # the second length recompiles with a dynamic one
        q, k, v = inputs(length)
        mask = torch.rand(1, 1, length, length, generator=torch.Generator().manual_seed(1)) < 0.8
        results = []
        for call in (model, compiled):
            out = call(q, k, v, mask)
            leaves = (q, k, v, model.gamma, model.radius)
            results.append((out, torch.autograd.grad(out.square().sum(), leaves)))
        (eager, expected), (out, grads) = results
        assert_close(out, eager, 1e-5, "compiled output")
        assert_gradients(grads, expected, 1e-4, NAMES)


@every_backend
@pytest.mark.parametrize(
    "attention", [cone_attention, partial(sparse_attention, rules=Window(8, 2))]
)
def test_compiles_with_rounded_values_as_autocast_has_them(backend, attention):
    torch._dynamo.reset()
    q, k, v = qkv(batch=1, heads=2, lq=9, dtype=torch.float32)
    run = lambda q, k, v: attention(q, k, v.bfloat16(), is_causal=True, backend=backend)
    eager, out = run(q, k, v), torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert_close(out, eager, 1e-5, "compiled output")


def test_a_compiled_call_goes_by_the_rules_that_it_is_given():
    torch._dynamo.reset()
    q, k, v = qkv(batch=1, heads=2, lq=9, dtype=torch.float32)
    small = Pages(near=2, sinks=1, page=2, top=1)
    compiled = torch.compile(sparse_attention, fullgraph=True, backend="aot_eager")
    for rules in (Window(2, 1), Window(3, 1), small, (small, Exact())):
        out, eager = (
            call(q, k, v, is_causal=True, rules=rules) for call in (compiled, sparse_attention)
        )
        assert_close(out, eager, 1e-5, f"compiled output, {rules}")


@every_backend
def test_compiles_with_dropout(backend):
    torch._dynamo.reset()

    def run(q, k, v):
        return cone_attention(q, k, v, dropout_p=0.5, backend=backend)

    q, k, v = qkv(batch=1, heads=2, lq=9, dtype=torch.float32)
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(
        *(t.requires_grad_() for t in (q, k, v))
    )
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    assert not torch.allclose(out, cone_attention(q, k, v, backend=backend), atol=1e-3), (
        "dropout was lost"
    )


@with_auto
def test_compiles_in_inference_mode(backend):
    torch._dynamo.reset()
    model = Attention(backend, "umbral-xi")
    q, k, v = (t.detach() for t in inputs(11))
    with torch.inference_mode():
        got = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)(q, k, v)
        assert_close(got, model(q, k, v), 1e-6, "compiled output")


@with_auto
@two_variants
def test_exports_with_a_dynamic_length(backend, pairing):
    model = Attention(backend, pairing).eval()
    length = Dim("length", min=2, max=4096)
    shapes = {name: {2: length} for name in "qkv"}
    with torch.no_grad():
        program = torch.export.export(model, tuple(inputs(12)), dynamic_shapes=shapes)
        for other in (12, 2, 300):
            q, k, v = inputs(other)
            assert_close(
                program.module()(q, k, v), model(q, k, v), 1e-5, f"exported output, length {other}"
            )


@every_backend
def test_exports_with_a_mask(backend):
    model = Attention(backend, "umbral-xi").eval()
    length = Dim("length", min=2, max=4096)
    shapes = {**{name: {2: length} for name in "qkv"}, "mask": {2: length, 3: length}}

    def masked(n):
        return (
            *inputs(n),
            torch.rand(1, 1, n, n, generator=torch.Generator().manual_seed(n)) < 0.7,
        )

    with torch.no_grad():
        program = torch.export.export(model, masked(12), dynamic_shapes=shapes)
        for other in (12, 33):
            assert_close(
                program.module()(*masked(other)), model(*masked(other)), 1e-5, f"length {other}"
            )


@pytest.mark.parametrize(
    "function", [cone_attention, partial(hype_attention, mu=0.01, tau=1.0)], ids=["cone", "hype"]
)
def test_transforms_inside_a_compiled_function(function):
    """The compiler would put the kernel into its graph, whose derivative by forward mode is nothing."""
    torch._dynamo.reset()
    at, step = (tuple(t.detach() for t in inputs(80)) for _ in range(2))
    call = partial(function, enable_gqa=True)
    derivatives = (
        lambda a, s: jvp(call, a, s)[1],
        lambda a, s: grad(lambda q: call(q, *a[1:]).square().sum())(a[0]),
    )
    for derivative in derivatives:
        # torch 2.13's Inductor gets plain torch wrong here: what the compiler puts into its graph is what is asked
        compiled = torch.compile(derivative, backend="aot_eager")
        assert_close(compiled(at, step), derivative(at, step), 1e-4, "derivative")
