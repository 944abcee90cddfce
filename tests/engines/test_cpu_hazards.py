"""The CPU engine where things go wrong: NaN, steep scores, no keys, threads, forks, a cache that cannot be written."""

import ctypes
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_hyperattn.engines import Options, attention, dispatch, dot_score, native
from hf_hyperattn.engines.cpu import library
from hf_hyperattn.functional import hyperbolic_attention
from hf_hyperattn.mechanisms.hype.score import with_hype
from tests.engines.test_cpu import CALLS, every_call, run, threads
from tests.engines.test_native import needs_compiler
from tests.oracles.cases import assert_close, qkv, tensor

pytestmark = needs_compiler
NAN = float("nan")
__all__ = ["threads"]  # a fixture of test_cpu.py

# The functions of one register, as they are compiled for this CPU and for those without wide registers.

FUNCTIONS = """
#include "{header}"
using namespace hyper;
extern "C" void compute(int which, const float* x, float* y, long n) {{
  for (long i = 0; i < n; i += kLanes) {{
    const Vec v = load(x + i);
    store(y + i, which == 0 ? exponential<true>(v) : which == 1 ? exponential(v) : which == 2 ? log_of_one_plus(v)
                 : which == 3 ? hyperbolic_sine(v) : which == 4 ? hyperbolic_tangent(v) : root(v));
  }}
}}
"""
#: Where each is tried, beside NaN: a uniform range and the exponents of one of powers of ten; the sign.
RANGES = [
    (np.exp, (0, 87), (-8, 1), -1),
    (np.exp, (-87, 88), (-8, 1), 1),
    (np.log1p, (0, 10), (-12, 30), 1),
    (np.sinh, (-80, 80), (-12, 0.5), 1),
    (np.tanh, (-10, 10), (-12, 1), -1),
    (np.sqrt, (0, 4), (-30, 30), 1),
]


@pytest.mark.parametrize("more", ["", "-DHYPER_PLAIN -march=x86-64"], ids=["own", "any x86"])
def test_functions_are_exact_to_the_last_digits_and_keep_nan(more, tmp_path, monkeypatch):
    """Constants that are apart for accuracy stay apart, whatever the compiler may do to sums."""
    if more and native.platform.machine() != "x86_64":
        pytest.skip("for x86")
    flags = [f for f in native.compiler_flags() if not (more and f.startswith("-D"))]
    monkeypatch.setattr(native, "compiler_flags", lambda: [*flags, *more.split()])
    monkeypatch.setenv("HF_HYPERATTN_BUILD_DIR", str(tmp_path))
    source = tmp_path / "functions.cpp"
    source.write_text(FUNCTIONS.format(header=library.HERE / "vectors.h"))
    compute, random = native.load_library("functions", source).compute, np.random.default_rng(0)
    for which, (exact, uniform, powers, sign) in enumerate(RANGES):
        x = (
            np.concatenate([random.uniform(*uniform, 2**14), 10 ** random.uniform(*powers, 2**14)])
            * sign
        )
        x = np.concatenate([x, [NAN] * 64]).astype(np.float32)
        y = np.empty_like(x)
        compute(which, *(ctypes.c_void_p(t.ctypes.data) for t in (x, y)), ctypes.c_long(len(x)))
        want = exact(x.astype(np.float64))
        assert np.isnan(y[-64:]).all(), exact
        assert (np.abs(y - want) <= 4e-7 * np.abs(want))[:-64].all(), exact


# NaN in, NaN out.


def both(name, q, k, v, **more):
    """Output and gradients of the engine and of the definition."""
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = CALLS[name](*leaves, backend=backend, **more)
        yield [out.detach(), *torch.autograd.grad(out.cos().sum(), leaves)]


@every_call
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_is_seen_where_it_acts_and_nowhere_else(name, where):
    q, k, v = qkv(batch=1, heads=2, lq=40, lk=300, d=16, dtype=torch.float32)
    {"query": q, "key": k, "value": v}[where][0, 1, 7, 3] = NAN
    for got, want, what in zip(*both(name, q, k, v), ("output", *"qkv"), strict=True):
        assert torch.equal(got.isnan(), want.isnan()), what
        assert_close(got.nan_to_num(), want.nan_to_num(), 1e-4, what)


@every_call
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_in_decoding(name, where):
    """One query against chunks of keys: NaN among others, alone, and behind a mask."""
    q, k, v = qkv(batch=1, heads=2, lq=1, lk=900, d=16, dtype=torch.float32)
    {"query": q, "key": k, "value": v}[where][0, 1, 0, 3] = NAN
    alone = torch.zeros(1, 1, 1, 900, dtype=torch.bool)
    alone[..., 0] = True
    for mask in (None, alone, ~alone):
        got = CALLS[name](q, k, v, attn_mask=mask, backend="cpu")
        want = CALLS[name](*(t.double() for t in (q, k, v)), attn_mask=mask, backend="reference")
        assert torch.equal(got.isnan(), want.isnan()), mask is None
        assert_close(got.nan_to_num(), want.nan_to_num(), 1e-4, "output")


