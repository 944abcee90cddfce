"""`cone_attention` against the float64 definition: values, adversarial inputs, invariances, masks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperattn.functional import cone_attention, cone_scores
from tests.oracles import cone as loops
from tests.oracles import dense
from tests.oracles.cases import (
    BACKENDS,
    DTYPES,
    FAST,
    MANY_BLOCKS,
    PAIRINGS,
    TOLERANCE,
    assert_close,
    per_head,
    qkv,
    tensor,
)
from tests.oracles.marks import core_pairing, every_backend, every_pairing

QUICK = settings(max_examples=10, deadline=None, derandomize=True)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_fast_engine = pytest.mark.parametrize("backend", FAST)


def attend(q, k, v, pairing, backend, **rest):
    return cone_attention(q, k, v, backend=backend, **PAIRINGS[pairing], **rest)


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@every_pairing
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_output_is_the_definition(backend, pairing, causal):
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=6, lk=8, d=3, dv=5)
    gamma, radius = per_head(4)
    expected = loops.attention(
        q, k, v, None, causal, gamma=gamma, radius=radius, **PAIRINGS[pairing]
    )
    got = attend(
        q, k, v, pairing, backend, is_causal=causal, enable_gqa=True, gamma=gamma, radius=radius
    )
    assert_close(got, expected, 1e-9, "output")


@every_backend
@every_pairing
@every_dtype
def test_output_in_every_dtype(backend, pairing, dtype):
    """The oracle sees the same rounded inputs, so only the engine's own error is left."""
    dtype = DTYPES[dtype]
    q, k, v = qkv(batch=2, heads=2, lq=33, lk=40, d=16, dtype=dtype, seed=5)
    got = attend(q, k, v, pairing, backend)
    assert got.dtype == dtype
    assert_close(got, dense.attention(q, k, v, **PAIRINGS[pairing]), TOLERANCE[dtype], "output")


@every_fast_engine
@core_pairing
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("batch, heads, kv_heads, lq, lk", MANY_BLOCKS, ids=str)
def test_output_over_many_blocks(backend, pairing, causal, batch, heads, kv_heads, lq, lk):
    """In float32; test_gradients_over_many_blocks has float64, too."""
    q, k, v = qkv(batch, heads, kv_heads, lq, lk, d=4, seed=6, dtype=torch.float32)
    got = attend(q, k, v, pairing, backend, is_causal=causal, enable_gqa=True)
    expected = dense.attention(q, k, v, None, causal, **PAIRINGS[pairing])
    assert_close(got, expected, TOLERANCE[torch.float32], "output")


@every_backend
@every_pairing
def test_duplicates_and_neighbours_in_float32(backend, pairing):
    """|x|² - 2xy + |y|² loses near-identical pairs: fast engines are given 5e-3, the reference is not."""
    base = tensor(1, 2, 1, 16, seed=7)
    q = (base + tensor(1, 2, 24, 16, seed=8, scale=1e-4)).float()
    k = torch.cat([q[:, :, :8], q[:, :, 8:16] + 1e-5, tensor(1, 2, 8, 16, seed=9).float()], dim=2)
    v = tensor(1, 2, 24, 16, seed=10).float()
    atol = 2e-4 if backend == "reference" else 5e-3
    assert_close(
        attend(q, k, v, pairing, backend),
        loops.attention(q, k, v, **PAIRINGS[pairing]),
        atol,
        "output",
    )


@core_pairing
def test_scores_and_attention_are_one_operator(pairing):
    q, k, v = qkv(seed=11)
    logits = cone_scores(q, k, gamma=0.8, radius=1.1, **PAIRINGS[pairing])
    expected = torch.softmax(logits, -1) @ v
    assert_close(
        attend(q, k, v, pairing, "reference", gamma=0.8, radius=1.1), expected, 1e-12, "output"
    )


@every_backend
def test_inputs_may_be_views(backend):
    q, k, v = (t.transpose(1, 2) for t in qkv(batch=2, heads=5, lq=3, d=4, seed=12))
    got = attend(q, k, v, "umbral-xi", backend)
    expected = attend(q.contiguous(), k.contiguous(), v.contiguous(), "umbral-xi", backend)
    assert_close(got, expected, 1e-12, "output")


