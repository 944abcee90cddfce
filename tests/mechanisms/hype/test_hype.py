"""`hype_bias` and `hype_attention` against mpmath and float64 loops: values, sign, limits, positions."""

import math

import pytest
import torch

from hf_hyperattn.functional import hype_attention, hype_bias
from hf_hyperattn.mechanisms.hype.config import alibi_slopes
from tests.mechanisms.hype.hype_cases import LONG, every_dtype, every_form, every_way, per_head
from tests.oracles import hype as loops
from tests.oracles.cases import BACKENDS, DTYPES, TOLERANCE, assert_close, qkv

# The bias itself.


@every_form
@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_the_bias_is_that_of_forty_digits(form, dtype, rtol):
    """Equal places, neighbours, both directions, far ends; gentle and steep heads. Rounding an argument of 8.2 moves
    the sinh by 8.2 times as much, 5e-7, and some is lost beside that.
    """
    places = torch.tensor([0, 1, 2, 3, 7, 100, 1000, 4095, 8191]).to(dtype)
    mu = torch.tensor([1 / 8192, 1e-9, 1 / 3000, 1e-3], dtype=dtype)
    tau = torch.tensor([8192.0, 5e8, 40.0, 0.25], dtype=dtype)
    got = hype_bias(places, places, mu=mu, tau=tau, form=form)
    exact = torch.from_numpy(loops.biases([places], [places], mu, tau, form))
    error = (got.double() - exact).abs() / exact.abs().clamp_min(1.0)
    assert got.dtype == dtype and got.shape == (1, 4, 9, 9)
    assert error.max() <= rtol


def test_the_past_is_penalised_by_sinh_and_both_sides_by_cosh():
    """A secondary source prints sinh with the opposite sign: the past would then be rewarded, and this fails."""
    i, j = torch.tensor([10]), torch.arange(21)
    sinh = hype_bias(i, j, mu=0.1, tau=2.0, form="sinh")[0, 0, 0]
    cosh = hype_bias(i, j, mu=0.1, tau=2.0, form="cosh")[0, 0, 0]
    assert sinh[10] == 0 and cosh[10] == 0
    assert (sinh[:10] < 0).all() and (sinh.diff() > 0).all()
    assert (cosh[:10] < 0).all() and (cosh[11:] < 0).all()
    torch.testing.assert_close(
        cosh, cosh.flip(0)
    )  # a vector's last entries are computed by other instructions
    assert sinh[0].item() == pytest.approx(-2 * math.sinh(1.0), rel=1e-6)


@every_way
def test_the_nearest_key_gets_the_most_weight(backend):
    """With equal dot products the bias decides alone."""
    zeros = torch.zeros(1, 1, LONG, 4)
    value = torch.eye(LONG)[None, None]
    weights = hype_attention(
        zeros, zeros, value, is_causal=True, mu=0.05, tau=6.0, backend=backend
    )[0, 0]
    for row in range(2, LONG):
        assert (weights[row, : row + 1].diff() > 0).all()


