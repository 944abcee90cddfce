"""What the CPU engine promises beyond the contract of all engines (test_engines.py, test_sweep.py)."""

import logging

import pytest
import torch
from torch import nn

import hf_hyperattn as ha
from hf_hyperattn.engines import Options, attention, cpu, dispatch, dot_score, native
from hf_hyperattn.engines.cpu import kernels, library, norms, squared_norms
from hf_hyperattn.engines.cpu.kernels import count_chunks, forward
from hf_hyperattn.engines.score import TERMS, ScoreTerm, Term
from hf_hyperattn.mechanisms.hyperbolic.midpoint import make_aggregation
from hf_hyperattn.mechanisms.hyperbolic.score import HyperbolicSpace
from tests.engines.test_native import needs_compiler
from tests.oracles.cases import assert_close, assert_gradients, qkv

F = ha.functional
CALLS = {
    "umbral": lambda q, k, v, **more: F.cone_attention(q, k, v, enable_gqa=True, **more),
    "psi": lambda q, k, v, **more: F.cone_attention(
        q, k, v, enable_gqa=True, mapping="psi", **more
    ),
    "penumbral": lambda q, k, v, **more: F.cone_attention(
        q, k, v, enable_gqa=True, variant="penumbral", **more
    ),
    "clamped": lambda q, k, v, **more: F.cone_attention(
        q,
        k,
        v,
        enable_gqa=True,
        variant="penumbral",
        mapping="xi",
        clamp_heights=True,
        squared=False,
        **more,
    ),
    "geodesic": lambda q, k, v, **more: F.hyperbolic_attention(
        q, k, v, enable_gqa=True, aggregation="mean", **more
    ),
    "lorentz": lambda q, k, v, **more: F.hyperbolic_attention(
        q, k, v, enable_gqa=True, aggregation="mean", distance="squared_lorentz", **more
    ),
    "midpoint": lambda q, k, v, **more: F.hyperbolic_attention(q, k, v, enable_gqa=True, **more),
    "midpoint per head": lambda q, k, v, **more: F.hyperbolic_attention(
        q,
        k,
        v,
        enable_gqa=True,
        distance="squared_lorentz",
        curvature=torch.linspace(0.5, 2, q.shape[1]),
        **more,
    ),
    "hype": lambda q, k, v, **more: F.hype_attention(
        q, k, v, enable_gqa=True, mu=0.01, tau=1.5, form="cosh", **more
    ),
}
every_call = pytest.mark.parametrize("name", CALLS)


def run(q, k, v, backend="cpu", **options):
    return attention(dot_score(q, k), v, Options(**options), backend=backend)[0]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def watched(monkeypatch):
    """Names of the ways that calls took."""
    taken = []

    def watch(name, run):
        def watched_run(*arguments):
            taken.append(name)
            return run(*arguments)

        return watched_run

    dispatch.RESOLVED.clear()
    monkeypatch.setattr(kernels, "decode", watch("decode", kernels.decode))
    monkeypatch.setattr(kernels, "forward", watch("operator", kernels.forward))
    yield taken
    dispatch.RESOLVED.clear()


@needs_compiler
@every_call
@pytest.mark.parametrize(
    "d, dv", [(64, 64), (7, 33), (256, 16), pytest.param(48, 96, marks=pytest.mark.slow)]
)
def test_few_queries_against_many_keys(name, d, dv, watched):
    """Generation: statistics are read from keys; keys that coincide with the query included."""
    q, k, v = qkv(batch=2, heads=6, kv_heads=2, lq=2, lk=700, d=d, dv=dv, dtype=torch.float32)
    k[:, :, 5] = q[:, ::3, 1]
    mask = torch.rand(2, 1, 1, 700, generator=torch.Generator().manual_seed(0)) > 0.3
    expected = CALLS[name](*(t.double() for t in (q, k, v)), attn_mask=mask, backend="reference")
    assert_close(CALLS[name](q, k, v, attn_mask=mask, backend="cpu"), expected, 2e-5, name)
    assert watched == ["decode"]
    half = [t.bfloat16() for t in (q, k, v)]
    expected = CALLS[name](*(t.double() for t in half), attn_mask=mask, backend="reference")
    assert_close(CALLS[name](*half, attn_mask=mask, backend="cpu"), expected, 1e-2, name)


CONES = {
    "umbral": {},
    "psi": {"mapping": "psi"},
    "penumbral": {"variant": "penumbral"},
    "heights": {"variant": "penumbral", "squared": False},
    "clamped": {"variant": "penumbral", "mapping": "xi", "clamp_heights": True},
    "expmap": {"mapping": "expmap"},
}


