"""The engine on torch's own kernels: masks, windows, grouped heads, half precision, and what it leaves to others."""

from dataclasses import replace

import pytest
import torch

from hf_hyperattn.engines import Options, ScoreTerm, attention, dot_score
from hf_hyperattn.engines.dispatch import choose_engine
from hf_hyperattn.engines.score import DOT
from hf_hyperattn.engines.sdpa import (
    MEETINGS,
    is_rounded,
    make_columns,
    supports,
    unsupported_reason,
)
from hf_hyperattn.functional import hype_attention
from tests.oracles.cases import TOLERANCE, assert_close, assert_gradients, qkv, tensor

N, M = 40, 47  # more queries than go in as a mask
HIDES = [{}, {"is_causal": True}, {"is_causal": True, "window": 5, "offset": 3}, {"window": 6}]


def mask_of(kind, n, m):
    keep = tensor(2, 4, n, m, seed=3) > -0.5
    keep[:, :, 2 % n] = False
    return {
        "none": None,
        "bool": keep,
        "of keys": keep[:, :1, :1] | (torch.arange(m) == 0),
        "additive": tensor(2, 1, n, m, seed=4).masked_fill(~keep[:, :1], -torch.inf),
    }[kind]


@pytest.mark.parametrize("n", [1, 7, N])
@pytest.mark.parametrize("mask", ["none", "bool", "of keys", "additive"])
@pytest.mark.parametrize("hide", HIDES, ids=str)
def test_it_agrees_with_the_reference(n, mask, hide):
    q, k, v = qkv(2, 4, 2, n, M, d=6, dv=3)
    options = Options(mask=mask_of(mask, n, M), **hide)
    score = dot_score(q, k, 0.4)
    exact, _ = attention(score, v, options, backend="reference")
    plain = not hide or hide == {"is_causal": True} and mask == "none"
    if n > 16 and not plain and mask in ("none", "of keys"):
        with pytest.raises(ValueError, match="backend='sdpa' .*windows, offsets and causality"):
            attention(score, v, options, backend="sdpa")
    else:
        assert_close(attention(score, v, options, backend="sdpa")[0], exact, 1e-12, "output")
    assert_close(attention(score, v, options)[0], exact, 1e-12, "auto")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_forward_and_backward(dtype):
    q, k, v = (t.requires_grad_() for t in qkv(2, 4, 2, N, M, d=16, dtype=dtype))
    weight = tensor(2, 4, N, 16, seed=5)

    def both(backend, q, k, v):
        out, _ = attention(dot_score(q, k), v, Options(is_causal=True), backend=backend)
        return out, *torch.autograd.grad((out.double() * weight).sum(), (q, k, v))

    got, exact = (
        both("sdpa", q, k, v),
        both("reference", *(t.detach().double().requires_grad_() for t in (q, k, v))),
    )
    assert got[0].dtype == dot_score(q, k).query.dtype and got[1].dtype == dtype
    assert_close(got[0], exact[0], TOLERANCE[dtype], "output")
    assert_gradients(
        got[1:], exact[1:], {torch.float64: 1e-9, torch.float32: 2e-3}.get(dtype, 6e-2), "qkv"
    )


def test_values_of_another_dtype():
    q, k, v = qkv(1, 2, lq=N, d=8, dtype=torch.float32)
    got, _ = attention(dot_score(q, k), v.bfloat16(), backend="sdpa")
    assert_close(
        got, attention(dot_score(q, k), v.bfloat16(), backend="reference")[0], 1e-5, "output"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [2, N])
@pytest.mark.parametrize("backend", ["sdpa", "auto"])
def test_an_added_mask_beside_values_of_another_dtype(n, dtype, backend):
    """The kernel for CPUs reads a float32 mask beside float64 numbers as if it held such, and beyond its end."""
    q, k, v = qkv(1, 2, lq=n, lk=M, d=8, dtype=torch.float32)
    options = Options(mask=tensor(1, 1, n, M, seed=4, dtype=torch.float32))
    got, _ = attention(dot_score(q, k), v.to(dtype), options, backend=backend)
    assert_close(
        got,
        attention(dot_score(q, k), v.to(dtype), options, backend="reference")[0],
        1e-5,
        "output",
    )


@pytest.mark.parametrize("scale", [0.0, 1e-45])
def test_columns_are_not_divided_by_nothing(scale):
    q, k, v = qkv(1, 2, lq=N, d=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="backend='sdpa' cannot compute this call: its scale is 0"):
        hype_attention(q, k, v, mu=0.1, tau=1.0, scale=scale, backend="sdpa")
    got, want = (
        hype_attention(q, k, v, mu=0.1, tau=1.0, scale=scale, backend=b)
        for b in ("auto", "reference")
    )
    assert_close(got, want, 1e-5, "output")


def test_a_score_with_other_features_is_not_taken_for_its_source():
    """A mechanism that rescales the features of a dot product keeps what it did."""
    q, k, v = qkv(1, 2, lq=N, d=8, dtype=torch.float32)
    score = dot_score(q, k)
    scaled = replace(score, raw_query=q * 3), replace(score, raw_key=k * 3)
    for changed in (*scaled, replace(score, make_features=lambda: (3 * score.query, score.key))):
        product = changed.query @ changed.key.mT
        got, _ = attention(changed, v, backend="sdpa")
        assert_close(got, product.softmax(-1) @ v, 1e-5, "output")


