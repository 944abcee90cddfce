"""HyPE at length 8192 by each way of computing it, within the bounds that its definition promises; and its memory.

Evaluated, the bias is within 5e-7 · max(1, |bias|). As columns, at slopes up to 1 a token, it is within 2e-3 (sinh)
and 4e-3 (cosh) in float32, and within 5e-3 and 1e-2 in half precision. Where nothing is learned the columns leave out
one number a row, which softmax does not see; in float32 the test looks at both.
"""

import pytest
import torch

from hf_hyperattn.engines import TERMS, dot_score
from hf_hyperattn.engines.sdpa import append_terms
from hf_hyperattn.functional import hype_attention, hype_bias
from hf_hyperattn.mechanisms.hype.columns import are_sums_exact
from hf_hyperattn.mechanisms.hype.score import with_hype
from tests.oracles import hype as loops
from tests.oracles.cases import assert_close, assert_gradients
from tests.test_functional_memory import allocations

LENGTH = 8192
ROWS = torch.tensor([0, 1, 31, 32, 500, 2047, 4095, 4096, 4097, 6000, 8000, 8160, 8190, 8191])
STRETCH = {"sinh": 1.0, "cosh": 2.0}  # tau over slope · length
COLUMNS = {
    ("sinh", torch.float32): 4e-3,
    ("cosh", torch.float32): 8e-3,
    ("sinh", torch.bfloat16): 5e-3,
    ("cosh", torch.bfloat16): 1e-2,
    ("sinh", torch.float16): 5e-3,
    ("cosh", torch.float16): 1e-2,
}
every_form = pytest.mark.parametrize("form", ["sinh", "cosh"])


def numbers(form, slopes=(1.0, 0.25)):
    """(mu, tau) of heads with these slopes, float32."""
    return torch.full((len(slopes),), 1 / LENGTH), torch.tensor(slopes) * LENGTH * STRETCH[form]


def exact(form, mu, tau):
    """[H, rows, LENGTH] in float64."""
    x = mu.double()[:, None, None] * (torch.arange(LENGTH) - ROWS[:, None]).double()
    value = x.sinh() if form == "sinh" else -2 * (x / 2).sinh() ** 2
    return tau.double()[:, None, None] * value


def within(got, expected, form):
    """The largest error where the pair is visible, and as a part of max(1, |bias|)."""
    seen = (
        torch.arange(LENGTH) <= ROWS[:, None]
        if form == "sinh"
        else torch.ones(1, 1, dtype=torch.bool)
    )
    error = (got.double() - expected).abs() * seen
    return error.max().item(), (error / expected.abs().clamp_min(1.0)).max().item()


@every_form
def test_the_expectation_of_this_page(form):
    """Its float64 formula against 40 digits."""
    mu, tau = numbers(form)
    expected = exact(form, mu, tau)
    for row, column in ((0, 8191), (5, 4096), (9, 5999), (13, 0), (13, 8190), (7, 4096)):
        one = loops.bias(ROWS[row], column, mu[0], tau[0], form)
        assert expected[0, row, column].item() == pytest.approx(one, rel=1e-13, abs=1e-13)


@every_form
def test_the_definition_in_float32(form):
    mu, tau = numbers(form)
    got = hype_bias(ROWS, torch.arange(LENGTH), mu=mu, tau=tau, form=form)[0]
    assert got.dtype == torch.float32
    assert within(got, exact(form, mu, tau), form)[1] <= 5e-7


@every_form
def test_the_engines_tile_in_float32(form):
    mu, tau = numbers(form)
    row, column = ROWS.float()[None, :, None], torch.arange(LENGTH).float()[None, None]
    head = [t[:, None, None] for t in (mu, tau)]
    term = TERMS[f"hype_{form}"]
    dot = torch.zeros(2, len(ROWS), LENGTH)
    expected = exact(form, mu, tau)
    for got in (term.logits(dot, [row], [column], head), term.vjp(dot, [row], [column], head)[0]):
        assert within(got, expected, form)[1] <= 5e-7


