"""The Triton kernels against the specification in float64: every score, every option, outputs and gradients.

Without a GPU the kernels run in Triton's interpreter, which has to be on before Triton is imported; for that,
test_triton_modes.py starts a process. `pytest -m gpu` runs the same tests compiled.
"""

import os
from functools import partial

import pytest
import torch

import hf_hyperattn as ha
from hf_hyperattn.engines import Options, PairScore, ScoreTerm, Term, attention, dot_score
from hf_hyperattn.engines.score import TERMS
from hf_hyperattn.mechanisms.hype.score import with_hype
from hf_hyperattn.mechanisms.pair_score import PairSpace
from tests.engines.test_trace import DIVIDED, EVERY, SAFE, every_inputs, every_score, outcome
from tests.engines.test_trace import check as compare
from tests.engines.triton_scores import SCALE, SCORES, exact, learned
from tests.integration.attention import toy_score
from tests.oracles.cases import assert_close, assert_gradients, tensor
from tests.registries import restored

pytest.importorskip("triton", reason="needs Triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            not INTERPRETED, reason="runs with TRITON_INTERPRET=1, see test_triton_modes.py"
        ),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
NAMES = ["query", "key", "value"]
devices = pytest.mark.parametrize("device", DEVICES)
#: Errors: of outputs, and of gradients relative to their largest entry.
ATOL = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
RTOL = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
#: Gradients smaller than this count as this large: sums of what cancels, of the numbers per head above all.
FLOOR = {torch.float32: 0.5, torch.float16: 2.0, torch.bfloat16: 2.0}
slow, pytestmark = pytest.mark.slow, pytest.mark.extras


@pytest.fixture(autouse=True)
def untuned(monkeypatch):
    """On a GPU every kernel is compiled once, not for each of its tile sizes; test_triton_gpu.py tries those."""
    monkeypatch.setenv("HF_HYPERATTN_TRITON_TUNE", "0")


def inputs(
    device,
    batch=1,
    heads=2,
    kv_heads=None,
    n=36,
    m=40,
    d=16,
    dv=None,
    dtype=torch.float32,
    scale=1.5,
):
    """Leaves that want gradients, on the device."""
    kv_heads, dv = kv_heads or heads, dv or d
    shapes = (batch, heads, n, d), (batch, kv_heads, m, d), (batch, kv_heads, m, dv)
    made = (tensor(*s, seed=seed, scale=scale) for seed, s in enumerate(shapes))
    return [t.to(device, dtype).requires_grad_() for t in made]


def check(score, q, k, v, options=None, tolerance=1.0):
    """Outputs and all gradients against the dense definition in float64."""
    options = options or Options()
    t = learned(q.shape[1], device=q.device)
    got, _ = attention(score(q, k, t), v, options, backend="triton")
    leaves = [q, k, v, *t.values()]
    double = exact(q, k, v, t)
    extras = [options.sinks] if options.sinks is not None else []
    expected, _ = attention(score(*double[:2], double[3]), double[2], options, backend="reference")
    assert got.dtype == torch.float32
    assert_close(got, expected, ATOL[q.dtype] * tolerance, "output")
    weight = tensor(*got.shape, seed=9).to(q.device)
    ask = lambda out, of: torch.autograd.grad((out.double() * weight).sum(), of, allow_unused=True)
    found = ask(got, leaves + extras)
    wanted = ask(expected, [*double[:3], *double[3].values(), *extras])
    for name, ours, theirs in zip([*NAMES, *t, "sinks"], found, wanted):
        if theirs is not None:
            atol = RTOL[q.dtype] * tolerance * max(float(theirs.abs().max()), FLOOR[q.dtype])
            assert_close(ours, theirs, atol, f"gradient of {name}")


def some(cases, quick):
    """The cases, those that are not among the quick ones marked as slow: an interpreter takes its time."""
    return [case if case in quick else pytest.param(case, marks=slow) for case in cases]


@devices
@pytest.mark.parametrize("causal", [pytest.param(False, marks=slow), True], ids=["full", "causal"])
@pytest.mark.parametrize("name", SCORES)
def test_every_score(device, name, causal):
    q, k, v = inputs(device)
    check(SCORES[name], q, k, v, Options(is_causal=causal))


