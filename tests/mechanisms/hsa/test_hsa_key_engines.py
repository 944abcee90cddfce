"""Key-tied attention: the ways of computing it agree, in full, in chunks and step by step, and so do gradients."""

import platform
import random
from types import SimpleNamespace

import pytest
import torch

from hf_hyperattn.analysis import PeakMemory
from hf_hyperattn.engines import native as build
from hf_hyperattn.engines.cpu import library
from hf_hyperattn.functional import hierarchical_attention
from hf_hyperattn.hierarchy import Hierarchy
from hf_hyperattn.mechanisms.hsa.tree import key as tree_key
from hf_hyperattn.mechanisms.hsa.windowed import key as windowed_key
from hf_hyperattn.mechanisms.hsa.windowed.native import Levels, pool_levels
from tests.mechanisms.hsa.hsa_calls import attend_named, key_tied
from tests.mechanisms.hsa.test_hsa_key import brute
from tests.oracles.cases import assert_close, tensor

compiled = pytest.param(
    "native", marks=pytest.mark.skipif(library.core() is None, reason="no compiler, or turned off")
)
every_way = pytest.mark.parametrize("backend", ["torch", compiled])
BIAS = torch.tensor([0.0, 1.0, -2.0, float("-inf")])


def test_rows_of_nothing_but_padding_and_masks_of_half_precision():
    """Whatever the dtype of a mask, its mean over a block is taken in that of the logits."""
    q, k, v = (tensor(2, 2, n, 4, seed=i, dtype=torch.float32) for i, n in enumerate((1, 5, 5)))
    hidden = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    settings = dict(hierarchy=(2,), tying="key", is_causal=True)
    for mask in (hidden, hidden.expand(2, 2, 1, 5).clone()):
        assert not hierarchical_attention(q, k, v, mask, backend="torch", **settings).any()
    q, k, v = (tensor(1, 2, 64, 16, seed=i, dtype=torch.float32) for i in range(3))
    for dtype in (torch.bfloat16, torch.float16):
        mask = tensor(64, 64, seed=3, dtype=torch.float32).to(dtype)
        got, want = (
            hierarchical_attention(q, k, v, m, **settings | {"hierarchy": (16, 64)})
            for m in (mask, mask.float())
        )
        assert_close(got, want, 1e-5, "output")


def test_a_query_that_sees_dropped_blocks_alone_has_no_gradient():
    q, k, v = (tensor(1, 1, 9, 4, seed=i).requires_grad_() for i in range(3))
    mask = torch.ones(9, 9, dtype=torch.bool)
    mask[4, 3:] = False  # of its own window nothing
    for bias in (float("-inf"), torch.tensor([float("-inf")], requires_grad=True)):
        out = hierarchical_attention(
            q, k, v, mask, hierarchy=(3,), tying="key", is_causal=True, block_bias=bias
        )
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert not out[0, 0, 4].any() and all(g.isfinite().all() for g in gradients)


def tied(q, k, v, sizes, *, starts=None, stops=None, **rule):
    """`key_tied` of windows with padding."""
    return key_tied(q, k, v, Hierarchy(k.shape[2], sizes=sizes, starts=starts, stops=stops), **rule)