@needs_compiler
@pytest.mark.parametrize("more", CONES.values(), ids=CONES)
@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_decoding_with_the_same_numbers_for_all_heads(more, backend, watched):
    q, k, v = qkv(batch=2, heads=6, kv_heads=2, lq=2, lk=700, d=20, dv=24, dtype=torch.float32)
    k[:, :, 5] = q[:, ::3, 1]
    more = {"enable_gqa": True, "gamma": 0.7, "radius": 1.3, **more}
    expected = F.cone_attention(*(t.double() for t in (q, k, v)), backend="reference", **more)
    assert_close(F.cone_attention(q, k, v, backend=backend, **more), expected, 2e-5, "output")
    assert watched == ["decode"]
    half = [t.bfloat16() for t in (q, k, v)]
    expected = F.cone_attention(*(t.double() for t in half), backend="reference", **more)
    assert_close(
        F.cone_attention(*half, backend=backend, **more), expected, 1e-2, "in half precision"
    )
    F.cone_attention(q, k, v.transpose(2, 3).contiguous().transpose(2, 3), backend=backend, **more)
    F.cone_attention(q, k, v.requires_grad_(), backend=backend, **more)  # learns
    assert watched == ["decode"] * 3 + ["operator"]


@needs_compiler
@pytest.mark.parametrize("far", [0.02, 1.0, 60.0])  # the last are as far out as points can be
@pytest.mark.parametrize(
    "gate", [None, torch.tensor([0.0, 0.3, 1.0, -0.5])], ids=["whole", "gated"]
)
def test_decoding_midpoints(gate, far, watched, threads):
    """In the kernel as by columns in float64: sinks, rows that see nothing, values that are all the same."""
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=2, lk=700, d=24, dv=20, dtype=torch.float32)
    v = v * far
    v[:, 1] = v[:, 1, :1]
    mask = torch.rand(2, 1, 2, 700, generator=torch.Generator().manual_seed(0)) > 0.3
    mask[1, :, 0] = False
    sinks, curvature = torch.linspace(-1, 1, 4), torch.linspace(0.5, 2, 4)
    for more, number in (({}, curvature), ({"sinks": sinks}, 1.0)):
        outputs = []
        for dtype, backend in (
            (torch.float64, "reference"),
            (torch.float32, "cpu"),
            (torch.float32, "auto"),
        ):
            c = number.to(dtype) if isinstance(number, torch.Tensor) else number
            average = make_aggregation(c, 0.5, gate if gate is None else gate.to(dtype))
            options = Options(
                mask, aggregation=average, **{name: x.to(dtype) for name, x in more.items()}
            )
            score = HyperbolicSpace("geodesic", 0.5, c, 1.0).score(q.to(dtype), k.to(dtype))
            outputs.append(attention(score, v.to(dtype), options, backend=backend)[0])
        allowed = 6e-5 * max(1.0, outputs[0].abs().max().item())
        assert_close(outputs[1], outputs[0], allowed, "output")
        assert torch.equal(outputs[1], outputs[2])
        assert more or not outputs[1][1, :, 0].any()
    threads(1)
    dispatch.RESOLVED.clear()
    assert_close(
        attention(score, v, options, backend="cpu")[0], outputs[0], allowed, "on one thread"
    )
    assert watched == ["decode"] * 5


@needs_compiler
def test_averages_of_calls_that_learn_come_from_columns(watched):
    q, k, v = qkv(batch=1, heads=4, kv_heads=2, lq=1, lk=300, d=16, dtype=torch.float32)
    curvature = torch.full((4,), 0.7, requires_grad=True)
    F.hyperbolic_attention(
        q, k, v, enable_gqa=True, curvature=curvature, backend="cpu"
    ).sum().backward()
    exact = torch.full((4,), 0.7, dtype=torch.float64, requires_grad=True)
    wide = (t.double() for t in (q, k, v))
    F.hyperbolic_attention(
        *wide, enable_gqa=True, curvature=exact, backend="reference"
    ).sum().backward()
    assert watched == ["operator"]
    assert_close(curvature.grad, exact.grad, 1e-4, "gradient")


@needs_compiler
def test_a_plain_dot_product_leaves_sdpa_only_where_rounding_may_differ(watched):
    q, k, v = qkv(batch=1, heads=2, lq=400, lk=400, d=16, dtype=torch.float32)
    few = q[:, :, :1]
    for options, taken in ((Options(), []), (Options(any_rounding=True), ["operator", "decode"])):
        for query in (q, few):
            out = attention(dot_score(query, k), v, options)[0]
            assert_close(
                out, run(*(t.double() for t in (query, k, v)), "reference"), 1e-5, "output"
            )
        attention(dot_score(q[:, :, :8], k[:, :, :8]), v[:, :, :8], options)  # too small to pay
        assert watched == taken


