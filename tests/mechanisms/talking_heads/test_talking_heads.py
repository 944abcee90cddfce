"""talking_heads_attention and its engines against loops over pairs and heads; gradients, dropout, refusals."""

import numpy as np
import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.engines import Options, dot_score
from hf_hyperattn.functional import (
    cone_scores,
    hype_bias,
    hyperbolic_scores,
    talking_heads_attention,
)
from hf_hyperattn.mechanisms.base import Host, HostCall, Plan
from hf_hyperattn.mechanisms.cone.functional import cone_space
from hf_hyperattn.mechanisms.hype.score import HypeLayer
from hf_hyperattn.mechanisms.hyperbolic.score import HyperbolicSpace
from hf_hyperattn.mechanisms.talking_heads import operator
from hf_hyperattn.mechanisms.talking_heads.operator import talking_heads
from tests.oracles.cases import assert_close, qkv, tensor
from tests.oracles.talking_heads import talking_heads as by_hand

BACKENDS = ("reference", "blockwise")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of two rows, so that small inputs take many."""
    monkeypatch.setattr(operator, "count_tile_rows", lambda queries, *_: min(2, queries))


def matrices(heads: int, dtype=torch.float64, seed=50):
    return tensor(heads, heads, seed=seed, dtype=dtype), tensor(
        heads, heads, seed=seed + 1, dtype=dtype
    )


def plain_logits(q, k, scale):
    return scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT


MASK = tensor(2, 1, 7, 9, seed=60) > -0.4
MASK[0, 0, 3] = False  # one query sees nothing
CALLS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "bool mask": {"mask": MASK},
    "additive mask by head": {
        "mask": tensor(1, 4, 7, 9, seed=61).masked_fill(~MASK[:1], -torch.inf)
    },
    "bias": {"bias": tensor(1, 4, 7, 9, seed=62)},
    "cap and bias": {"softcap": 0.3, "bias": tensor(1, 1, 1, 9, seed=63)},
    "window": {"is_causal": True, "window": 2, "offset": 2},
    "sinks": {"sinks": tensor(4, seed=64), "is_causal": True},
    "all": {
        "mask": MASK,
        "bias": tensor(1, 4, 7, 9, seed=62),
        "softcap": 0.5,
        "sinks": tensor(4, seed=64),
    },
}


@every_backend
@pytest.mark.parametrize("asked", CALLS)
def test_it_is_what_the_paper_says(backend, asked, small_tiles):
    q, k, v = qkv(heads=4, kv_heads=2, lq=7, lk=9, d=3, dv=5)
    before, after = matrices(4)
    options = Options(**CALLS[asked])
    out, _ = talking_heads(
        dot_score(q, k, 0.7), v, options, before=before, after=after, backend=backend
    )
    named = {"is_causal": "causal"}
    asked = {named.get(n, n): x for n, x in CALLS[asked].items()}
    expected, weights = by_hand(plain_logits(q, k, 0.7), v, before, after, **asked)
    assert_close(out, expected, 1e-12)
    _, found = talking_heads(
        dot_score(q, k, 0.7), v, options, before=before, after=after, weights=True
    )
    assert_close(found, weights, 1e-12)


@every_backend
@pytest.mark.parametrize("asked", CALLS)
def test_gradients(backend, asked, small_tiles):
    """Finite differences; additive masks, biases and sinks learn too."""
    q, k, v = qkv(heads=4, kv_heads=2, batch=2, lq=7, lk=9, d=2, dv=2)
    rest = dict(CALLS[asked])
    names = [n for n in ("bias", "sinks") if n in rest]
    leaves = [
        t.clone().requires_grad_() for t in (q, k, v, *matrices(4), *(rest[n] for n in names))
    ]

    def call(q, k, v, before, after, *given):
        options = Options(**rest | dict(zip(names, given, strict=True)))
        return talking_heads(
            dot_score(q, k, 0.7), v, options, before=before, after=after, backend=backend
        )[0]

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("given", [(True, False), (False, True), (False, False)], ids=str)
@every_backend
def test_either_matrix_may_be_left_out(backend, given, small_tiles):
    q, k, v = (t.requires_grad_() for t in qkv(heads=3, lq=5))
    chosen = [m if there else None for m, there in zip(matrices(3), given, strict=True)]
    whole = [torch.eye(3, dtype=torch.float64) if m is None else m for m in chosen]
    out = talking_heads_attention(
        q, k, v, before=chosen[0], after=chosen[1], backend=backend, scale=0.4
    )
    expected, _ = by_hand(plain_logits(q, k, 0.4).detach(), v.detach(), *whole)
    assert_close(out, expected, 1e-12)
    assert torch.autograd.gradcheck(
        lambda *t: talking_heads_attention(*t, before=chosen[0], after=chosen[1], backend=backend),
        (q, k, v),
        fast_mode=True,
    )


@every_backend
def test_permutations_of_heads(backend):
    """P_l that hands on another head's logits, P_w that brings the weights back: attention as it was."""
    q, k, v = qkv(heads=4, lq=6)
    turn = torch.eye(4, dtype=torch.float64)[[2, 0, 3, 1]]
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    both = talking_heads_attention(
        q, k, v, is_causal=True, before=turn, after=turn.T, backend=backend
    )
    assert_close(both, plain, 1e-12)
    first = talking_heads_attention(
        q, k, v, is_causal=True, before=turn, after=None, backend=backend
    )
    other = torch.nn.functional.scaled_dot_product_attention(
        q[:, [2, 0, 3, 1]], k[:, [2, 0, 3, 1]], v, is_causal=True
    )
    assert_close(first, other, 1e-12)