def test_alibi_is_the_first_order():
    """At mu = 1/L the deviation from slope·distance is 1 % at L/4 and 17.5 % at L."""
    length, slope = 4096, 0.25
    bias = hype_bias(
        torch.tensor([length], dtype=torch.float64),
        torch.tensor([length - 1, length - length // 4, 0]),
        mu=1 / length,
        tau=slope * length,
        form="sinh",
    ).flatten()
    ratio = bias / (-slope * torch.tensor([1.0, length / 4, length], dtype=torch.float64))
    assert ratio[0].item() == pytest.approx(1, abs=1e-7)
    assert ratio[1].item() == pytest.approx(1.0105, abs=2e-4)
    assert ratio[2].item() == pytest.approx(1.1752, abs=2e-4)


def test_slopes_for_any_number_of_heads():
    assert alibi_slopes(8) == tuple(2.0**-h for h in range(1, 9))
    for heads in (1, 3, 9, 12, 25):
        slopes = alibi_slopes(heads)
        assert len(slopes) == heads and slopes[-1] == 2**-8
        ratios = [b / a for a, b in zip(slopes, slopes[1:], strict=False)]
        assert all(r == pytest.approx(2 ** (-8 / heads)) for r in ratios)


# Attention.


@every_way
@every_form
@pytest.mark.parametrize("lq, lk", [(6, 8), (LONG, 23), (23, LONG)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_output_is_the_definition(backend, form, lq, lk, causal):
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, lq=lq, lk=lk, d=3, dv=5)
    mu, tau = per_head(4)
    expected = loops.attention(q, k, v, None, causal, mu=mu, tau=tau, form=form)
    got = hype_attention(
        q, k, v, is_causal=causal, enable_gqa=True, mu=mu, tau=tau, form=form, backend=backend
    )
    assert_close(got, expected, 1e-9, "output")


@every_way
@every_form
@every_dtype
def test_output_in_every_dtype(backend, form, dtype, lq=40):
    dtype = DTYPES[dtype]
    q, k, v = qkv(batch=1, heads=2, lq=lq, lk=40, d=16, dtype=dtype, seed=5)
    mu, tau = torch.tensor([1 / 40, 1 / 300]), torch.tensor([40.0, 3.0])
    got = hype_attention(q, k, v, mu=mu, tau=tau, form=form, backend=backend)
    assert got.dtype == dtype
    expected = loops.attention(*(t.double() for t in (q, k, v)), mu=mu, tau=tau, form=form)
    assert_close(got, expected, TOLERANCE[dtype], "output")


@every_way
@every_form
def test_positions_are_the_callers(backend, form):
    """Integers or not, per batch row or for all, out of order, and far from zero: only differences matter."""
    q, k, v = qkv(batch=2, heads=2, lq=LONG, lk=21, d=4)
    at = torch.randperm(60)[:LONG], torch.stack([torch.randperm(60)[:21], torch.arange(21) * 2 + 5])
    setting = dict(mu=torch.tensor([0.03, 0.01]), tau=torch.tensor([4.0, 9.0]), form=form)
    expected = loops.attention(
        q, k, v, query_positions=at[0].numpy(), key_positions=at[1].numpy(), **setting
    )
    for shift in (0, 10**15, 0.5):
        got = hype_attention(
            q,
            k,
            v,
            query_positions=at[0] + shift,
            key_positions=at[1] + shift,
            backend=backend,
            **setting,
        )
        assert_close(got, expected, 1e-9 if shift != 0.5 else 1e-7, f"shift {shift}")


@every_way
def test_tau_zero_is_plain_attention(backend):
    q, k, v = qkv(lq=LONG, d=8)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close(
        hype_attention(q, k, v, is_causal=True, mu=0.1, tau=0.0, backend=backend), plain, 1e-12
    )


@every_way
def test_scale_is_of_the_dot_product_alone(backend):
    q, k, v = qkv(lq=LONG, d=4)
    got = hype_attention(q, k, v, scale=0.3, mu=0.1, tau=3.0, backend=backend)
    assert_close(got, hype_attention(q * 0.6, k, v, mu=0.1, tau=3.0, backend="reference"), 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@every_form
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("mu, tau", [(30.0, 1e4), (1e3, 1e10), (1e-30, 1e30)])
def test_extreme_heads_stay_finite(backend, form, dtype, mu, tau):
    q, k, v = (t.requires_grad_() for t in qkv(lq=LONG, d=4, dtype=DTYPES[dtype]))
    mu, tau = torch.tensor(mu, requires_grad=True), torch.tensor(tau, requires_grad=True)
    out = hype_attention(q, k, v, is_causal=True, mu=mu, tau=tau, form=form, backend=backend)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v, mu, tau))
    assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
    auto = hype_attention(q, k, v, is_causal=True, mu=mu, tau=tau, form=form)
    assert_close(auto, out, 1e-3, "auto")


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_dropout_keeps_the_expectation(backend):
    q, k, v = qkv(batch=1, heads=1, lq=200, d=4, dtype=torch.float32)
    plain = hype_attention(q, k, v, mu=0.01, tau=1.0, backend=backend)
    dropped = hype_attention(q, k, v, dropout_p=0.3, mu=0.01, tau=1.0, backend=backend)
    assert not torch.equal(plain, dropped)
    assert (dropped - plain).mean().abs() < 5e-3