@needs_compiler
def test_decoding_leaves_calls_that_learn_to_the_other_way(watched):
    q, k, v = qkv(heads=2, lq=1, lk=300, d=16, dtype=torch.float32)
    F.cone_attention(q.requires_grad_(), k, v, backend="cpu")
    gamma = torch.ones(2, requires_grad=True)
    F.cone_attention(q.detach(), k, v, gamma=gamma, backend="cpu").sum().backward()
    F.cone_attention(q.detach(), k, v, dropout_p=0.5, backend="cpu")
    assert watched == ["operator"] * 3 and gamma.grad.abs().sum() > 0


@needs_compiler
def test_decoding_with_window_sinks_and_softcap(watched):
    q, k, v = qkv(batch=1, heads=4, kv_heads=2, lq=3, lk=900, d=16, dtype=torch.float32)
    more = {"is_causal": True, "window": 300, "offset": 800, "softcap": 2.0}
    sinks = torch.linspace(-1, 1, 4)
    expected = run(*(t.double() for t in (q, k, v)), "reference", sinks=sinks.double(), **more)
    assert_close(run(q, k, v, sinks=sinks, **more), expected, 1e-5, "output")
    assert watched == ["decode"]


@needs_compiler
@every_call
def test_threads_do_not_change_the_outcome(name, threads):
    """Few heads for two threads: the backward pass is cut into chunks of keys."""
    q, k, v = qkv(batch=1, heads=3, kv_heads=1, lq=300, lk=700, d=20, dtype=torch.float32)
    found = {}
    for count in (1, 2, 2):
        threads(count)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = CALLS[name](*leaves, backend="cpu")
        found.setdefault(count, []).append(
            [out.detach(), *torch.autograd.grad(out.cos().sum(), leaves)]
        )
    for one, two, again in zip(*found[1], *found[2], strict=True):
        assert torch.equal(two, again)
        assert_close(two, one, 1e-5 * max(1.0, float(one.abs().max())), name)


def test_chunks_of_a_backward_pass(threads):
    threads(1)
    assert count_chunks(1, 100) == 1
    threads(2)
    assert count_chunks(8, 100) == 1 and count_chunks(3, 100) == 3 and count_chunks(1, 2) == 2