@every_form
@pytest.mark.parametrize(
    "dtype, learned",
    [
        (torch.float32, True),
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float16, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dotted", [False, True], ids=["alone", "beside a dot product"])
def test_columns(form, dtype, dotted, learned):
    """The very Q and K that the kernel gets, multiplied in float32 as it does."""
    mu, tau = (t.requires_grad_(learned) for t in numbers(form))
    q, k = (torch.randn(1, 2, LENGTH, 64).to(dtype) * dotted for _ in range(2))
    score = dot_score(q, k)
    places = torch.arange(LENGTH)[None, None]
    score = with_hype(score, (places, places), mu, tau, form, reach=LENGTH)
    wide_q, wide_k, _ = append_terms(q, k, k, 0.125, score.terms[1:])
    assert wide_q.dtype == dtype and wide_q.shape[-1] == wide_k.shape[-1] <= 80
    logits = (wide_q[0, :, ROWS].float() @ wide_k[0].float().mT) * 0.125
    bias = logits.double() - q[0, :, ROWS].double() @ k[0].double().mT * 0.125
    expected = exact(form, mu, tau)
    if not learned:
        bias = bias - bias.gather(
            -1, ROWS[None, :, None].expand(2, -1, 1)
        )  # the diagonal, where the bias is 0
    assert within(bias, expected, form)[0] <= COLUMNS[form, dtype]


def test_plain_half_precision_columns_would_lose_the_bias():
    """What the split is for: the same columns rounded once are off by many logits."""
    mu, tau = numbers("sinh")
    places = torch.arange(LENGTH)[None, None]
    score = with_hype(
        dot_score(torch.zeros(1, 2, LENGTH, 2), torch.zeros(1, 2, LENGTH, 2)),
        (places, places),
        mu,
        tau,
        "sinh",
        reach=LENGTH,
    )
    left, right, row = (t.to(torch.bfloat16).double() for t in score.terms[1].low_rank_factors())
    got = left[:, :, ROWS] @ right.mT + row[:, :, ROWS, None]
    assert within(got[0], exact("sinh", mu, tau), "sinh")[0] > 10


@every_form
def test_columns_are_offered_where_they_are_exact_enough(form):
    def offered(slope, length, made_for=LENGTH):
        mu, tau = torch.tensor([1 / made_for]), torch.tensor([slope * made_for * STRETCH[form]])
        return are_sums_exact(mu, tau, length, form)

    assert offered(1.0, 8192) and offered(0.5, 16384, 16384) and offered(0.25, 32768, 32768)
    assert offered(1.0, 8192, made_for=131072)
    assert (
        not offered(4.0, 8192) and not offered(1.0, 10 * LENGTH) and not offered(1.0, 1000 * LENGTH)
    )
    assert not are_sums_exact(torch.tensor([1e30]), torch.tensor([1.0]), 8192.0, form)


@every_form
def test_a_gate_counts_as_a_part_of_the_bias(form):
    """With weight 64 a sum of columns would be off by 0.06 where 2e-3 is allowed."""
    places = torch.arange(LENGTH)[None, None]
    q = torch.zeros(1, 2, LENGTH, 4)

    def offered(gate):
        mu, tau = numbers(form)
        gate = torch.tensor([gate, 0.0])
        score = with_hype(dot_score(q, q), (places, places), mu, tau, form, reach=LENGTH, gate=gate)
        return score.terms[1].low_rank_factors is not None

    assert offered(1.0) and offered(-1.0) and not offered(64.0) and not offered(-64.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_columns_of_a_long_range_stay_in_range(dtype):
    """tau = 1e7 at mu = 1e-7 is a slope of 1 a token; its factor alone is beyond float16."""
    q, k, v = (torch.randn(1, 2, 200, 32, dtype=torch.float64).to(dtype) for _ in range(3))
    outs = [
        hype_attention(
            q.to(t), k.to(t), v.to(t), is_causal=True, mu=1e-7, tau=1e7, scale=0.01, backend=backend
        )
        for t, backend in ((dtype, "sdpa"), (torch.float64, "reference"))
    ]
    assert (outs[0].double() - outs[1]).abs().max() <= 2e-2


@every_form
@pytest.mark.parametrize("way, tolerance", [("blockwise", 2e-5), ("sdpa", 5e-3), ("auto", 5e-3)])
def test_attention_at_full_length(form, way, tolerance):
    """Outputs of sampled rows against float64, one head as steep as they come and one that sees far."""
    mu, tau = numbers(form, slopes=(1.0, 2.0**-8))
    q, k, v = (torch.randn(1, 2, LENGTH, 16) for _ in range(3))
    rows = ROWS if way != "blockwise" else ROWS[-2:]
    got = hype_attention(
        q if way != "blockwise" else q[:, :, rows],
        k,
        v,
        None if way != "blockwise" else (torch.arange(LENGTH) <= rows[:, None]) | (form == "cosh"),
        is_causal=form == "sinh" and way != "blockwise",
        mu=mu,
        tau=tau,
        form=form,
        backend=way,
        query_positions=None if way != "blockwise" else rows,
    )
    got = got[:, :, rows] if way != "blockwise" else got
    logits = (
        q[0, :, rows].double() @ k[0].double().mT * 0.25 + exact(form, mu, tau)[:, -len(rows) :]
    )
    if form == "sinh":
        logits = logits.masked_fill(torch.arange(LENGTH) > rows[:, None], -torch.inf)
    assert_close(got[0], logits.softmax(-1) @ v[0].double(), tolerance, "output")


SHORT = 4096
SQUARE = SHORT * SHORT * 4


@pytest.mark.parametrize("form", ["sinh", "cosh"])
def test_products_from_an_anchor_are_within_their_bound(form):
    """Where the margins allow it: pairs near the anchor and as far away as positions go, for slopes of all sizes."""
    term, seen = TERMS[f"hype_{form}"], 0
    near = torch.arange(-64, 65) * 0.5
    far = torch.cat([torch.arange(-300, 300) * 0.5, torch.randint(-200_000, 200_000, (500,))])
    for mu in (1e-4, 1 / LENGTH, 1e-3, 1 / 512, 0.01, 1 / 32, 0.1, 0.5, 1.0):
        for tau in (1e-3, 0.1, 1.0, 8.0, 64.0, 512.0, 8192.0):
            head = torch.tensor(mu), torch.tensor(tau)
            x = near[term.split_margins(near, head)[0] >= 0][:, None]
            y = far[term.split_margins(far, head)[1] >= 0][None]
            numbers = zip(term.split_row(x, head), term.split_column(y, head), strict=True)
            found = sum(a * b for a, b in numbers).double()
            angle = (y.double() - x.double()) * head[0].double()
            unit = angle.sinh() if form == "sinh" else 1 - angle.cosh()
            expected = head[1].double() * unit
            # Beyond it float32 ends.
            ordinary = expected.abs() < 1e30
            error = (found - expected).abs() / expected.abs().clamp_min(1)
            assert (error[ordinary] <= 1e-5).all(), (mu, tau, error[ordinary].max())
            seen += int(ordinary.sum())
    assert seen > 100_000


@pytest.mark.parametrize("way", ["blockwise", "sdpa", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_matrix_of_all_pairs(way, dtype):
    """Two heads: together under a quarter of one head's matrix, forward and backward."""
    learned = dtype == torch.float32  # half precision columns are for numbers that do not learn
    mu, tau = (t.requires_grad_(learned) for t in numbers("sinh"))
    q, k, v = (torch.randn(1, 2, SHORT, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    leaves = [q, k, v, mu, tau] if learned else [q, k, v]

    def forward():
        return hype_attention(q, k, v, is_causal=True, mu=mu, tau=tau, backend=way)

    out, largest, peak = allocations(forward)
    assert largest < SQUARE / 16 and peak < SQUARE / 4, (
        f"forward: largest {largest}, peak {peak} bytes"
    )
    grads, largest, peak = allocations(lambda: torch.autograd.grad(out.sum(), leaves))
    assert largest < SQUARE / 16 and peak < SQUARE / 4, (
        f"backward: largest {largest}, peak {peak} bytes"
    )
    assert all(g.isfinite().all() for g in grads)


def test_gradients_of_mu_and_tau_by_columns_at_full_length():
    """Sums of 8192 small differences of large numbers: the two ways agree to a percent of the largest entry."""
    q, k, v = (torch.randn(1, 2, LENGTH, 8) for _ in range(3))
    weight = torch.randn(1, 2, LENGTH, 8)

    def grads(backend, dtype):
        mu, tau = (
            t.to(dtype).clone().requires_grad_() for t in numbers("sinh", slopes=(1.0, 2.0**-6))
        )
        out = hype_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), is_causal=True, mu=mu, tau=tau, backend=backend
        )
        return torch.autograd.grad((out * weight.to(dtype)).sum(), (mu, tau))

    assert_gradients(
        grads("sdpa", torch.float32), grads("sdpa", torch.float64), 1e-2, ("mu", "tau")
    )