@every_backend
def test_values_may_have_another_dtype(backend):
    """Under autocast q and k arrive in float32 and v in bfloat16; the output takes the query's dtype."""
    q, k, v = qkv(lq=7, d=8, dtype=torch.float32)
    got = attend(q, k, v.bfloat16(), "umbral-xi", backend)
    assert got.dtype == torch.float32
    expected = dense.attention(q, k, v.bfloat16(), **PAIRINGS["umbral-xi"])
    assert_close(got, expected, 3e-2, "output")


@every_backend
@core_pairing
def test_two_runs_are_bitwise_equal(backend, pairing):
    q, k, v = (t.requires_grad_() for t in qkv(batch=1, heads=2, lq=600, d=4, dtype=torch.float32))
    runs = []
    for _ in range(2):
        out = attend(q, k, v, pairing, backend, is_causal=True)
        runs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# Adversarial inputs.

KINDS = {
    "zeros": lambda q, k: (torch.zeros_like(q), torch.zeros_like(k)),
    "duplicates": lambda q, k: (q[:, :, :1].expand_as(q), q[:, :, :1].expand_as(k)),
    "tiny": lambda q, k: (q * 1e-4, k * 1e-4),
    "ten": lambda q, k: (q * 10, k * 10),
    "huge": lambda q, k: (q * 1e2, k * 1e2),
    "mixed": lambda q, k: (q * torch.logspace(-4, 2, q.shape[2])[:, None].to(q), k),
}
SHAPES = [(1, 2), (2, 3), (17, 64), (63, 16), (63, 2)]  # length, head dimension


@every_backend
@core_pairing
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_adversarial_inputs_stay_finite_and_inside_the_hull(backend, pairing, dtype, kind):
    dtype = DTYPES[dtype]
    for length, d in SHAPES:
        q, k, v = qkv(batch=1, heads=2, lq=length, d=d, dtype=dtype, seed=13)
        q, k = (t.clone().contiguous().requires_grad_() for t in KINDS[kind](q, k))
        v.requires_grad_()
        out = attend(q, k, v, pairing, backend, is_causal=True)
        where = f"length {length}, d {d}"
        slack = 4 * torch.finfo(dtype).eps
        assert torch.isfinite(out).all(), f"{where}: output"
        assert (out <= v.cummax(2).values + slack).all(), (
            f"{where}: output above every visible value"
        )
        assert (out >= v.cummin(2).values - slack).all(), (
            f"{where}: output below every visible value"
        )
        for name, grad in zip(
            "qkv", torch.autograd.grad(out.square().sum(), (q, k, v)), strict=True
        ):
            # half precision cannot hold the true gradient of a point scaled by e^10; a NaN is never right
            ok = ~grad.isnan() if dtype == torch.float16 and kind != "tiny" else grad.isfinite()
            assert ok.all(), f"{where}: gradient of {name} at {(~ok).nonzero()[:2].tolist()}"


@every_backend
@every_pairing
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_rows_with_one_or_no_visible_key(backend, pairing, dtype):
    """A row with one key copies its value; a row with none gives zero, and neither leaks a NaN backward."""
    q, k, v = (
        t.requires_grad_()
        for t in qkv(batch=2, heads=2, lq=5, lk=6, d=3, dtype=DTYPES[dtype], seed=14)
    )
    mask = torch.ones(2, 1, 5, 6, dtype=torch.bool)
    mask[:, :, 1] = False
    mask[0, :, 3] = False
    mask[1, :, 3] = torch.arange(6) == 4
    out = attend(q, k, v, pairing, backend, attn_mask=mask)
    assert not out[:, :, 1].any() and not out[0, :, 3].any()
    assert_close(
        out[1, :, 3], v[1, :, 4], 4 * torch.finfo(DTYPES[dtype]).eps, "the only visible value"
    )
    assert_close(
        out, definition(q, k, v, mask, pairing), max(TOLERANCE[DTYPES[dtype]], 1e-9), "output"
    )
    dq, dk, dv = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in (dq, dk, dv))
    assert not dq[:, :, 1].any() and not dq[0, :, 3].any()
    assert_close(
        dq[1, :, 3],
        torch.zeros(2, 3),
        1e-2 if dtype == "bfloat16" else 1e-5,
        "dq of a row with one key",
    )