SCORES = {
    "cone": lambda q, k: (
        cone_space(q, "umbral", None, 1.0, 1.0, True, False).score(q, k),
        cone_scores(q, k),
    ),
    "hyperbolic": lambda q, k: (
        HyperbolicSpace("geodesic", 0.5, 1.0, 1.0).score(q, k),
        hyperbolic_scores(q, k, scale=0.5),
    ),
}


@every_backend
@pytest.mark.parametrize("name", SCORES)
def test_any_score_is_mixed(backend, name, small_tiles):
    q, k, v = qkv(heads=4, kv_heads=2, lq=5, lk=6, d=4)
    score, dense = SCORES[name](q, k)
    before, after = matrices(4)
    out, _ = talking_heads(
        score, v, Options(is_causal=True), before=before, after=after, backend=backend
    )
    assert_close(out, by_hand(dense, v, before, after, causal=True)[0], 1e-9)
    leaves = [t.requires_grad_() for t in (q, k, v, before, after)]

    def call(q, k, v, before, after):
        score, _ = SCORES[name](q, k)
        return talking_heads(
            score, v, Options(is_causal=True), before=before, after=after, backend=backend
        )[0]

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@every_backend
def test_a_positional_bias_is_mixed_with_the_score(backend, small_tiles):
    """HyPE's term reads no features; it stands in the logits before P_l."""
    host = Host("host", heads=4, kv_heads=4, is_causal=True, is_cross=False, layer_index=0)
    numbers = {"mu": 0.5, "tau": (0.1, 0.3, 1.0, 2.0)}
    q, k, v = qkv(heads=4, lq=7)
    plan = HypeLayer(ha.HypeConfig(**numbers), host).double()(
        Plan.from_call(HostCall(q, k, v, 0.6, True, Options()))
    )
    before, after = matrices(4)
    out, _ = talking_heads(
        plan.score, v, Options(is_causal=True), before=before, after=after, backend=backend
    )
    bias = hype_bias(
        torch.arange(7),
        torch.arange(7),
        mu=0.5,
        tau=torch.tensor(numbers["tau"], dtype=torch.float64),
        form="sinh",
    )
    logits = plain_logits(q, k, 0.6) + bias
    assert_close(out, by_hand(logits.detach(), v, before, after, causal=True)[0], 1e-9)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_less_precision(backend, dtype):
    """Arithmetic is float32 whatever comes in: half precision loses what its own digits lose, no more."""
    q, k, v = qkv(heads=4, kv_heads=2, lq=150, lk=170, d=16, dtype=dtype)
    before, after = matrices(4, torch.float32)
    out = talking_heads_attention(
        q, k, v, enable_gqa=True, before=before, after=after, backend=backend
    )
    logits = plain_logits(q.double(), k.double(), 0.25)
    expected, _ = by_hand(logits[:, :, :20], v.double(), before, after)
    assert out.dtype == dtype
    assert_close(out[:, :, :20], expected, {torch.float32: 1e-5}.get(dtype, 1e-2))