def low_rank(n, m, gate=None, scale=1.0):
    """A piece of rank 2 with a number a row, as dense logits and as columns."""
    left, right, row = (
        tensor(*shape, seed=s) * scale
        for s, shape in enumerate([(1, 4, n, 2), (1, 1, m, 2), (1, 4, n)])
    )
    return ScoreTerm(
        DOT,
        lambda: left @ right.mT + row[..., None],
        gate=gate,
        low_rank_factors=lambda: (left, right, row),
    )


@pytest.mark.parametrize("n", [5, N])
@pytest.mark.parametrize("gate", [None, [1.0, 0.5, -2.0, 0.0]])
@pytest.mark.parametrize("terms", [1, 2])
def test_columns_are_added_to_the_product(n, gate, terms):
    q, k, v = qkv(2, 4, 2, n, M, d=6, dv=11)
    gate = None if gate is None else torch.tensor(gate, dtype=torch.float64)
    score = dot_score(q, k, 0.4)
    for _ in range(terms):
        score = score.plus(low_rank(n, M, gate))
    exact, _ = attention(score, v, Options(is_causal=True), backend="reference")
    assert_close(
        attention(score, v, Options(is_causal=True), backend="sdpa")[0], exact, 1e-12, "output"
    )


@pytest.mark.parametrize("dtype", MEETINGS)
@pytest.mark.parametrize("size", [1e-2, 1.0, 60.0])
def test_terms_add_up_to_the_columns(dtype, size):
    """Products of the parts keep 20 bits and more of what 8 or 11 bits would round."""
    piece = low_rank(N, M, scale=size)
    left, right = make_columns(piece, 0.125, dtype, with_row=True)
    assert left.dtype == right.dtype == dtype and left.shape[-1] == right.shape[-1] <= 18
    got = left.double() @ right.double().mT * 0.125
    assert_close(got, piece.definition(), 4e-6 * max(1.0, size**2), "logits")


HINDRANCES = {
    "softcap": Options(softcap=2.0),
    "sinks": Options(sinks=torch.zeros(4)),
    "a bias of many queries": Options(bias=torch.zeros(1, 4, N, M)),
    "a mask that learns": Options(mask=torch.zeros(N, M, requires_grad=True)),
    "a window without a mask": Options(is_causal=True, window=4),
}


@pytest.mark.parametrize("what", HINDRANCES)
def test_what_it_cannot_do_is_refused_and_auto_goes_elsewhere(what):
    q, k, v = qkv(1, 4, lq=N, lk=M, d=6)
    score = dot_score(q, k)
    assert unsupported_reason(score, v, HINDRANCES[what]) and not supports(
        score, v, HINDRANCES[what]
    )
    with pytest.raises(
        ValueError, match="backend='sdpa' cannot compute this call: .*; use backend='auto'"
    ) as caught:
        attention(score, v, HINDRANCES[what], backend="sdpa")
    assert "\n" not in str(caught.value)
    exact, _ = attention(score, v, HINDRANCES[what], backend="reference")
    assert_close(attention(score, v, HINDRANCES[what])[0], exact, 1e-12, "auto")


def test_auto_takes_it_for_dot_products_alone():
    q, k, v = qkv(1, 4, lq=100, d=6)
    score, plain = dot_score(q, k), Options(is_causal=True)
    assert choose_engine(score, v, plain, weights=False) == "sdpa"
    assert choose_engine(score, v, plain, weights=True) == "reference"
    assert (
        choose_engine(score, v, Options(dropout_p=0.5), weights=False) == "blockwise"
    )  # there it stores all pairs
    assert choose_engine(score.weighted(torch.ones(4)), v, plain, weights=False) == "blockwise"
    assert (
        choose_engine(
            score.plus(ScoreTerm(DOT, lambda: score.query @ score.key.mT)), v, plain, weights=False
        )
        == "blockwise"
    )
    few = dot_score(q[:, :, :3], k[:, :, :3])
    assert choose_engine(few, v[:, :, :3], plain, weights=False) == "reference"


def test_nothing_visible_and_no_keys():
    q, k, v = (t.requires_grad_() for t in qkv(1, 4, lq=N, d=6))
    out, _ = attention(
        dot_score(q, k), v, Options(mask=torch.zeros(N, N, dtype=torch.bool)), backend="sdpa"
    )
    assert not out.any() and not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    out, _ = attention(dot_score(q, k[:, :, :0]), v[:, :, :0])
    assert out.shape == q.shape and not out.any()


@pytest.mark.parametrize("dtype", MEETINGS)
def test_a_mask_of_numbers_is_told_from_one_that_hides(dtype):
    """Off the CPU kernels add masks in half precision: 4097 logits become 4096, or as much as 4112."""
    hides = torch.tensor([0.0, -torch.inf, torch.finfo(dtype).min], dtype=dtype).float()
    assert (
        not is_rounded(None, dtype)
        and not is_rounded(hides == 0, dtype)
        and not is_rounded(hides, dtype)
    )
    assert is_rounded(torch.tensor([0.0, -4097.0]), dtype)
