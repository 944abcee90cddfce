"""bfloat16 inputs of the CPU engine: multiplied as they are where the CPU can (AMX, avx512_bf16), else as floats."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_hyperattn.engines import Options, attention, dispatch, dot_score, native
from hf_hyperattn.engines.cpu import library
from hf_hyperattn.engines.score import is_upcast, upcast_for_grad
from hf_hyperattn.functional import cone_attention
from tests.engines.test_cpu import CALLS, every_call, run, threads
from tests.engines.test_native import needs_compiler
from tests.oracles.cases import PAIRINGS, assert_close, assert_gradients, qkv, tensor

pytestmark = needs_compiler
__all__ = ["threads"]  # a fixture of test_cpu.py
HALF = torch.bfloat16

#: batch, query heads, key heads, queries, keys, width, value width: odd ones, tails of all registers, several blocks.
SHAPES = [
    (2, 2, 1, 1, 1, 2, 1),
    (1, 4, 2, 5, 7, 3, 17),
    (1, 2, 2, 49, 70, 33, 31),
    (1, 3, 1, 53, 261, 64, 64),
    (1, 2, 1, 530, 97, 80, 40),
]


def both(call, tensors, **more):
    """Outputs and gradients of the engine, and of the definition in float64 on the same numbers."""
    found = []
    for backend, dtype in (("cpu", HALF), ("reference", torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        out = call(*leaves, backend=backend, **more)
        weight = tensor(*out.shape, seed=9, dtype=HALF).to(out.dtype)
        found.append([out.detach(), torch.autograd.grad(out, leaves, weight)])
    return found


@every_call
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_score(name, shape):
    batch, heads, kv_heads, n, m, d, dv = shape
    tensors = qkv(batch, heads, kv_heads, n, m, d, dv, scale=1.7, dtype=HALF)
    (out, grads), (expected, exact) = both(CALLS[name], tensors, is_causal=n <= m)
    assert_close(out, expected, 1e-2 * float(expected.abs().max()), "output")
    assert_gradients(grads, exact, 2e-2, "qkv")


@pytest.mark.parametrize("length", range(1, 71, 3))
def test_all_lengths(length):
    width = 1 + length * 7 % 70
    tensors = qkv(1, 2, 1, length, length + length % 4, width, width, scale=1.7, dtype=HALF)
    (out, grads), (expected, exact) = both(run, tensors, is_causal=length % 2 == 0)
    assert_close(out, expected, 1e-2, "output")
    assert_gradients(grads, exact, 2e-2, "qkv")


@pytest.mark.parametrize("count", [1, 2])
def test_masks_windows_sinks_softcap_and_dropout(count, threads):
    threads(count)
    tensors = qkv(2, 4, 2, 60, 301, 24, 40, scale=1.7, dtype=HALF)
    mask = tensor(2, 1, 60, 301, seed=5) > -0.3
    mask[:, :, 7], mask[:, :, 11, :290] = False, False  # an empty row, one of a few keys
    bias = torch.where(mask, tensor(2, 1, 60, 301, seed=6), float("-inf"))
    for more in (
        {"mask": mask, "softcap": 3.0},
        {"bias": bias, "is_causal": True, "offset": 200},
        {"window": 37, "offset": 241, "is_causal": True},
        {"window": 5, "offset": 300},
    ):
        for sinks in (None, torch.linspace(-2, 2, 4)):
            call = lambda *x, more=more, sinks=sinks, **rest: run(*x, sinks=sinks, **more, **rest)
            (out, grads), (expected, exact) = both(call, tensors)
            assert_close(out, expected, 1e-2, str(more))
            assert_gradients(grads, exact, 2e-2, "qkv")
    torch.manual_seed(0)
    dropped = torch.stack([run(*tensors, dropout_p=0.4) for _ in range(40)]).mean(0)
    assert_close(dropped, run(*tensors), 0.5, "the mean over what is dropped")


def test_strides_and_factors():
    """Heads between the rows, rows in longer ones; points that are vectors times a factor of their own."""
    q, k, v = qkv(2, 4, 2, 50, 70, 21, 21, scale=1.7, dtype=HALF)
    apart = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k)]
    apart.append(torch.cat([v, v], -1)[..., 21:])
    for name in ("umbral", "geodesic", "lorentz", "hype"):
        got = both(CALLS[name], apart)[0]
        wanted = both(CALLS[name], (q, k, v))[0]
        assert torch.equal(got[0], wanted[0]) and all(map(torch.equal, got[1], wanted[1])), name


@every_call
@pytest.mark.parametrize("where", [0, 1, 2], ids=["query", "key", "value"])
def test_nan_is_seen_where_it_acts_and_nowhere_else(name, where):
    tensors = qkv(batch=1, heads=2, lq=40, lk=300, d=16, dtype=HALF)
    tensors[where][0, 1, 7, 3] = float("nan")
    (out, grads), (expected, exact) = both(CALLS[name], tensors)
    for got, want in zip((out, *grads), (expected, *exact), strict=True):
        assert torch.equal(got.isnan(), want.isnan())


def test_huge_and_infinite_logits():
    q, k, v = qkv(batch=1, heads=1, lq=9, lk=40, d=8, dtype=HALF)
    k[0, 0, 3] *= 1e6
    (out, _), (expected, _) = both(run, (q, k, v))
    assert_close(out, expected, 1e-2, "logits of a million")
    k[0, 0, 3] = float("inf")
    assert torch.equal(
        run(q, k, v).isnan(), run(*(t.double() for t in (q, k, v)), "reference").isnan()
    )


@pytest.mark.parametrize("queries", [549, 1], ids=["forward", "decoding"])
def test_outputs_are_as_near_as_those_of_sdpa(queries):
    tensors = qkv(2, 4, 4, queries, 549, 64, scale=1.7, dtype=HALF)
    for causal in (queries > 1, False):
        exact = scaled_dot_product_attention(*(t.double() for t in tensors), is_causal=causal)
        error = lambda out, exact=exact: float((out.to(HALF) - exact).norm())
        assert error(run(*tensors, is_causal=causal)) <= 1.05 * error(
            scaled_dot_product_attention(*tensors, is_causal=causal)
        )


@pytest.mark.parametrize("name", ["psi", "penumbral", "geodesic"])
def test_steep_scores_multiply_no_rounding(name):
    """Gradients of a row's logits add up to 0 with the weights that made the output; else these are off by 4e-2."""
    tensors = qkv(1, 4, 2, 200, 200, 64, scale=5.0, dtype=HALF)
    (_, grads), (_, exact) = both(CALLS[name], tensors, is_causal=True)
    assert_gradients(grads, exact, 1e-2, "qkv")