@every_backend
@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_extreme_logits_stay_finite(backend, size):
    q, k, v = (t.float().requires_grad_() for t in qkv(heads=2, lq=40, d=8, scale=size))
    bias = torch.zeros(1, 2, 40, 40)
    bias[0, 0, :, 5:] = torch.finfo(torch.float32).min  # what some families write for hidden pairs
    bias[0, 1, :, 7] = -torch.inf
    before, after = (m.float().requires_grad_() for m in matrices(2))
    options = Options(bias=bias)
    out, _ = talking_heads(dot_score(q, k), v, options, before=before, after=after, backend=backend)
    assert out.isfinite().all()
    grads = torch.autograd.grad(out.sum(), (q, k, v, before, after))
    assert all(g.isfinite().all() for g in grads)


@every_backend
def test_no_keys_no_queries_and_one_head(backend):
    q, k, v = qkv(heads=2, lq=3, lk=4)
    one = torch.ones(2, 2, dtype=torch.float64)
    none = talking_heads_attention(
        q, k[:, :, :0], v[:, :, :0], before=one, after=one, backend=backend
    )
    assert none.shape == q.shape and not none.any()
    assert talking_heads_attention(
        q[:, :, :0], k, v, before=one, after=one, backend=backend
    ).shape == (
        2,
        2,
        0,
        3,
    )
    half = torch.full((1, 1), 0.5, dtype=torch.float64)
    out = talking_heads_attention(
        q[:, :1], k[:, :1], v[:, :1], before=half, after=half, backend=backend
    )
    plain = torch.nn.functional.scaled_dot_product_attention(
        q[:, :1], k[:, :1], v[:, :1], scale=0.5 * 3**-0.5
    )
    assert_close(out, 0.5 * plain, 1e-12)


@every_backend
def test_dropout_acts_on_the_mixed_weights(backend, small_tiles):
    """With the identity for values the output is the weights: each is 0 or as it was over 1 - p."""
    q, k, _ = qkv(heads=3, batch=1, lq=60, lk=50)
    v = torch.eye(50, dtype=torch.float64).expand(1, 3, 50, 50)
    before, after = matrices(3)
    torch.manual_seed(3)
    out = talking_heads_attention(
        q, k, v, dropout_p=0.25, before=before, after=after, backend=backend
    )
    whole = talking_heads_attention(q, k, v, before=before, after=after, backend=backend)
    kept = out != 0
    assert abs(kept.double().mean() - 0.75) < 0.02
    assert_close(out[kept], whole[kept] / 0.75, 1e-12)


def test_backward_drops_what_forward_dropped(small_tiles):
    leaves = [t.requires_grad_() for t in (*qkv(heads=2, lq=5), *matrices(2))]

    def call(q, k, v, before, after):
        torch.manual_seed(1)
        return talking_heads_attention(
            q, k, v, dropout_p=0.4, before=before, after=after, backend="blockwise"
        )

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("length", [64, 1024, 8192, 2**17])
def test_tiles_are_bounded_and_cover_every_row(length):
    """Memory is a block of rows, times keys, times heads: a few rows at least, a bounded number of logits at most."""
    rows = operator.count_tile_rows(length, 12 * length)
    assert 1 <= rows <= length
    assert rows * 12 * length <= operator.MOST_ELEMENTS or rows == 1
    assert (
        rows >= min(length, operator.LEAST_ROWS)
        or 2 * rows * 12 * length > operator.MOST_ELEMENTS / 2
    )