def some_call(seed):
    """Random shapes, strides, padding and rules, one per head; float32."""
    rng = random.Random(seed)
    n, kv_heads = rng.choice([1, 2, 15, 16, 17, 33, 100, 130, 257, 300]), rng.choice([1, 2, 4])
    d = rng.choice([5, 16, 64, 80])
    dv, queries = rng.choice([d, 16, 33, 64]), rng.choice([n, n, 1, max(1, n // 3)])
    q = tensor(2, 4, queries, d, seed=seed, scale=2, dtype=torch.float32)
    k = tensor(2, n, kv_heads, d, seed=seed + 1, scale=2, dtype=torch.float32).transpose(1, 2)
    v = tensor(2, kv_heads, n, dv, seed=seed + 2, dtype=torch.float32)
    start = min(3, n - 1)
    rule = {
        "starts": torch.tensor([0, start]),
        "is_causal": rng.random() < 0.7,
        "offset": n - queries,
        "near": [rng.choice([0, 1, 5, 20, 64, 1000]) for _ in range(4)],
        "sinks": [rng.choice([0, 1, 4, 20]) for _ in range(4)],
        "refine_top_k": [rng.choice([0, 1, 2, 5, 16]) for _ in range(4)],
        "block_bias": BIAS,
    }
    if not rule["is_causal"]:
        rule["stops"] = torch.tensor([n, max(n - 2, start + 1)])
        rule["refine_top_k"] = 0 if rng.random() < 0.7 else rule["refine_top_k"]
    if rng.random() < 0.3:
        rule["sink_logit"] = tensor(4, seed=seed + 3, dtype=torch.float32)
    if seed % 6 == 0:
        k = torch.zeros_like(k)
    sizes = [(16,), (16, 64), (16, 64, 256), (8, 32), (4, 8, 16), (32, 64), (20, 40), ()]
    return q, k, v, rng.choice(sizes), rule


def settled(q, k, v, sizes, rule, exact):
    """Bool [B, H, N]: rows that rounding of the keys does not throw over to another choice of blocks; nearly all."""
    close = torch.ones(exact.shape[:3], dtype=torch.bool)
    for seed in range(4):
        moved = k * (1 + 3e-7 * tensor(*k.shape, seed=seed))
        close &= (tied(q, moved, v, sizes, **rule)[0] - exact).abs().amax(-1) < 1e-5
    assert close.float().mean() > 0.99 or not k.any()
    return close


@every_way
@pytest.mark.parametrize("seed", range(40))
def test_float32_near_float64(backend, seed):
    q, k, v, sizes, rule = some_call(seed)
    double = [t.double() for t in (q, k, v)]
    exact, _ = tied(*double, sizes, **rule)
    try:
        out, _ = tied(q, k, v, sizes, **rule, backend=backend)
    except ValueError as error:
        assert "single child" in str(error)
        out, _ = tied(q, k, v, sizes, **rule)
    assert out.dtype == torch.float32
    if (out - exact).abs().max() > 5e-6:
        same = settled(*double, sizes, rule, exact)[..., None]
        out, exact = torch.where(same, out, 0), torch.where(same, exact, 0)
    assert_close(out, exact, 5e-6, f"{sizes}, {rule}")


@every_way
@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("sizes", [(4, 8, 16), (4,), ()])
def test_chunks_and_single_steps_equal_the_full_pass(backend, top_k, sizes):
    """Left padding in one row; steps read means that are kept as a cache would keep them."""
    dtype = torch.float64 if backend == "torch" else torch.float32
    q, k, v = (tensor(2, h, 71, 16, seed=i, scale=2, dtype=dtype) for i, h in enumerate((4, 2, 2)))
    rule = {"near": [3, 0, 9, 500], "sinks": [2, 0, 5, 0], "refine_top_k": top_k, "is_causal": True}
    rule |= {"block_bias": BIAS, "backend": backend}
    where = {"starts": torch.tensor([0, 6])}
    full, _ = tied(q, k, v, sizes, **where, **rule)
    parts = []
    for a, b in ((0, 3), (3, 29), (29, 60)):
        parts.append(
            tied(q[:, :, a:b], k[:, :, :b], v[:, :, :b], sizes, offset=a, **where, **rule)[0]
        )
    for a in range(60, 71):
        fresh = pool_levels(k[:, :, : a + 1], v[:, :, : a + 1], sizes, **where)
        whole = [(a + 1) // w for w in sizes]  # incomplete blocks are not needed
        kept = [
            (t[0], *(m[:, :, :n] for m, n in zip(t[1:], whole))) for t in (fresh.keys, fresh.values)
        ]
        levels = Levels(sizes, *kept, **where)
        parts.append(attend_named(q[:, :, a : a + 1], levels, **rule, offset=a, scale=16**-0.5)[0])
    assert_close(torch.cat(parts, 2), full, 1e-12 if dtype == torch.float64 else 2e-6, "in parts")


@every_way
def test_ties_go_to_the_first_block(backend):
    """All scores equal: of five closed blocks, refinement opens the first two, whatever their values."""
    k = torch.zeros(1, 1, 24, 16)
    q, v = torch.ones(1, 1, 24, 16), torch.eye(24)[None, None]
    out, _ = key_tied(
        q, k, v, (4,), refine_top_k=2, block_bias=-1.0, is_causal=True, backend=backend
    )
    last = out[0, 0, -1]
    assert_close(last[:8], last[20].expand(8), 1e-7, "tokens")
    assert_close(last[8:20] / last[0], torch.full((12,), 1 / torch.e), 1e-6, "blocks")


#: Keys [M] of one channel, whose means over windows of powers of 2 are exact: what is equal is so in every dtype.
EQUAL_SCORES = {
    "copies": lambda n: torch.randint(-2, 3, (5,))[torch.randint(5, (n,))],
    "runs of copies": lambda n: torch.randint(-2, 3, (n,)).repeat_interleave(8)[:n],
    "all alike": lambda n: torch.ones(n),
    "zeros of both signs": lambda n: torch.where(torch.rand(n) < 0.5, 0.0, -0.0),
    "best at the end": lambda n: torch.arange(n) // 8,
    "alike but for one": lambda n: torch.arange(n) == n // 3,
}


@every_way
@pytest.mark.parametrize("kind", EQUAL_SCORES)
@pytest.mark.parametrize("sizes", [(2,), (2, 4, 8), (4, 32)])
def test_of_equal_scores_the_first_blocks_are_opened(backend, sizes, kind):
    """With more blocks than the kernel compares with each other, in segments between which others were laid open."""
    torch.manual_seed(len(kind))
    length = 100 if len(sizes) == 1 else 72
    key = EQUAL_SCORES[kind](length).float().view(1, 1, length, 1)
    query, value = torch.ones(1, 1, length, 1), torch.randn(1, 1, length, 4)
    query[..., ::2, :] = -1
    starts, stops = torch.tensor([3]), torch.tensor([length])
    for near, sinks, top_k in ((0, 0, 1), (6, 5, 2), (0, 3, 7), (0, 0, 33), (5, 0, 60)):
        rule = {"near": near, "sinks": sinks, "refine_top_k": top_k}
        rows = [t[0].double() for t in (query, key, value)]
        expected = brute(
            *rows, sizes, 3, length, True, near, sinks, top_k, bias=torch.tensor([-1.0])
        )
        rule |= {
            "starts": starts,
            "stops": stops,
            "block_bias": -1.0,
            "is_causal": True,
            "backend": backend,
        }
        out, _ = tied(query, key, value, sizes, **rule)
        assert_close(out[0], expected, 1e-5, f"{near}, {sinks}, {top_k}")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("top_k", [0, 2])
def test_blocks_of_rows_change_nothing(monkeypatch, causal, top_k):
    """Neither the output nor gradients."""
    leaves = [tensor(2, h, 47, e, seed=i) for i, (h, e) in enumerate(((4, 5), (2, 5), (2, 3)))]
    leaves += [tensor(4, seed=4), tensor(4, seed=5)]
    q, k, v, bias, sink = (t.requires_grad_() for t in leaves)
    rule = {
        "near": [3, 5, 3, 100],
        "sinks": [1, 0, 1, 2],
        "refine_top_k": [top_k, top_k, 0, top_k // 2],
    }
    rule |= {"starts": torch.tensor([0, 1]), "is_causal": causal}
    grad = tensor(2, 4, 47, 3, seed=7)
    found = []
    for elements in (500, 2**20):
        monkeypatch.setattr(tree_key, "BLOCK_ELEMENTS", elements)
        out, _ = tied(q, k, v, (4, 8, 16), block_bias=bias, sink_logit=sink, **rule)
        found.append((out, *torch.autograd.grad(out, leaves, grad)))
    names = ("output", "query", "key", "value", "block bias", "sink")
    for name, a, b in zip(names, *found, strict=True):
        assert_close(a, b, 1e-11, name)


@every_way
@pytest.mark.parametrize("seed", range(12))
def test_gradients_in_float32_near_float64(backend, seed):
    q, k, v, sizes, rule = some_call(seed)
    rule |= {"sink_logit": tensor(4, seed=1), "refine_top_k": 0}
    if rule["is_causal"]:
        rule["refine_top_k"] = [0, 1, 3, 16]
    names = {"block_bias": torch.tensor([0.0, 1.0, -2.0, 0.5]), "sink_logit": rule["sink_logit"]}
    grad, found = tensor(*q.shape[:3], v.shape[-1], seed=3), []
    for dtype, way in ((torch.float64, "torch"), (torch.float32, backend)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v, *names.values())]
        given = rule | dict(zip(names, leaves[3:], strict=True))
        out, _ = tied(*leaves[:3], sizes, **given, backend=way)
        found.append(torch.autograd.grad(out, leaves, grad.to(dtype)))
    for name, exact, own in zip(("query", "key", "value", *names), *found, strict=True):
        assert_close(own, exact, 1e-5 * (1 + float(exact.abs().max())), f"{name}: {sizes}, {rule}")


def test_gradcheck():
    leaves = [
        tensor(*shape, seed=i).requires_grad_()
        for i, shape in enumerate([(1, 2, 13, 3)] * 3 + [(2,), (2,)])
    ]
    rule = {"near": 2, "sinks": 1, "refine_top_k": 1, "is_causal": True}
    call = lambda q, k, v, bias, sink: key_tied(
        q, k, v, (2, 4), block_bias=bias, sink_logit=sink, **rule
    )[0]
    assert torch.autograd.gradcheck(call, leaves)


@every_way
def test_half_precision_is_computed_in_float32(backend):
    q, k, v, *_ = some_call(8)
    low = [t.bfloat16() for t in (q, k, v)]
    rule = {"near": 5, "refine_top_k": 2, "is_causal": True, "backend": backend}
    out, _ = key_tied(*low, (8, 32), **rule, offset=k.shape[2] - q.shape[2])
    same, _ = key_tied(*(t.float() for t in low), (8, 32), **rule, offset=k.shape[2] - q.shape[2])
    assert out.dtype == torch.float32 and torch.equal(out, same)


HALVES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"]
)


@pytest.mark.skipif(library.core() is None, reason="no compiler, or turned off")
@HALVES
@pytest.mark.parametrize("both", [False, True], ids=["values", "keys and values"])
@pytest.mark.parametrize("seed", range(8))
def test_tokens_in_half_precision_are_read_as_the_same_numbers(seed, both, dtype):
    """With means in float32, as a cache has them: to the bit what float32 tokens of the same numbers give."""
    q, k, v, sizes, rule = some_call(seed)
    low = k.to(dtype) if both else k, v.to(dtype)
    where = {"starts": rule.pop("starts"), "stops": rule.pop("stops", None)}
    if not rule["is_causal"]:
        rule["refine_top_k"] = 0
    wide = pool_levels(*low, sizes, **where)
    kept = Levels(sizes, (low[0], *wide.keys[1:]), (low[1], *wide.values[1:]), **where)
    found = [
        attend_named(q, levels, **rule, backend="native")[0].nan_to_num(7.0)
        for levels in (wide, kept)
    ]
    assert torch.equal(*found), (sizes, rule)


@pytest.mark.skipif(library.core() is None, reason="no compiler, or turned off")
@HALVES
def test_every_number_in_half_precision_is_widened_exactly(dtype):
    """A single token is the output: also numbers below the smallest normal one, infinity, and NaN."""
    value = torch.arange(2**16).to(torch.uint16).view(dtype).view(-1, 1, 1, 16)
    query = key = torch.zeros(len(value), 1, 1, 16)
    out, _ = attend_named(query, Levels((), (key,), (value,)), is_causal=True, backend="native")
    torch.testing.assert_close(out, value.float(), rtol=0, atol=0, equal_nan=True)


@every_way
def test_one_operator_for_the_compiler(backend):
    q, k, v = (tensor(1, 2, 40, 16, seed=i, dtype=torch.float32) for i in range(3))
    rule = {"near": 5, "sinks": 1, "refine_top_k": 1, "is_causal": True, "backend": backend}
    call = lambda *t: key_tied(*t, (8, 16), **rule)[0]
    run = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_close(run(q, k, v), call(q, k, v), 1e-6, "compiled")


@pytest.mark.skipif(library.core() is None, reason="no compiler, or turned off")
def test_threads_and_runs_agree_to_the_bit():
    q, k, v, _, _ = some_call(4)
    rule = {
        "near": 5,
        "sinks": 1,
        "refine_top_k": 3,
        "is_causal": True,
        "offset": k.shape[2] - q.shape[2],
    }
    first, _ = key_tied(q, k, v, (16, 64), **rule)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        second, _ = key_tied(q, k, v, (16, 64), **rule)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(first, second)


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.slow), compiled])
def test_memory_grows_with_the_length_not_its_square(backend):
    """The largest buffer at 8,192 tokens, forward and backward, is far below one matrix of all pairs."""
    from torch.profiler import ProfilerActivity, profile

    leaves = [
        tensor(1, 1, 8192, 16, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)
    ]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        out, _ = key_tied(*leaves, (16, 64, 256), near=64, sinks=4, is_causal=True, backend=backend)
        torch.autograd.grad(out.sum(), leaves)
    sizes = [
        e.nbytes() for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    assert max(sizes) < 8192 * 8192 * 4 / 16


@pytest.mark.slow
def test_a_long_training_step_keeps_little_memory():
    """Blocks of a causal call differ in size, and an allocator that finds no place for them again keeps gigabytes."""
    leaves = [
        tensor(1, 8, 4096, 64, seed=i, dtype=torch.float32).requires_grad_() for i in range(3)
    ]
    with PeakMemory() as memory:
        out, _ = key_tied(*leaves, (16, 64, 256), near=1, is_causal=True, backend="torch")
        torch.autograd.grad(out.sum(), leaves)
    assert memory.added < 600 * 2**20


@pytest.mark.parametrize("backend", ["torch", compiled])
@pytest.mark.parametrize("sizes", [(8, 16), ()], ids=["windows", "flat"])
@pytest.mark.parametrize("near", [8, 100], ids=["near", "all"])
def test_nan_behind_the_queries_does_not_act(backend, sizes, near):
    """Neither in the output nor in gradients; the first of these tokens shares a window with queries."""
    rule = {"near": near, "sinks": 2, "refine_top_k": 1, "is_causal": True, "backend": backend}
    found = []
    for length in (36, 64):
        q, k, v = (
            tensor(1, 1, 64, 16, seed=i, dtype=torch.float32)[:, :, :length] for i in range(3)
        )
        k[:, :, 36:] = v[:, :, 36:] = float("nan")
        leaves = [t.requires_grad_() for t in (q[:, :, :36], k, v)]
        out, _ = key_tied(*leaves, sizes, **rule)
        grads = torch.autograd.grad(out.cos().sum(), leaves)
        assert not any(g[:, :, 36:].any() for g in grads)
        found.append((out, *(g[:, :, :36] for g in grads)))
    for name, a, b in zip(("output", "query", "key", "value"), *found, strict=True):
        assert_close(b, a, 1e-5, name)


@pytest.mark.parametrize("backend", ["torch", compiled])
@pytest.mark.parametrize("where", ["key", "value"])
def test_nan_acts_where_it_is_seen_and_nowhere_else(backend, where):
    """From its own place on, in the middle of a window."""
    q, k, v = (tensor(1, 1, 64, 16, seed=i, dtype=torch.float32) for i in range(3))
    {"key": k, "value": v}[where][0, 0, 50, 5] = float("nan")
    out, _ = key_tied(q, k, v, (8, 16), near=8, is_causal=True, backend=backend)
    assert torch.equal(out.isnan().any(-1)[0, 0], torch.arange(64) >= 50)


def test_nan_behind_a_mask_and_in_padding_does_not_act():
    """Of a tree that is no windows; queries at padding may be NaN too."""
    groups, mask = (torch.arange(40) // 5)[None], torch.ones(40, 40, dtype=torch.bool).tril()
    mask[:, 30] = False
    mask = mask & (torch.arange(40) >= 6)
    found = []
    for bad in (0.0, float("nan")):
        leaves = [tensor(1, 2, 40, 8, seed=i, dtype=torch.float32) for i in range(3)]
        for t in leaves:
            t[:, :, :6] = bad
        for t in leaves[1:]:
            t[:, :, 30] = bad
        leaves = [t.requires_grad_() for t in leaves]
        real = torch.arange(40).ge(6) & torch.arange(40).ne(30)
        out = hierarchical_attention(
            *leaves, mask, hierarchy=groups, tying="key", near=3, refine_top_k=1
        )
        grads = torch.autograd.grad(out[:, :, real].cos().sum(), leaves)
        found.append([t[:, :, real] for t in (out, *grads)])
    for name, a, b in zip(("output", "query", "key", "value"), *found, strict=True):
        assert_close(b, a, 1e-5, name)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other instructions")
@pytest.mark.skipif(library.core() is None, reason="no compiler, or turned off")
@pytest.mark.parametrize("instructions", ["x86-64", "x86-64-v3"])
def test_the_kernel_without_avx512(monkeypatch, tmp_path, instructions):
    """Built for older CPUs: other registers, another way of single products; forward and backward."""
    own = [f for f in build.compiler_flags() if not f.startswith(("-march", "-DCPU"))]
    monkeypatch.setattr(build, "compiler_flags", lambda: [*own, f"-march={instructions}"])
    monkeypatch.setenv("HF_HYPERATTN_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(library, "CORES", {})
    build.load_library.cache_clear()
    try:
        for seed in range(8):
            test_float32_near_float64("native", seed)
            test_gradients_in_float32_near_float64("native", seed)
        assert len(list(tmp_path.glob("*.so"))) == 1
    finally:
        build.load_library.cache_clear()


@pytest.mark.parametrize("seed", range(6))
def test_bfloat16_near_float64(seed):
    """Where the CPU multiplies bfloat16, weights of tokens are rounded to it, by 2^-9 at most; gradients are not."""
    sizes, top_k = [(4, 16), (16, 64), (5, 20)][seed % 3], seed % 3
    rule = {"near": 7, "sinks": 2, "refine_top_k": top_k, "is_causal": True, "block_bias": 0.5}
    leaves = [
        tensor(2, h, 150, 64, seed=10 * seed + h, dtype=torch.float32).bfloat16() for h in (4, 2, 2)
    ]
    q, k, v = (t.requires_grad_() for t in leaves)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    queries = 150 if seed < 3 else 3
    out, _ = key_tied(q[:, :, -queries:], k, v, sizes, offset=150 - queries, **rule)
    want, _ = key_tied(exact[0][:, :, -queries:], *exact[1:], sizes, offset=150 - queries, **rule)
    assert out.dtype == torch.float32
    assert_close(out, want, 2e-5 if queries <= 4 and not top_k else 8e-3, "output")
    gradients = torch.autograd.grad(out.sin().sum(), (q, k, v))
    wanted = torch.autograd.grad(want.sin().sum(), exact)
    for name, got, of in zip(("query", "key", "value"), gradients, wanted, strict=True):
        assert got.dtype == torch.bfloat16
        assert_close(got, of, 2e-2 * (1 + float(of.abs().max())), name)


@pytest.mark.skipif(library.core() is None, reason="no compiler, or turned off")
def test_sinks_and_biases_in_half_precision():
    """As layers in bfloat16 give them to the kernel, with and without windows."""
    q, k, v = (tensor(1, 4, 20, 32, seed=i, dtype=torch.float32) for i in range(3))
    sink, bias = (
        tensor(4, seed=3, dtype=torch.float32).bfloat16(),
        tensor(4, seed=4, dtype=torch.float32).bfloat16(),
    )
    for sizes in ((4,), ()):
        rule = {"near": 2, "is_causal": True, "backend": "native"}
        found = attend_named(q, pool_levels(k, v, sizes), sink_logit=sink, block_bias=bias, **rule)[
            0
        ]
        wide = attend_named(
            q, pool_levels(k, v, sizes), sink_logit=sink.float(), block_bias=bias.float(), **rule
        )[0]
        assert torch.equal(found, wide)
        low = [t.bfloat16() for t in (q, k, v)]
        got, want = (
            key_tied(*x, sizes, sink_logit=sink, block_bias=bias, **rule)[0]
            for x in (low, [q, k, v])
        )
        assert_close(got, want, 3e-2, f"{sizes}")


@pytest.mark.parametrize("seed", range(12))
def test_both_passes_open_the_same_of_equal_blocks(seed):
    """The output is linear in the values: with g its gradient, <dv, v> is <g, out> where both passes open the same."""
    torch.manual_seed(seed)
    n = 65  # the last tile has one query
    k = torch.randn(4, 48).repeat(17, 1)[:n][None, None].contiguous()
    q, v = torch.randn(1, 1, n, 48), torch.randn(1, 1, n, 48, requires_grad=True)
    out = key_tied(q, k, v, (4, 16), refine_top_k=2, is_causal=True, near=2)[0]
    g = torch.zeros_like(out)
    g[:, :, 64:] = torch.randn(1, 1, 1, 48)
    (dv,) = torch.autograd.grad(out, v, g)
    assert_close((dv * v).sum(), (g * out).sum(), 1e-4, "sum")
    step = key_tied(
        q[:, :, -1:], k, v, (4, 16), refine_top_k=2, is_causal=True, near=2, offset=n - 1
    )[0]
    assert_close(step, out[:, :, -1:], 1e-5, "one query")


def test_a_call_in_plain_torch_on_a_gpu_is_said(monkeypatch):
    """With the reason; calls for which the user asked for plain torch say nothing."""
    said = []
    monkeypatch.setattr(windowed_key, "log_plain_torch", lambda query, reason: said.append(reason))
    q = tensor(1, 2, 20, 8, dtype=torch.float32)
    mask = torch.ones(20, 20, dtype=torch.bool)
    for backend in ("auto", "torch"):
        key_tied(q, q, q, (4,), is_causal=True, mask=mask, backend=backend)
    assert said == ["it has a mask"]


def test_plain_torch_is_said_on_a_gpu_alone(monkeypatch):
    said = []
    monkeypatch.setattr(windowed_key.logger, "warning_once", said.append, raising=False)
    for device in ("cpu", "cuda"):
        windowed_key.log_plain_torch(SimpleNamespace(device=torch.device(device)), "it has a mask")
    assert len(said) == 1 and said[0].endswith("it has a mask")