def definition(q, k, v, mask, pairing):
    return loops.attention(
        q.detach().double(), k.detach().double(), v.detach().double(), mask, **PAIRINGS[pairing]
    )


@every_backend
def test_nothing_visible_at_all(backend):
    q, k, v = (t.requires_grad_() for t in qkv(lq=4))
    out = attend(q, k, v, "umbral-xi", backend, attn_mask=torch.zeros(4, 4, dtype=torch.bool))
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not out.any() and not any(g.any() for g in grads)


# Invariances.


@every_backend
@core_pairing
@QUICK
@given(
    seed=st.integers(0, 10_000), lq=st.integers(1, 9), lk=st.integers(1, 9), causal=st.booleans()
)
def test_heads_and_batches_are_independent(backend, pairing, seed, lq, lk, causal):
    q, k, v = qkv(batch=2, heads=3, lq=lq, lk=lk, seed=seed)
    gamma, radius = per_head(3)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed))
    out = attend(q, k, v, pairing, backend, is_causal=causal, gamma=gamma, radius=radius)
    turned = attend(
        *(t[:, order] for t in (q, k, v)),
        pairing,
        backend,
        is_causal=causal,
        gamma=gamma[order],
        radius=radius[order],
    )
    assert_close(turned, out[:, order], 1e-9, "permuted heads")
    alone = attend(
        q[1:], k[1:], v[1:], pairing, backend, is_causal=causal, gamma=gamma, radius=radius
    )
    assert_close(alone, out[1:], 1e-9, "one batch entry alone")


@every_backend
@core_pairing
@QUICK
@given(seed=st.integers(0, 10_000), lk=st.integers(1, 12))
def test_order_of_the_keys_does_not_matter(backend, pairing, seed, lk):
    q, k, v = qkv(batch=1, heads=2, lq=5, lk=lk, seed=seed)
    bias = tensor(1, 2, 5, lk, seed=seed + 3)
    mask = bias.masked_fill(tensor(1, 2, 5, lk, seed=seed + 4) > 0.5, -torch.inf)
    order = torch.randperm(lk, generator=torch.Generator().manual_seed(seed))
    out = attend(q, k, v, pairing, backend, attn_mask=mask)
    other = attend(q, k[:, :, order], v[:, :, order], pairing, backend, attn_mask=mask[..., order])
    assert_close(other, out, 1e-9, "permuted keys")


@every_backend
@core_pairing
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@QUICK
@given(seed=st.integers(0, 10_000), length=st.integers(2, 12), size=st.sampled_from([1.0, 1e2]))
def test_a_future_token_never_changes_a_past_output(backend, pairing, dtype, seed, length, size):
    q, k, v = qkv(batch=1, heads=2, lq=length, seed=seed, dtype=DTYPES[dtype])
    cut = seed % (length - 1) + 1
    later = [t.clone() for t in (q, k, v)]
    for i, t in enumerate(later):
        t[:, :, cut:] = tensor(
            1, 2, length - cut, 3, seed=seed + 20 + i, scale=size, dtype=DTYPES[dtype]
        )
    out = attend(q, k, v, pairing, backend, is_causal=True)[:, :, :cut]
    assert_close(
        attend(*later, pairing, backend, is_causal=True)[:, :, :cut],
        out,
        TOLERANCE[DTYPES[dtype]] / 10,
    )


@every_backend
@pytest.mark.parametrize("pairing", ["umbral-xi", "umbral-psi", "penumbral-psi"])
@QUICK
@given(seed=st.integers(0, 10_000))
def test_horizontal_translation_changes_nothing(backend, pairing, seed):
    """x + t/h moves the horizontal part by t and keeps the height; see tests/mechanisms/cone/test_cone.py."""
    q, k, v = qkv(batch=1, heads=1, lq=4, lk=5, d=4, seed=seed)
    by = tensor(3, seed=seed + 7) * 2

    def moved(x):
        heights = [loops.point(row, PAIRINGS[pairing]["mapping"])[1] for row in x[0, 0]]
        return torch.cat(
            [x[..., :-1] + by / torch.tensor(heights).to(x)[:, None], x[..., -1:]], dim=-1
        )

    out = attend(q, k, v, pairing, backend)
    assert_close(attend(moved(q), moved(k), v, pairing, backend), out, 1e-6, "moved points")