@devices
@pytest.mark.parametrize("dtype", some([torch.bfloat16, torch.float16], [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("name", some(SCORES, ["umbral", "geodesic_blend"]))
def test_half_precision(device, name, dtype):
    q, k, v = inputs(device, heads=4, kv_heads=2, n=33, m=40, dtype=dtype, scale=1.0)
    check(SCORES[name], q, k, v, Options(is_causal=True))


@devices
@pytest.mark.parametrize(
    "widths",
    some([(24, 40), (40, 24), (64, 64), (80, 16), (96, 128), (256, 24)], [(24, 40)]),
    ids=str,
)
def test_head_dimensions(device, widths):
    d, dv = widths
    q, k, v = inputs(device, heads=1, n=20, m=36, d=d, dv=dv, scale=0.7)
    check(SCORES["umbral"], q, k, v)


@devices
@pytest.mark.parametrize("name", some(["umbral", "penumbral_blend", "geodesic", "hype_cosh"], []))
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_shared_keys(device, name, kv_heads):
    q, k, v = inputs(device, batch=2, heads=4, kv_heads=kv_heads, n=20, m=36)
    check(SCORES[name], q, k, v)


OPTIONS = {
    "offset": lambda d: Options(is_causal=True, offset=4),
    "behind": lambda d: Options(is_causal=True, offset=-10),
    "window": lambda d: Options(window=11, offset=5),
    "causal window": lambda d: Options(is_causal=True, window=9, offset=4),
    "narrow window": lambda d: Options(is_causal=True, window=1),
    "softcap": lambda d: Options(softcap=0.8),
    "sinks": lambda d: Options(
        sinks=torch.tensor([0.5, -40.0], device=d).requires_grad_(), is_causal=True, offset=-10
    ),
    "bool mask": lambda d: Options(mask=some_rows_see_nothing(d)),
    "mask of keys": lambda d: Options(
        mask=(torch.arange(40, device=d) % 3 > 0)[None, None, None], is_causal=True
    ),
    "additive mask": lambda d: Options(mask=lowest(d), is_causal=True),
    "bias": lambda d: Options(
        bias=tensor(1, 2, 36, 40, scale=2.0).to(d), mask=some_rows_see_nothing(d), softcap=3.0
    ),
    "shared bias": lambda d: Options(bias=tensor(40, seed=3).to(d)),
}


def some_rows_see_nothing(device):
    mask = tensor(1, 2, 36, 40, seed=5) > 0.2
    mask[:, 0, 3], mask[:, :, 33:] = False, False
    return mask.to(device)


def lowest(device):
    """An additive mask as Transformers makes them: the smallest number, not -inf, and some rows have no other."""
    mask = torch.zeros(1, 1, 36, 40)
    mask[..., 34:], mask[:, :, 7] = torch.finfo(torch.float32).min, float("-inf")
    return mask.to(device)


@devices
@pytest.mark.parametrize(
    "name", some(["umbral_blend", "umbral", "geodesic_blend"], ["umbral_blend"])
)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(device, option, name):
    q, k, v = inputs(device)
    check(SCORES[name], q, k, v, OPTIONS[option](device))


@devices
@pytest.mark.parametrize("number", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("n, m", [(3, 7), (1, 600)], ids=["rows", "parts"])
def test_gradients_of_a_row_of_large_numbers(device, number, n, m):
    """A bias leaves every key the same weight, and the weights add up to 1 in gradients too; a mask hides the row."""
    q, k, v = inputs(device, n=n, m=m)
    added = torch.zeros(1, 1, n, m, device=device).index_fill(
        2, torch.tensor([0], device=device), number
    )
    for options, weight in ((Options(bias=added), 1 / m), (Options(mask=added), 0.0)):
        out, _ = attention(
            SCORES["umbral"](q, k, learned(2, device=device)), v, options, backend="triton"
        )
        by_key = torch.autograd.grad(out[:, :, 0].sum(), v)[0]
        assert_close(by_key, torch.full_like(by_key, weight), 1e-6, "gradient of the values")


@devices
def test_more_numbers_a_line_than_one_tile_takes(device, monkeypatch):
    """Statistics read number by number."""
    from hf_hyperattn.engines.triton import launch

    assert [launch.choose_pack(count, 64, 8) for count in (1, 5, 16, 17)] == [4, 8, 16, 1]
    monkeypatch.setattr(launch, "choose_pack", lambda *_: 1)
    q, k, v = inputs(device, n=20)
    check(SCORES["umbral_with_hype"], q, k, v, Options(is_causal=True))


@devices
def test_a_curvature_in_half_precision(device):
    """Its gradient goes through statistics of rows and of keys, which are large and cancel: off by 3 % of the largest,
    were it not that what rounding leaves of a row's gradients is taken off all of them.
    """
    q, k, v = inputs(
        device, heads=2, kv_heads=1, n=64, m=96, d=128, dtype=torch.bfloat16, scale=1.0
    )
    numbers, options = learned(2, device=device), Options(is_causal=True, offset=32)
    weight = tensor(1, 2, 64, 128, seed=9).to(device)

    def gradient(q, k, v, t, backend):
        out, _ = attention(SCORES["squared_lorentz"](q, k, t), v, options, backend=backend)
        return torch.autograd.grad((out.double() * weight).sum(), t["gamma"])[0]

    expected = gradient(*exact(q, k, v, numbers), "reference")
    assert_close(
        gradient(q, k, v, numbers, "triton"),
        expected,
        0.01 * float(expected.abs().max()),
        "gradient",
    )


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("width", [24, 23])
def test_norms(device, width, root, dtype):
    """Of rows that lie apart, one of them 0, and their gradients."""
    from hf_hyperattn.engines.triton import norms

    x = tensor(2, 50, 3, 24, scale=3.0).to(device, dtype).transpose(1, 2)
    x[0, 1, 2] = 0
    grad = tensor(2, 3, 50, seed=1, dtype=torch.float32).to(device)
    exact = x.detach().double().requires_grad_()
    first = exact[..., :width]
    expected = torch.linalg.vector_norm(first, dim=-1) if root else first.square().sum(-1)
    out, to = (
        torch.full_like(grad, torch.nan),
        torch.full_like(x, torch.nan, memory_format=torch.contiguous_format),
    )
    norms.write_norms(x, width, root, out)
    norms.write_gradient(grad, x, out, width, root, to)
    assert_close(out, expected, 1e-5 * float(expected.max()), "norms")
    (wanted,) = torch.autograd.grad(expected, exact, grad.double())
    assert_close(to, wanted, ATOL[dtype] * float(wanted.abs().max()), "gradient")


@devices
def test_strided_inputs(device):
    """As a host hands them over: [batch, length, heads, d] transposed, and a key whose numbers are not side by side."""
    q, k, v = inputs(device, batch=2, n=20, m=20)
    turn = lambda t: t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    aside = k.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    check(SCORES["umbral_blend"], turn(q), aside, turn(v), Options(is_causal=True))


@devices
@pytest.mark.parametrize(
    "name", some(["umbral", "umbral_blend", "geodesic", "hype_sinh"], ["umbral"])
)
@pytest.mark.parametrize("n, offset", [pytest.param(1, 1099, marks=slow), (3, 1090)])
def test_few_queries_against_many_keys(device, name, n, offset):
    """Decoding: rows of a group together, keys in parts."""
    q, k, v = inputs(device, batch=2, heads=4, kv_heads=2, n=n, m=1100, scale=0.5)
    mask = torch.ones(2, 1, 1, 1100, dtype=torch.bool, device=device)
    mask[1, ..., :300] = False
    options = Options(is_causal=True, offset=offset, mask=mask)
    t = learned(4, device=device)
    t["radius"] = t["radius"].detach()
    if name == "umbral":
        options = Options(
            is_causal=True, offset=offset, mask=mask, sinks=torch.zeros(4, device=device)
        )
    got, _ = attention(SCORES[name](q, k, t), v, options, backend="triton")
    q, k, v, t = exact(q, k, v, t)
    expected, _ = attention(SCORES[name](q, k, t), v, options, backend="reference")
    assert_close(got, expected, 1e-5, "output")


CONES = [name for name in SCORES if "umbral" in name and "hype" not in name]


@devices
@pytest.mark.parametrize(
    "last", [0.0, pytest.param(-8.0, marks=slow), pytest.param(20.0, marks=slow)]
)
@pytest.mark.parametrize("name", some(CONES, ["umbral", "penumbral_unsquared_blend"]))
def test_ties(device, name, last):
    """Queries equal to keys, D = 0 and equal heights: logits and gradients as good as elsewhere, since a distance below
    the noise of its product form is one of 0. Heights (of the last coordinate) low, and near the radius.
    """
    q, k, v = inputs(device, n=40, m=40)
    q = (q.detach() + last * (torch.arange(16, device=device) == 15)).requires_grad_()
    k = q.detach().clone().requires_grad_()
    check(SCORES[name], q, k, v, Options(is_causal=True), tolerance=10.0 if last else 1.0)


@devices
@pytest.mark.parametrize("name", some(["umbral_blend", "penumbral_unsquared", "geodesic"], []))
def test_ties_in_half_precision(device, name):
    """The gradients of a tied pair's products and norms are not rounded alike: none may be there."""
    q, k, v = inputs(device, n=40, m=40, d=64, dtype=torch.bfloat16, scale=1.0)
    check(
        SCORES[name],
        q,
        q.detach().clone().requires_grad_(),
        v,
        Options(is_causal=True),
        tolerance=1.5,
    )


@devices
@pytest.mark.parametrize(
    "name", some(["geodesic", "geodesic_blend", "squared_lorentz"], ["geodesic"])
)
def test_tiles_from_differences(device, name):
    """Near points far out, where the product form has no digit left, and tied ones. A gap of 1e-3 between coordinates
    of 6 has four digits in float32, so that no engine has more of a gradient.
    """
    q, k, v = inputs(device, n=40, m=40, scale=3.0 if "lorentz" in name else 6.0)
    k = (q.detach() + 1e-3 * tensor(*k.shape, seed=4).to(device)).float()
    k[:, :, ::3] = q.detach()[:, :, ::3]
    check(SCORES[name], q, k.requires_grad_(), v, tolerance=20.0)


@devices
@pytest.mark.parametrize("form", some(["sinh", "cosh"], ["sinh"]))
def test_hype_far_beyond_the_polynomial(device, form):
    """Positions up to 800 apart where the polynomial serves 100."""

    def score(q, k, t):
        i, j = 20 * torch.arange(36, device=device), 20 * torch.arange(40, device=device)
        positions = (x.double()[None, None] for x in (i, j))
        return with_hype(
            dot_score(q, k, SCALE), tuple(positions), t["gamma"] / 100, t["radius"] / 50, form, None
        )

    q, k, v = inputs(device)
    check(score, q, k, v, Options(is_causal=form == "sinh"), tolerance=3.0)


POSITIONS = {
    # Slope 1/2 a token, far from 0, as a long prompt has it: all blocks as products.
    "long": (lambda n: 200_000.0 + torch.arange(n), 1 / 8192, 4096.0),
    # Blocks that are too wide for products, after others that are not.
    "a jump": (lambda n: torch.arange(n) + 9000.0 * (torch.arange(n) > n // 2 + 5), 1 / 2048, 30.0),
    # Keys beyond the distance at which the bias is cut.
    "beyond the cut": (lambda n: 1.0 * torch.arange(n) ** 2, 1 / 20, 1e-20),
    "in any order": (lambda n: (torch.arange(n) * 7.0) % n, 1 / 200, 2.0),
}


@devices
@pytest.mark.parametrize("form", ["sinh", "cosh"])
@pytest.mark.parametrize("name", POSITIONS)
def test_hype_at_any_position(device, name, form):
    """As products of a row's and a key's numbers, or pair by pair where these lose digits."""
    make, mu, tau = POSITIONS[name]
    places = make(80).to(device, torch.float64)[None, None]

    def score(q, k, t):
        mus, taus = t["gamma"] * mu, t["radius"] * tau
        positions = (places[..., -q.shape[2] :], places)
        return with_hype(dot_score(q, k, SCALE), positions, mus, taus, form, None, t["gate"] ** 2)

    q, k, v = inputs(device, n=70, m=80)
    check(score, q, k, v, Options(is_causal=form == "sinh", offset=10))


def dropped(device, q, k, t, p, v):
    torch.manual_seed(7)
    return attention(SCORES["umbral"](q, k, t), v, Options(dropout_p=p), backend="triton")[0]


@devices
def test_dropout(device):
    """The kept weights, seen through unit vectors as values, are divided by 1 - p; gradients are those of the same."""
    p, (q, k, v) = 0.3, inputs(device, n=70, m=64)
    t = learned(2, device=device)
    got = dropped(device, q, k, t, p, torch.eye(64, device=device).expand(1, 2, 64, 64))
    double = exact(q, k, v, t)
    weights = attention(
        SCORES["umbral"](*double[:2], double[3]), double[2], backend="auto", weights=True
    )[1]
    kept = (got > weights / 2).double()
    assert abs(kept.mean() - (1 - p)) < 0.02
    assert abs(kept[:, 0].mean() - kept[:, 1].mean()) < 0.05 and (kept[:, 0] != kept[:, 1]).any()
    assert_close(got, weights * kept / (1 - p), 1e-5, "dropped weights")
    out, expected = dropped(device, q, k, t, p, v), (weights * kept / (1 - p)) @ double[2]
    assert_close(out, expected, 1e-5, "output")
    grads, wanted = (
        torch.autograd.grad(o.double().square().sum(), x)
        for o, x in ((out, (q, k, v, t["gamma"])), (expected, (*double[:3], double[3]["gamma"])))
    )
    assert_gradients(grads, wanted, 1e-4, ["query", "key", "value", "gamma"])


@devices
def test_the_same_from_run_to_run(device):
    def run():
        q, k, v = inputs(device, heads=4, kv_heads=2, dtype=torch.bfloat16)
        t = learned(4, device=device)
        out, _ = attention(
            SCORES["umbral_blend"](q, k, t), v, Options(is_causal=True), backend="triton"
        )
        return out, *torch.autograd.grad(out.sum(), [q, k, v, *t.values()])

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@devices
@pytest.mark.parametrize("n, m", [(0, 5), (5, 0)])
def test_nothing_to_attend_to(device, n, m):
    q, k, v = inputs(device, n=n, m=m)
    out, _ = attention(dot_score(q, k, SCALE), v, backend="triton")
    assert out.shape == (1, 2, n, 16) and not out.any()
    assert all(
        g.shape == x.shape and not g.any()
        for g, x in zip(torch.autograd.grad(out.sum(), [q, k, v]), (q, k, v))
    )


@devices
def test_no_more_work_than_wanted(device):
    """Gradients of some inputs only."""
    q, k, v = inputs(device, n=20, m=20)
    t = {name: x.detach() for name, x in learned(2, device=device).items()}
    out, _ = attention(SCORES["umbral_blend"](q.detach(), k.detach(), t), v, backend="triton")
    (grad,) = torch.autograd.grad(out.sum(), [v])
    double = exact(q, k, v, t)
    expected, _ = attention(
        SCORES["umbral_blend"](*double[:2], double[3]), double[2], backend="reference"
    )
    assert_gradients([grad], torch.autograd.grad(expected.sum(), [double[2]]), 1e-4, ["value"])


@devices
def test_the_operator_is_one_to_torch(device):
    """Schema, fake implementations, autograd, and tracing with shapes that are not known."""
    from hf_hyperattn.engines.triton.operator import forward

    q, k, v = inputs(device, n=20, m=20)
    new = lambda *shape: tensor(*shape, seed=6).to(device, torch.float32).abs().requires_grad_()
    numbers = [new(1, 2, 20) for _ in range(4)] + [new(2)]
    extras = {"sinks": new(2), "query_factor": new(1, 2, 20), "key_factor": new(1, 2, 20)}
    tensors = [q, k, v, *numbers, *extras.values()]
    torch.library.opcheck(
        forward, (tensors, "umbral", " ".join(extras), 15, 1.0, True, None, 0, None, 0.0)
    )


@devices
def test_a_term_with_every_operator(device):
    """Value and gradients of all that a term may call, at ties and zeros."""
    leaves = every_inputs(n=20, m=24)
    expected = outcome(partial(every_score, SAFE), leaves, torch.float64, "reference")
    found = outcome(
        partial(every_score, EVERY), [t.to(device) for t in leaves], torch.float32, "triton"
    )
    compare(found, expected, 1e-6, 4e-6)


@devices
def test_a_score_from_outside(device):
    """With a gate and a softcap, which acts on it, and without; and one that reads distances and constants."""
    q, k, v = inputs(device, heads=4, kv_heads=2, n=20)
    with torch.no_grad():
        k[:, :, 3] = q[:, ::2, 5]  # a pair that coincides
    with restored():
        toy_score.define()

        @ha.score("far_for_test", statistics={"last": lambda x: x[..., -1]})
        def far_for_test(squared_distance, query_last, key_last, gamma=1.0, *, power=0.5):
            return -gamma * (squared_distance.sqrt() + power * (query_last - key_last).abs())

        def score(q, k, t):
            made = space("toy_score", weight=t["gamma"]).score(q, k, gate=t["gate"], capped=True)
            return dot_score(q, k, SCALE).plus(*made.terms)

        check(score, q, k, v, Options(is_causal=True, softcap=0.7))
        check(lambda q, k, t: space("toy_score", weight=t["gamma"]).score(q, k), q, k, v)
        check(
            lambda q, k, t: space("far_for_test", gamma=t["gamma"], power=0.25).score(q, k), q, k, v
        )


def space(name, **values):
    """A score from outside with its numbers."""
    return PairSpace(ha.ScoreConfig(name).definition, values, SCALE)


@devices
def test_what_a_tile_has_beyond_the_lines_reaches_no_gradient(device):
    """A term that divides by what a key has, and a query: no line is there twice or as zeros."""

    def score(q, k, row, column, head):
        logits = lambda: DIVIDED.logits(
            q @ k.mT, [row[..., None]], [column[:, :, None]], [head[:, None, None]]
        )
        return PairScore(q, k, (ScoreTerm(DIVIDED, logits, (row,), (column,), (head,)),))

    q, k, v = inputs(device, n=21, m=37, d=3)
    more = [
        tensor(1, 2, 21, seed=100),
        tensor(1, 2, 37, seed=101).abs() + 0.5,
        torch.tensor([0.5, -1.0]),
    ]
    leaves = [t.detach().to(device) for t in (q, k, v, *more)]
    expected = outcome(score, leaves, torch.float64, "reference", Options(is_causal=True, offset=9))
    compare(
        outcome(score, leaves, torch.float32, "triton", Options(is_causal=True, offset=9)),
        expected,
        1e-6,
        4e-6,
    )


class Steep(Term):
    """Its slope by the parameter is large, and nearly the same along a row."""

    name, rows, columns, heads = "steep_for_test", 1, 1, 1

    def logits(self, dot, row, column, head, squared_distance=None):
        return dot + head[0] * (row[0] + column[0])


@devices
@pytest.mark.parametrize("sinks", [False, True])
def test_a_parameter_with_a_steep_slope(device, sinks, monkeypatch):
    """In a row the gradients of the logits add up to 0, but for rounding, which the slope must not multiply; and but
    for the sink's, which it must. What values have in common is rounded alike for a whole row.
    """
    monkeypatch.setitem(TERMS, Steep.name, Steep())

    def score(q, k, row, column, head):
        logits = lambda: TERMS[Steep.name].logits(
            q @ k.mT, [row[..., None]], [column[:, :, None]], [head[:, None, None]]
        )
        return PairScore(q, k, (ScoreTerm(TERMS[Steep.name], logits, (row,), (column,), (head,)),))

    q, k, v = (t.detach() for t in inputs(device, n=20, scale=1.0))
    v, row, column = v + 10, 30000.0 + torch.arange(20.0), (torch.arange(40.0) % 9).expand(1, 2, 40)
    numbers, grads = [row.expand(1, 2, 20), column, torch.tensor([1 / 16, 1 / 8])], []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [t.detach().to(device, dtype) for t in (q, k, v, *numbers)]
        beside = (30000 * leaves[-1] - 9).requires_grad_() if sinks else None
        head = leaves[-1].requires_grad_()
        out, _ = attention(
            score(*leaves[:2], *leaves[3:]), leaves[2], Options(sinks=beside), backend=backend
        )
        grads.append(
            torch.autograd.grad(
                (out * tensor(*out.shape, seed=45).to(device, dtype)).sum(), [head]
            )[0]
        )
    assert_close(*grads, 5e-3 * float(grads[1].abs().max()), "gradient of the parameter")


@devices
@pytest.mark.parametrize("name", ["umbral_blend"])
def test_under_the_compiler(device, name):
    """One graph, the same numbers, also for another length."""
    t = learned(2, device=device)
    run = lambda q, k, v: attention(
        SCORES[name](q, k, t), v, Options(is_causal=True), backend="triton"
    )[0]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (20, 28):
        q, k, v = inputs(device, n=n, m=n)
        ours, plain = compiled(q, k, v), run(q, k, v)
        assert_close(ours, plain, 1e-6, "output")
        grads, wanted = (
            torch.autograd.grad(out.square().sum(), [q, k, v]) for out in (ours, plain)
        )
        assert_gradients(grads, wanted, 1e-5, NAMES)
