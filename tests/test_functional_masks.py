"""Masks, causality, grouped heads and dropout of `cone_attention`, against the float64 definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperattn.functional import cone_attention
from tests.oracles import cone as loops
from tests.oracles import dense
from tests.oracles.cases import BACKENDS, FAST, PAIRINGS, assert_close, per_head, qkv, tensor
from tests.oracles.marks import every_backend

QUICK = settings(max_examples=10, deadline=None, derandomize=True)
two_variants = pytest.mark.parametrize("pairing", ["umbral-xi", "penumbral-psi"])
MASK_SHAPES = [
    (5, 7),
    (1, 7),
    (5, 1),
    (2, 1, 5, 7),
    (1, 4, 5, 7),
    (2, 4, 5, 7),
    (2, 1, 1, 7),
    (1, 1, 5, 7),
]


def attend(q, k, v, pairing, backend, **rest):
    return cone_attention(q, k, v, backend=backend, **PAIRINGS[pairing], **rest)


def random_mask(shape, kind, seed=0):
    """Boolean (True = take part), additive with -inf, or a finite bias."""
    keep, bias = tensor(*shape, seed=seed) < 0.4, tensor(*shape, seed=seed + 1, scale=2.0)
    return {"bool": keep, "additive": bias.masked_fill(~keep, -torch.inf), "bias": bias}[kind]


@every_backend
@pytest.mark.parametrize("kind", ["bool", "additive", "bias"])
def test_masks_of_every_form_and_shape(backend, kind):
    """Boolean, additive, per batch, per head, broadcast; with is_causal they intersect."""
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=5, lk=7)
    for shape in MASK_SHAPES:
        mask = random_mask(shape, kind, seed=30)
        for causal in (False, True):
            got = attend(
                q, k, v, "umbral-xi", backend, attn_mask=mask, is_causal=causal, enable_gqa=True
            )
            expected = loops.attention(q, k, v, mask, causal, **PAIRINGS["umbral-xi"])
            assert_close(got, expected, 1e-9, f"output under a mask {shape}, causal={causal}")


@every_backend
@pytest.mark.parametrize("number", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_gradients_of_a_row_that_large_numbers_hide_whole(backend, number):
    """As in padded rows: the row sees nothing, and has no gradient."""
    q, k, v = (t.requires_grad_() for t in qkv(batch=1, heads=2, lq=3, lk=7, dtype=torch.float32))
    mask = torch.zeros(3, 7).index_fill(0, torch.tensor([1]), number)
    out = attend(q, k, v, "umbral-xi", backend, attn_mask=mask)
    assert not out[:, :, 1].any()
    grad = tensor(*out.shape, seed=8, dtype=torch.float32)
    rest = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    of_rest = torch.autograd.grad(out, (q, k, v), grad.index_fill(2, torch.tensor([1]), 0.0))
    assert all(torch.equal(a, b) for a, b in zip(rest, of_rest, strict=True))


@every_backend
@pytest.mark.parametrize("lq, lk", [(3, 6), (6, 3), (1, 4), (560, 900), (900, 560)])
def test_causality_is_top_left(backend, lq, lk):
    q, k, v = qkv(batch=1, heads=1, lq=lq, lk=lk)
    keep = torch.ones(lq, lk, dtype=torch.bool).tril()
    causal = attend(q, k, v, "umbral-xi", backend, is_causal=True)
    assert_close(causal, attend(q, k, v, "umbral-xi", backend, attn_mask=keep), 1e-9, "output")


@every_backend
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_over_many_blocks(backend, kind):
    q, k, v = qkv(batch=1, heads=2, lq=560, lk=930, d=4)
    mask = random_mask((1, 2, 560, 930), kind, seed=31)
    mask[..., 100:130, :] = False if kind == "bool" else -torch.inf
    mask[..., 128:256] = False if kind == "bool" else -torch.inf
    got = attend(q, k, v, "umbral-xi", backend, attn_mask=mask, is_causal=True)
    assert_close(got, dense.attention(q, k, v, mask, True, **PAIRINGS["umbral-xi"]), 1e-9, "output")


@every_backend
@two_variants
@QUICK
@given(seed=st.integers(0, 10_000), groups=st.sampled_from([1, 2, 3]), causal=st.booleans())
def test_grouped_heads_equal_repeated_heads(backend, pairing, seed, groups, causal):
    q, k, v = qkv(batch=2, heads=6, kv_heads=6 // groups, lq=4, lk=6, seed=seed)
    gamma, radius = per_head(6)
    full = [t.repeat_interleave(groups, dim=1) for t in (k, v)]
    grouped = attend(
        q, k, v, pairing, backend, is_causal=causal, enable_gqa=True, gamma=gamma, radius=radius
    )
    repeated = attend(q, *full, pairing, backend, is_causal=causal, gamma=gamma, radius=radius)
    assert_close(grouped, repeated, 1e-9, "grouped against repeated")


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize(
    "batch, lq, lk", [(1, 4, 0), (1, 0, 4), (0, 4, 4)], ids=["no keys", "no queries", "no batch"]
)
def test_empty_inputs(backend, batch, lq, lk):
    """No keys is nothing visible: zeros. No queries, no batch: an empty output, with a graph."""
    q, k, v = tensor(batch, 2, lq, 3), tensor(batch, 2, lk, 3), tensor(batch, 2, lk, 5)
    q.requires_grad_()
    out = attend(q, k, v, "umbral-xi", backend, is_causal=True)
    assert out.shape == (batch, 2, lq, 5) and not out.any()
    assert not torch.autograd.grad(out.sum(), q, allow_unused=True, materialize_grads=True)[0].any()


# Dropout.


@every_backend
@two_variants
def test_dropout_follows_the_seed(backend, pairing):
    q, k, v = qkv(lq=9)

    def run(seed, p=0.4):
        torch.manual_seed(seed)
        return attend(q, k, v, pairing, backend, dropout_p=p)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    torch.manual_seed(1)
    first, second = (attend(q, k, v, pairing, backend, dropout_p=0.4) for _ in range(2))
    assert not torch.equal(first, second), "a second call must draw anew"
    assert torch.equal(run(1, p=0.0), attend(q, k, v, pairing, backend))


@every_backend
def test_dropout_keeps_the_mean_and_the_rate(backend):
    """Values are the unit vectors, so outputs are the weights: zero at the rate, else scaled by 1/(1-p)."""
    q, k, _ = qkv(batch=1, heads=2, lq=6, lk=8)
    q, k = q.expand(500, -1, -1, -1), k.expand(500, -1, -1, -1)
    v = torch.eye(8, dtype=q.dtype).expand(500, 2, -1, -1)
    torch.manual_seed(0)
    out = attend(q, k, v, "umbral-xi", backend, dropout_p=0.3)
    kept = out != 0
    share = kept.double().mean().item()
    assert abs(share - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    whole = attend(q[:1], k[:1], v[:1], "umbral-xi", backend)
    assert_close(out[kept], (whole / 0.7).expand_as(out)[kept], 1e-9, "kept weights")
    spread = out.std(0) / 500**0.5
    assert ((out.mean(0) - whole[0]).abs() < 5 * spread).all()
    per_key = kept.double().mean(0)
    assert (per_key - 0.7).abs().max() < 5 * (0.21 / 500) ** 0.5, "some pair is favoured"


@every_backend
def test_dropout_over_many_blocks_draws_each_block_anew(backend):
    q, k, _ = qkv(batch=2, heads=2, lq=600, lk=600, d=2)
    v = torch.eye(600, dtype=q.dtype).expand(2, 2, -1, -1)
    torch.manual_seed(3)
    kept = attend(q, k, v, "umbral-xi", backend, dropout_p=0.5) != 0
    blocks = [
        kept[b, h, i : i + 100, j : j + 100]
        for b in (0, 1)
        for h in (0, 1)
        for i in (0, 100, 500)
        for j in (0, 500)
    ]
    for index, one in enumerate(blocks):
        assert 0.45 < one.double().mean() < 0.55
        for other in blocks[:index]:
            assert 0.45 < (one == other).double().mean() < 0.55


@pytest.mark.parametrize("backend", FAST)
def test_dropout_over_many_blocks_is_the_same_backward(backend):
    """With v the unit matrix the output shows what was dropped, and dV must be its transpose times dO."""
    q, k, _ = qkv(batch=1, heads=2, lq=600, lk=600, d=2)
    v = torch.eye(600, dtype=q.dtype).expand(1, 2, -1, -1).contiguous().requires_grad_()
    q.requires_grad_()
    out = attend(q, k, v, "umbral-xi", backend, dropout_p=0.5, is_causal=True)
    weight = tensor(1, 2, 600, 600, seed=33)
    dv, dq = torch.autograd.grad((out * weight).sum(), (v, q))
    assert_close(dv, out.mT @ weight, 1e-9, "gradient of value")
    whole = dense.scores(q, k, **PAIRINGS["umbral-xi"])
    whole = whole.masked_fill(~torch.ones(600, 600, dtype=torch.bool).tril(), -torch.inf).softmax(
        -1
    )
    (plain,) = torch.autograd.grad((whole * (out != 0).detach() / 0.5 * weight).sum(), q)
    assert_close(dq, plain, 1e-8, "gradient of query")


@every_backend
@two_variants
def test_dropout_backward_uses_the_forward_draw(backend, pairing):
    q, k, v = (t.requires_grad_() for t in qkv(batch=1, heads=2, lq=4, lk=5))

    def run(*inputs):
        torch.manual_seed(7)
        return attend(*inputs, pairing, backend, dropout_p=0.5, is_causal=True)

    assert torch.autograd.gradcheck(run, (q, k, v))


@every_backend
def test_dropout_backward_ignores_later_draws(backend):
    """The forward draw is remembered: other random numbers before backward change nothing."""
    q, k, v = (t.requires_grad_() for t in qkv(lq=9))
    grads = []
    for disturb in (False, True):
        torch.manual_seed(5)
        out = attend(q, k, v, "umbral-xi", backend, dropout_p=0.5)
        if disturb:
            torch.rand(100)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@every_backend
@two_variants
def test_a_query_without_keys_gives_zeros_and_finite_gradients_however_large(backend, pairing):
    """A row of zeros over a sum of zero: the gradient must not become infinity times 0."""
    q, k, v = (t.requires_grad_() for t in qkv(batch=1, heads=2, kv_heads=2, lq=4, lk=5))
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2] = False
    out = attend(q, k, v, pairing, backend, attn_mask=mask)
    assert not out[:, :, 2].any()
    (1e6 * out).sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v)) and not q.grad[:, :, 2].any()