@every_call
def test_nan_behind_a_mask_does_not_act_and_nan_alone_does(name):
    q, k, v = qkv(batch=1, heads=2, lq=40, lk=300, d=16, dtype=torch.float32)
    k[0, 1, 5] = NAN
    others = torch.ones(40, 300, dtype=torch.bool)
    others[:, 5] = False
    want = CALLS[name](*(t.double() for t in (q, k, v)), attn_mask=others, backend="reference")
    assert_close(CALLS[name](q, k, v, attn_mask=others, backend="cpu"), want, 2e-5, "output")
    alone = CALLS[name](q, k, v, attn_mask=~others, backend="cpu")
    assert alone[:, 1].isnan().all()
    assert_close(alone[:, 0], v[:, 0, 5].expand(40, 16)[None], 1e-6, "the other head")


def hype(q, k, v, mu, tau, form="sinh", backend="cpu", **more):
    """A dot product with HyPE, without the checks and the forms that `hype_attention` has."""
    at = tuple(torch.arange(t.shape[2], dtype=torch.float64)[None, None] for t in (q, k))
    score = with_hype(dot_score(q, k), at, mu.to(q.dtype), tau.to(q.dtype), form, None)
    return attention(score, v, Options(**more), backend=backend)[0]


@pytest.mark.parametrize("form", ["sinh", "cosh"])
def test_a_parameter_that_is_nan_is_not_cut_to_a_number(form):
    q, k, v = qkv(batch=1, heads=1, lq=20, d=8, dtype=torch.float32)
    assert hype(q, k, v, torch.tensor([NAN]), torch.ones(1), form).isnan().all()


# What there is nothing of.


@pytest.mark.parametrize("count", [1, 2])
def test_no_keys_or_no_queries(count, threads):
    threads(count)
    for n, m in ((5, 0), (0, 5)):
        shapes = ((1, 3, n, 8), (1, 1, m, 8), (1, 1, m, 8))
        q, k, v = (torch.ones(shape, requires_grad=True) for shape in shapes)
        out = run(q, k, v)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert out.shape == (1, 3, n, 8) and all(not t.any() for t in (out, *grads))


def test_rows_of_nothing_but_a_sink_of_minus_infinity():
    q, k, v = qkv(batch=1, heads=2, lq=9, lk=20, d=8, dtype=torch.float32)
    mask = torch.ones(9, 20, dtype=torch.bool)
    mask[3] = False
    leaves = [torch.tensor([0.5, float("-inf")]), torch.full((2,), 0.1), torch.full((2,), 2.0)]
    sinks, mu, tau = (t.requires_grad_() for t in leaves)
    found = []
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        vectors = (t.to(dtype) for t in (q, k, v))
        out = hype(*vectors, mu, tau, backend=backend, mask=mask, sinks=sinks)
        found.append([out, *torch.autograd.grad(out.cos().sum(), (sinks, mu, tau))])
    for got, want in zip(*found, strict=True):
        assert_close(got, want, 1e-4, "with sinks")


def test_rows_beyond_their_window_leave_no_trace():
    """Their range is empty at the end of the keys, within a register, where no product was formed."""
    q, k, v = qkv(batch=1, heads=1, lq=90, lk=37, d=8, dtype=torch.float32)
    numbers = [torch.full((1,), x, requires_grad=True) for x in (0.1, 2.0)]
    found = []
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        vectors = (t.to(dtype) for t in (q, k, v))
        out = hype(*vectors, *numbers, backend=backend, window=5, is_causal=True)
        found.append([out, *torch.autograd.grad(out.cos().sum(), numbers)])
    for got, want in zip(*found, strict=True):
        assert_close(got, want, 1e-5, "beyond the window")


# Several at once.