def test_gradients_of_features_stay_in_float32_until_they_are_added_up():
    half = torch.ones(2, dtype=HALF, requires_grad=True)
    whole = upcast_for_grad(half)
    assert is_upcast(whole) and not is_upcast(whole.clone()) and not is_upcast(half)
    assert not is_upcast(upcast_for_grad(half.half()))  # no bfloat16 numbers


def test_one_key_alone_leaves_nothing_for_its_logit():
    """Both parts of the softmax's derivative are added up in the same order, whatever multiplies: they cancel."""
    tensors = qkv(1, 2, 1, 40, 1, 70, 170, scale=1.7, dtype=HALF)
    (_, grads), _ = both(run, tensors)
    assert not grads[0].any() and not grads[1].any() and grads[2].any()


def amx() -> bool:
    """Whether the CPU has tiles for bfloat16 and this process may use them, as Linux says; asks it for them."""
    info = Path("/proc/cpuinfo")
    if "v4_bf16" not in native.read_levels() or not {"amx_tile", "amx_bf16"} <= set(
        info.read_text().split()
    ):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


needs_amx = pytest.mark.skipif(
    not amx(), reason="needs AMX with bfloat16, and Linux's permission to use it"
)


@needs_amx
def test_tiles_are_used_where_the_cpu_has_them():
    assert library.bfloat16_products() == "by AMX"