@needs_compiler
def test_dropout_is_the_same_forward_and_backward(threads):
    """The output is linear in the values: their gradient, and so its product with them, is what was dropped forward."""
    q, k, v = qkv(batch=1, heads=2, lq=200, lk=520, d=16, dtype=torch.float32)
    found = []
    for count in (1, 2):
        threads(count)
        torch.manual_seed(3)
        value = v.clone().requires_grad_()
        out = run(q, k, value, dropout_p=0.4)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (grad,) = torch.autograd.grad((out * weight).sum(), value)
        assert_close((grad * v).sum(), (out * weight).sum().detach(), 1e-3, "sum")
        found.append(out.detach())
    assert_close(found[0], found[1], 1e-6, "output")
    kept = run(q, k, torch.ones_like(v), dropout_p=0.4).mean()
    assert abs(kept - 1) < 0.05
    assert not torch.equal(run(q, k, v, dropout_p=0.4), run(q, k, v, dropout_p=0.4))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype):
    x = (torch.randn(2, 3, 5000, 7, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    x[0, 0, 0] = 0
    leaf = x.clone().requires_grad_()
    exact = x.double().requires_grad_()
    for found, expected in (
        (squared_norms([leaf], torch.float32, 6)[0], exact[..., :6].square().sum(-1)),
        (norms(leaf, torch.float32), torch.linalg.vector_norm(exact, dim=-1)),
    ):
        assert_close(found, expected, 1e-4, "norms")
        got, want = (
            torch.autograd.grad(t.sum(), x)[0] for t, x in ((found, leaf), (expected, exact))
        )
        assert_close(got, want, 1e-5 if dtype == torch.float32 else 0.1, "gradient")
    assert norms(torch.full((1, 1, 5000, 4), 1e25), torch.float32).isfinite().all()


@needs_compiler
@pytest.mark.parametrize("spec", ["dot", "dot+*umbral_on_product"])
def test_operator_passes_opcheck(spec):
    q, k, v = (
        t.requires_grad_() for t in qkv(batch=1, heads=2, lq=9, lk=12, d=8, dtype=torch.float32)
    )
    rows = [torch.rand(1, 2, 9, requires_grad=True) for _ in range(TERMS["umbral_on_product"].rows)]
    columns = [torch.rand(1, 2, 12, requires_grad=True) for _ in rows]
    numbers = [] if spec == "dot" else [*rows, *columns, *torch.ones(2, 2, requires_grad=True)]
    extras = [torch.rand(2, requires_grad=True), torch.ones(9, 12, dtype=torch.bool)[None, None]]
    call = ([q, k, v, *numbers, *extras], spec, "sinks mask", 8, 0.5, True, None, 0, None, 0.0)
    torch.library.opcheck(forward, call)


@needs_compiler
@every_call
def test_compiled_whole_and_exported(name):
    """One node, and nothing of the features that it does not read."""
    q, k, v = qkv(batch=1, heads=2, lq=40, lk=40, d=16, dtype=torch.float32)

    class Layer(nn.Module):
        def forward(self, q, k, v):
            return CALLS[name](q, k, v)

    seen = []

    def backend(graph, _):
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(Layer(), fullgraph=True, backend=backend)(q, k, v)
    assert_close(compiled, CALLS[name](q, k, v, backend="cpu"), 1e-6, name)
    assert sum("hf_hyperattn.cpu" in t and "norms" not in t for t in seen) == 1


class Plain(Term):
    """A term of somebody's that has no functor, and that none can be written for."""

    name = "plain_for_test_cpu"

    def logits(self, dot, row, column, head, squared_distance=None):
        return torch.erf(dot) * 0 + 1.0


def test_a_term_without_functor_goes_to_the_blocks_with_one_line(monkeypatch, caplog):
    monkeypatch.setitem(TERMS, Plain.name, Plain())
    cpu.log_once.cache_clear()
    dispatch.RESOLVED.clear()
    q, k, v = qkv(batch=1, heads=1, lq=20, d=4, dtype=torch.float32)
    score = dot_score(q, k).plus(ScoreTerm(TERMS[Plain.name], lambda: torch.ones(1, 1, 20, 20)))
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        for _ in range(2):
            out, _ = attention(score, v, backend="cpu")
    assert_close(out, run(q, k, v, "reference"), 1e-5, "output")
    assert [Plain.name in r.getMessage() for r in caplog.records] == [True]


@pytest.mark.parametrize("off", ["turned off", "no compiler"])
def test_blocks_where_nothing_is_compiled(monkeypatch, tmp_path, caplog, off):
    monkeypatch.setenv("HF_HYPERATTN_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(library, "TABLES", {})
    monkeypatch.setattr(library, "CORES", {})
    monkeypatch.setattr(dispatch, "RESOLVED", {})
    monkeypatch.setenv(
        *(("HF_HYPERATTN_NATIVE", "0") if off == "turned off" else ("CXX", "/no/compiler"))
    )
    native.load_library.cache_clear()
    cpu.log_once.cache_clear()
    dispatch.RESOLVED.clear()
    q, k, v = qkv(batch=1, heads=2, lq=200, d=8, dtype=torch.float32)
    try:
        with caplog.at_level(logging.WARNING, "hf_hyperattn"):
            outs = [F.cone_attention(q, k, v, backend=b) for b in ("cpu", "auto")]
    finally:
        native.load_library.cache_clear()
    for out in outs:
        assert_close(out, F.cone_attention(q, k, v, backend="blockwise"), 1e-6, "output")
    assert ["is not compiled" in r.getMessage() for r in caplog.records] == [True]


@needs_compiler
def test_gradients_of_masks_come_from_the_blocks():
    q, k, v = qkv(batch=1, heads=2, lq=20, d=8, dtype=torch.float32)
    bias = torch.randn(1, 2, 20, 20, requires_grad=True)
    found, expected = (
        torch.autograd.grad(run(q, k, v, b, bias=bias).cos().sum(), bias)
        for b in ("cpu", "reference")
    )
    assert_gradients(found, expected, 1e-4, ["bias"])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["umbral", "geodesic"])
def test_narrow_vectors_of_any_cpu(name, monkeypatch, tmp_path):
    """Vectors of four without instructions of any one CPU, as on ARM: built anew, forward and backward."""
    flags = native.compiler_flags()
    # GCC marks tables as unique in a process, so that the ones of a score that was loaded before would be taken again
    apart = [] if "clang" in native.find_compiler()[0] else ["-fno-gnu-unique"]
    monkeypatch.setattr(native, "compiler_flags", lambda: [*flags, "-DHYPER_PLAIN", *apart])
    monkeypatch.setenv("HF_HYPERATTN_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(library, "TABLES", {})
    monkeypatch.setattr(library, "CORES", {})
    monkeypatch.setattr(dispatch, "RESOLVED", {})
    native.load_library.cache_clear()
    try:
        q, k, v = qkv(batch=1, heads=4, kv_heads=2, lq=70, lk=300, d=21, dtype=torch.float32)
        found = {}
        for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
            leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
            out = CALLS[name](*leaves, is_causal=True, backend=backend)
            found[backend] = out, torch.autograd.grad(out.cos().sum(), leaves)
        few = [CALLS[name](q[:, :, :1], k, v, backend=b) for b in ("cpu", "reference")]
    finally:
        native.load_library.cache_clear()
    assert_close(found["cpu"][0], found["reference"][0], 2e-5, "output")
    assert_gradients(found["cpu"][1], found["reference"][1], 1e-4, "qkv")
    assert_close(*few, 2e-5, "one query")
