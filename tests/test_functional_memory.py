"""Extra memory of the engines that promise not to hold a length x length matrix.

The profiler records what the allocator hands out, also inside custom operators and C++ kernels, so no engine
can hide a buffer from it. Figures are bytes asked for: the machine and its load play no part.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hf_hyperattn.functional import cone_attention
from tests.oracles import dense
from tests.oracles.cases import FAST, PAIRINGS, assert_close, per_head, qkv
from tests.oracles.marks import first_always

LENGTH, WIDTH = 4096, 16
SQUARE = LENGTH * LENGTH * 4  # bytes of one float32 matrix of all pairs, for one head

lean = pytest.mark.parametrize("backend", FAST)
two_variants = pytest.mark.parametrize("pairing", ["umbral-xi", "penumbral-psi"])


def allocations(run):
    """(result, largest single allocation, highest sum of live allocations) in bytes, while `run` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = run()
    events = recorded.profiler.kineto_results.events()
    sizes = [
        e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.name() == "[memory]"
    ]
    live = peak = 0
    for size in sizes:
        live += size
        peak = max(peak, live)
    return result, max(sizes), peak


def test_the_measure_sees_a_matrix():
    """Otherwise the tests below would pass whatever happens."""
    x = torch.zeros(300, 300)
    _, largest, peak = allocations(lambda: (x @ x, x + 1))
    assert largest == 300 * 300 * 4
    assert 2 * largest <= peak < 2.1 * largest


@lean
@two_variants
@first_always("causal", [True, False], ids=["causal", "full"])
def test_no_matrix_of_all_pairs(backend, pairing, causal):
    """Two heads at length 4096: together under a quarter of one head's matrix, no piece above a sixteenth."""
    q, k, v = qkv(batch=1, heads=2, lq=LENGTH, d=WIDTH, dtype=torch.float32)
    gamma, radius = per_head(2, torch.float32)
    leaves = [t.requires_grad_() for t in (q, k, v, gamma, radius)]

    def forward():
        rest = {"gamma": gamma, "radius": radius, "is_causal": causal}
        return cone_attention(q, k, v, backend=backend, **rest, **PAIRINGS[pairing])

    out, largest, peak = allocations(forward)
    assert largest < SQUARE / 16 and peak < SQUARE / 4, (
        f"forward: largest {largest}, peak {peak} bytes"
    )
    grads, largest, peak = allocations(lambda: torch.autograd.grad(out.sum(), leaves))
    assert largest < SQUARE / 16 and peak < SQUARE / 4, (
        f"backward: largest {largest}, peak {peak} bytes"
    )
    assert all(torch.isfinite(g).all() for g in grads)
    rows = slice(0, LENGTH, 512)
    mask = torch.arange(LENGTH)[rows, None] >= torch.arange(LENGTH) if causal else None
    with torch.no_grad():
        few = dense.attention(
            q[:, :, rows],
            k,
            v,
            mask,
            gamma=gamma.double(),
            radius=radius.double(),
            **PAIRINGS[pairing],
        )
    assert_close(out[:, :, rows], few, 2e-4, "sampled rows")


@lean
@two_variants
def test_memory_grows_with_the_length_not_its_square(backend, pairing):
    peaks = []
    for length in (2048, 4096):
        q, k, v = (
            t.requires_grad_()
            for t in qkv(batch=1, heads=1, lq=length, d=WIDTH, dtype=torch.float32)
        )

        def step(q=q, k=k, v=v):
            out = cone_attention(q, k, v, backend=backend, **PAIRINGS[pairing])
            return torch.autograd.grad(out.sum(), (q, k, v))

        peaks.append(allocations(step)[2])
    assert peaks[1] < 2.2 * peaks[0], f"{peaks} bytes"


@lean
def test_a_boolean_mask_is_not_spread_out(backend):
    """One byte a pair is the caller's; four more for an additive copy, or a copy for each head, is not ours to take."""
    q, k, v = qkv(batch=1, heads=2, lq=LENGTH, d=WIDTH, dtype=torch.float32)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    with torch.no_grad():
        _, largest, peak = allocations(
            lambda: cone_attention(q, k, v, attn_mask=mask, backend=backend)
        )
    assert peak < SQUARE / 4, f"largest {largest}, peak {peak} bytes"


@lean
def test_grouped_heads_are_not_repeated_over_the_batch_of_pairs(backend):
    q, k, v = qkv(batch=1, heads=8, kv_heads=1, lq=64, lk=LENGTH, d=WIDTH, dtype=torch.float32)
    with torch.no_grad():
        _, largest, _ = allocations(
            lambda: cone_attention(q, k, v, enable_gqa=True, backend=backend)
        )
    assert largest <= 8 * LENGTH * max(128, WIDTH) * 4, f"largest {largest} bytes"