def test_many_tiles_agree_with_the_definition():
    q, k, v = (t.float() for t in qkv(batch=1, heads=8, kv_heads=4, lq=701, lk=703, d=16))
    before, after = (torch.eye(8) + 0.3 * m.float() for m in matrices(8))
    leaves = [t.requires_grad_() for t in (q, k, v, before, after)]
    found = []
    for backend in BACKENDS:
        out = talking_heads_attention(
            q, k, v, is_causal=True, enable_gqa=True, before=before, after=after, backend=backend
        )
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*found, strict=True):
        # two sums of half a million float32 products each, in two orders
        assert_close(b, a.double(), 3e-5 * max(1.0, a.abs().max().item()))


def test_it_is_one_node_for_the_compiler():
    torch._dynamo.reset()
    before, after = (m.float().requires_grad_() for m in matrices(2))
    compiled = torch.compile(
        lambda q, k, v: talking_heads_attention(
            q, k, v, is_causal=True, before=before, after=after
        ),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for length in (5, 9):
        q, k, v = (t.float() for t in qkv(heads=2, lq=length))
        plain = talking_heads_attention(q, k, v, is_causal=True, before=before, after=after)
        assert_close(compiled(q, k, v), plain.detach(), 1e-6)
        grads = [torch.autograd.grad(f.sum(), before)[0] for f in (compiled(q, k, v), plain)]
        assert_close(*grads, 1e-5)


def test_the_operator_is_well_formed():
    q, k, v = (t.requires_grad_() for t in qkv(heads=2, lq=4))
    before, after = (m.requires_grad_() for m in matrices(2))
    given = ([q, k, v, before, after], "dot", "before after", 8, 1.0, True, None, 0, None, 0.0)
    torch.library.opcheck(operator.forward, given)


def test_refusals():
    q, k, v = qkv(heads=4, kv_heads=2)
    before, after = matrices(4)
    with pytest.raises(
        ValueError, match=r"before has shape \(2, 2\) .* allowed: .*\(4, 4\); or None"
    ):
        talking_heads_attention(q, k, v, enable_gqa=True, before=before[:2, :2], after=after)
    with pytest.raises(
        ValueError, match="backend='sdpa' is unknown to talking heads, .* reference, blockwise"
    ):
        talking_heads_attention(
            q, k, v, enable_gqa=True, before=before, after=after, backend="sdpa"
        )
    with pytest.raises(ValueError, match="key has 2 heads, query has 4"):
        talking_heads_attention(q, k, v, before=before, after=after)
    with pytest.raises(ValueError, match="blockwise' returns no weights"):
        talking_heads(
            dot_score(q, k), v, before=before, after=after, backend="blockwise", weights=True
        )
    with pytest.raises(ValueError, match="mixes nothing; allowed: at least one"):
        ha.TalkingHeadsConfig(before=False, after=False)
    with pytest.raises(
        ValueError, match="talking_heads and hsa have no meaning together: tied logits"
    ):
        ha.HyperAttnConfig([ha.HsaConfig(), ha.TalkingHeadsConfig()])


def test_loops_agree_with_a_weighted_sum_of_plain_attention():
    """The oracle itself: with P_l = 1, head h is Σ_g P_w[h, g] of head g's weights on its own values."""
    q, k, v = qkv(heads=3, lq=4)
    _, after = matrices(3)
    weights = (plain_logits(q, k, 0.5)).softmax(-1)
    expected = np.einsum("hg,bgnm,bhmd->bhnd", after, weights, v)
    assert np.abs(by_hand(plain_logits(q, k, 0.5), v, np.eye(3), after)[0] - expected).max() < 1e-12