@needs_amx
@pytest.mark.parametrize("count", [1, 2])
def test_torch_and_the_engine_take_turns_with_tiles(count, threads):
    """Both shape the tiles of the same threads for themselves: neither sees the other's shapes."""
    threads(count)
    q, k, v = qkv(2, 4, 4, 130, 130, 40, dtype=HALF)
    products = {
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        "matmul": lambda: q[0, 0] @ k[0, 0].mT,
        "linear": lambda: torch.nn.functional.linear(q, k[0, 0]),
        "engine": lambda: run(q, k, v, is_causal=True),
    }
    alone = {name: call() for name, call in products.items()}
    for first in products:
        for second, call in products.items():
            products[first]()
            assert torch.equal(call(), alone[second]), (first, second)


@pytest.mark.parametrize(
    "shape", [(1, 5, 7, 3, 17), (1, 17, 270, 33, 40), (2, 70, 33, 80, 64)], ids=str
)
def test_what_earlier_calls_left_in_memory_is_not_added(shape):
    """Whole tiles are multiplied, also of pairs that a row has not; those are 0 on both sides."""
    heads, n, m, d, dv = shape
    tensors = qkv(1, heads, heads, n, m, d, dv, dtype=HALF)
    for length in (m, 300):
        both(
            run,
            [torch.full_like(t[:, :, :1], torch.nan).expand(-1, -1, length, -1) for t in tensors],
        )
    (out, grads), (expected, exact) = both(run, tensors)
    assert_close(out, expected, 1e-2, "output")
    assert_gradients(grads, exact, 2e-2, "qkv")


@pytest.mark.slow
@pytest.mark.parametrize(
    "level, more",
    [
        ("v2", ""),
        ("v3", ""),
        ("v4", ""),
        ("v4_bf16", "-DHYPER_NO_TILES"),
        (native.BUILD, "-DHYPER_NO_TILES"),
    ],
)
def test_without_the_instruction(level, more, monkeypatch, tmp_path):
    """Other CPUs take pairs or widen: the same results but for rounding."""
    if level not in (*native.read_levels(), native.BUILD):
        pytest.skip(f"no CPU of level {level}")
    if more and not amx():
        pytest.skip("pairs are what this CPU takes anyway")
    tensors = qkv(1, 4, 2, 150, 270, 33, 40, scale=1.7, dtype=HALF)
    few = qkv(1, 4, 2, 2, 270, 32, 70, scale=1.7, dtype=HALF)
    here = {name: both(call, tensors)[0] for name, call in CALLS.items()}
    decoded = {name: call(*few, backend="cpu") for name, call in CALLS.items()}
    monkeypatch.setenv(native.SETTING, level)
    flags = native.compiler_flags()
    monkeypatch.setattr(native, "compiler_flags", lambda: [*flags, *more.split()])
    monkeypatch.setattr(library, "TABLES", {})
    monkeypatch.setattr(library, "CORES", {})
    monkeypatch.setattr(dispatch, "RESOLVED", {})
    native.load_library.cache_clear()
    try:
        for name in ("umbral", "geodesic", "hype"):
            out, grads = both(CALLS[name], tensors)[0]
            assert_close(out, here[name][0], 1e-2, name)
            assert_gradients(grads, [g.double() for g in here[name][1]], 2e-2, "qkv")
            assert_close(CALLS[name](*few, backend="cpu"), decoded[name], 1e-2, f"{name}, decoding")
        q, k, v = qkv(
            batch=1, heads=2, lq=63, d=2, dtype=HALF, seed=13
        )  # logits of 1e10, whose last digit is 1,000
        leaves = [t.detach().requires_grad_() for t in (q * 100, k * 100, v)]
        out = cone_attention(*leaves, backend="cpu", is_causal=True, **PAIRINGS["penumbral-xi"])
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), leaves))
        score = dot_score(*tensors[:2])
        assert attention(score, tensors[2], Options(), backend="cpu")[0].isfinite().all()
        assert library.bfloat16_products() == ("by avx512_bf16" if more else "as float32")
    finally:
        native.load_library.cache_clear()