def work(seed: int) -> list[torch.Tensor]:
    name = list(CALLS)[seed % len(CALLS)]
    q, k, v = qkv(batch=1, heads=2, lq=50 + seed, lk=300, d=24, seed=seed, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = CALLS[name](*leaves, backend="cpu")
    return [out.detach(), *torch.autograd.grad(out.cos().sum(), leaves)]


def test_threads_of_the_caller_do_not_meet(threads):
    """Calls of several Python threads run at once, each with threads of its own."""
    threads(2)
    wanted = [work(seed) for seed in range(14)]
    start = threading.Barrier(4)

    def all_of_it(_):
        start.wait()
        return [work(seed) for seed in range(14)]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(all_of_it, range(4)):
            for got, want in zip(found, wanted, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


FORKED = """
import torch
from torch.utils.data import DataLoader
from hf_hyperattn.functional import cone_attention

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        x = torch.linspace(-1, 1, 2 * 600 * 16).reshape(1, 2, 600, 16)
        return cone_attention(x, x, x, backend="cpu")

torch.set_num_threads(2)
mine = Rows()[0]
found = list(DataLoader(Rows(), num_workers=2, multiprocessing_context="fork"))
assert len(found) == 4 and all(torch.allclose(x[0], mine, atol=1e-6) for x in found)
print("fine")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_workers_forked_after_a_call_with_two_threads():
    """OpenMP's threads are not there after a fork: a worker of a DataLoader has one, and must not wait for others."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


# Building.


def test_one_line_where_a_score_cannot_be_built(monkeypatch, caplog):
    assert library.core() is not None
    monkeypatch.setattr(library, "TABLES", {})
    monkeypatch.setattr(dispatch, "RESOLVED", {})
    monkeypatch.setattr(
        library, "TEXT", "// otherwise\n" + library.TEXT
    )  # a library that is not there yet

    def refuse():
        raise OSError(30, "Read-only file system", "a name")

    monkeypatch.setattr(native, "private_directory", refuse)
    q, k, v = qkv(batch=1, heads=1, lq=200, d=8, dtype=torch.float32)
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        outs = [run(q, k, v) for _ in range(2)]
    assert_close(outs[1], run(q, k, v, "blockwise"), 1e-6, "output")
    (line,) = [r.getMessage() for r in caplog.records]
    assert "cpu_score is not compiled" in line and "Read-only" in line


def test_what_a_killed_build_left_is_cleared_away(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HYPERATTN_BUILD_DIR", str(tmp_path))
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    left = tmp_path / f"{native.library_name('one', [source])}.killed"
    left.mkdir()
    (left / "half.o").write_text("")
    assert native.load_library("one", source).one() == 1 and not left.exists()


def test_denormal_numbers_live_on():
    """A library that is linked for fast arithmetic would turn them off for the whole process."""
    assert library.core() is not None
    assert float(torch.tensor(1e-40) * 1.0) > 0
    maps = Path("/proc/self/maps")
    if (
        maps.exists()
    ):  # one OpenMP for torch and for us: two would wait for each other's threads in turns
        found = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
        assert (
            len([path for path in found if ".libs/" not in path]) <= 1
        )  # other packages may bring their own


# Steep scores.


@pytest.mark.parametrize("backend", ["cpu", "blockwise"])
@pytest.mark.parametrize(
    "mu, tau, sink",
    [
        ((1 / 1024, 1 / 300), (2000.0, 50.0), None),
        ((1 / 200, 1 / 100), (1.0, 1e-4), None),
        ((1 / 300, 1 / 250), (2.0, 1.0), 850.0),
    ],
)
def test_parameters_of_steep_scores(backend, mu, tau, sink):
    """Far keys that are rewarded: in each row slopes of 1e6 meet gradients of logits that add up to 0."""
    q, k, v = qkv(1, 2, 1, 1024, 2048, d=4, seed=44)
    weight = tensor(1, 2, 1024, 4, seed=45)
    sinks = None if sink is None else torch.full((2,), sink)
    found = []
    for name, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        numbers = [torch.tensor(t, requires_grad=True) for t in (mu, tau)]
        out = hype(*(t.to(dtype) for t in (q, k, v)), *numbers, backend=name, sinks=sinks)
        found.append(torch.autograd.grad((out * weight.to(dtype)).sum(), numbers))
    for got, want, what in zip(*found, ("mu", "tau"), strict=True):
        # blocks of whole rows do what the whole matrix does in float32, which is as far off
        share = 3e-4 if backend == "cpu" else 1e-2
        assert_close(got, want, share * float(want.abs().max()), what)


def test_rows_of_one_key_have_no_gradient_of_rounding():
    """Logits of thousands leave each row one key: slopes as large must not meet what rounding leaves of a zero. Without
    FMA that was 10 % of the largest gradient, since two sums that are to be the same were added up in two orders.
    """
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 4, 11, 8, generator=draw) for _ in range(4)]
    found = []
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        *leaves, pull = [
            t.to(dtype).requires_grad_()
            for t in (*tensors[:3], torch.linspace(0.7, 1.4, 4), tensors[3])
        ]
        more = dict(scale=1.0, distance="squared_lorentz", aggregation="mean", curvature=leaves[3])
        out = hyperbolic_attention(*leaves[:3], **more, backend=backend)
        found.append(torch.autograd.grad((out * pull).sum(), leaves))
    for got, want, what in zip(*found, ("query", "key", "value", "curvature"), strict=True):
        assert_close(got, want, 2e-3 * float(want.abs().max()), what)


@pytest.mark.slow
@pytest.mark.parametrize(
    "level", [level for level in ("v2", "v3") if level in native.read_levels()]
)
def test_every_score_is_as_exact_with_the_instructions_of_older_cpus(level):
    """Outputs and gradients against float64, of all scores that are written in C++, in a process of that level."""
    tests = ["test_trace.py", "test_engine_kit.py", "test_cpu_hazards.py", "test_fuzz_gradients.py"]
    which = (
        "own_scores_are_as_exact or (test_contract and cpu) or rows_of_one_key or only_near_points"
    )
    environment = {n: x for n, x in os.environ.items() if not n.startswith("PYTEST")} | {
        native.SETTING: level
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "-k", which]
        + [str(Path(__file__).parent / name) for name in tests],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
