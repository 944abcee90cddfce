"""Terms without a functor by hand: traced, their derivative taken on the graph, and written in C++."""

import ctypes
import logging
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from hf_hyperattn.engines import (
    DistanceTerm,
    Options,
    PairScore,
    ScoreTerm,
    Term,
    attention,
    cpu,
    dispatch,
    emit_cpp,
    native,
    trace,
)
from hf_hyperattn.engines.cpu import kernels, library
from hf_hyperattn.engines.score import TERMS, DerivedDistanceTerm, parse_score_key
from hf_hyperattn.mechanisms.hype.terms import Hype
from hf_hyperattn.mechanisms.mkl.terms import weighted_score
from tests.engines.own_scores import own_logits, own_score
from tests.engines.test_native import needs_compiler
from tests.oracles import dense
from tests.oracles.cases import assert_close, qkv, tensor
from tests.oracles.marks import every_backend, first_always

where = torch.where


class Every(Term):
    """Every operator that a term may call, at ties and zeros, with infinite slopes in branches that are not taken.

    Args:
        safe: without the latter, of which torch's own differentiation makes NaN, and without `clamp`.
    """

    rows, columns, heads = 2, 2, 2

    def __init__(self, safe):
        self.name, self.safe = f"every_operator_for_test_{safe:d}", safe

    def guarded(self, mask, x):
        return where(mask, x, 1.0) if self.safe else x

    def clamp(self, x, low, high):
        """The operator; or written out, since its gradient at the bounds is another one from torch 2.14 on."""
        if self.safe:
            x = x if low is None else where(x < low, low, x)
            return x if high is None else where(x > high, high, x)
        if high is None:
            return x.clamp_min(low)
        return x.clamp_max(high) if low is None else x.clamp(low, high)

    def logits(self, dot, row, column, head, squared_distance=None):
        (a, b), (c, d), (s, t) = row, column, head
        u, apart = a - c, (b - d).abs()
        out = (
            torch.maximum(dot, u) + torch.minimum(dot, c) - torch.maximum(u, -u) + dot.sign() * 0.1
        )
        out = out + where(u > 0, self.guarded(u > 0, u.abs()).sqrt(), 0.5 * u)
        out = out + where(apart <= 0, dot.detach() * u, self.guarded(apart > 0, apart).log())
        out = (
            out
            + torch.cosh(dot)
            - torch.sinh(s * u)
            + torch.tanh(dot / 2)
            + torch.sigmoid(-t * dot)
            + (-apart).exp()
        )
        out = (
            out
            - where(dot != 0, torch.acosh(1 + self.guarded(dot != 0, dot * dot)), 0.0)
            - torch.log1p(apart)
            + torch.expm1(0.3 * u)
        )
        out = (
            out
            + F.softplus(dot)
            + torch.rsqrt(1 + u * u)
            + (2 + dot**2).reciprocal()
            - 1 / (3 + u**4)
            + s**3
        )
        out = (
            out
            + self.clamp(dot, -0.5, 0.5)
            + self.clamp(u, -0.25, None)
            - self.clamp(c, None, 0.25)
        )
        out = out + F.relu(dot - a) + (1 + apart) ** -1.5
        out = (
            torch.addcmul(u, dot, t, value=-0.5).neg_().sub_(out).neg_()
            + 0.5 * u.square()
            - (1 - dot) * (a >= c)
        )
        mask = ((u < 0) & ~(dot > 0)) | (apart == 0)
        return out.masked_fill(mask.logical_and(dot != 0), 0.25) + where(
            mask, torch.zeros_like(u), u / 3
        )


EVERY, SAFE = (TERMS.setdefault(t.name, t) for t in (Every(False), Every(True)))


def every_inputs(n=36, m=40):
    """Features and statistics with many ties: halves, zeros, and rows that equal columns."""
    round_half = lambda t: (2 * t).round() / 2
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, lq=n, lk=m, d=3, seed=90)
    q, k = round_half(q), round_half(k)
    k[:, :, ::3] = 0
    row = [round_half(tensor(1, 2, n, seed=91)), round_half(tensor(1, 2, n, seed=92))]
    column = [round_half(tensor(1, 1, m, seed=93)), round_half(tensor(1, 1, m, seed=94))]
    return [q, k, v, *row, *column, tensor(2, seed=95) + 1.5, tensor(2, seed=96) + 1.5]


def every_score(term, q, k, a, b, c, d, s, t):
    tile = lambda x, *at: x.repeat_interleave(2 // x.shape[1], dim=1)[at]
    definition = lambda: term.logits(
        q @ k.mT,
        [x[..., None] for x in (a, b)],
        [tile(x)[..., None, :] for x in (c, d)],
        [x[:, None, None] for x in (s, t)],
    )
    return PairScore(q, k, (ScoreTerm(term, definition, row=(a, b), column=(c, d), head=(s, t)),))


def outcome(score_of, inputs, dtype, backend, options=None):
    """The output and all gradients; of inputs and statistics, values third."""
    leaves = [
        t.float().to(dtype).requires_grad_() for t in inputs
    ]  # the same numbers in every dtype
    q, k, v, *numbers = leaves
    out, _ = attention(score_of(q, k, *numbers), v, options, backend=backend)
    weight = tensor(*out.shape, seed=97).to(dtype)
    return out, torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)


def check(found, expected, output, gradient):
    """Errors relative to the largest number of the expectation, at least 0.5."""
    assert_close(found[0], expected[0], output * max(expected[0].abs().max().item(), 0.5), "output")
    for i, (f, e) in enumerate(zip(found[1], expected[1], strict=True)):
        e = torch.zeros_like(f) if e is None else e
        assert_close(
            torch.zeros_like(e) if f is None else f,
            e,
            gradient * max(e.abs().max().item(), 0.5),
            f"gradient {i}",
        )


def test_the_graph_of_every_operator_has_the_logits_and_gradients_of_autograd():
    q, k, _, *numbers = every_inputs()
    row, column = [x[0, 0, :, None] for x in numbers[:2]], [x[0, 0, None] for x in numbers[2:4]]
    head, dot = [x[:1, None] for x in numbers[4:]], (q @ k.mT)[0, 0]
    pairs = [x.expand(dot.shape).clone().requires_grad_() for x in (dot, *row, *column, *head)]
    names = [
        ("dot", 0),
        ("row", 0),
        ("row", 1),
        ("column", 0),
        ("column", 1),
        ("head", 0),
        ("head", 1),
    ]
    expected = SAFE.logits(pairs[0], pairs[1:3], pairs[3:5], pairs[5:])
    wanted = torch.autograd.grad(expected.sum(), pairs)
    with torch.no_grad():
        logits, pull = EVERY.vjp(pairs[0], pairs[1:3], pairs[3:5], pairs[5:])
        twice = pull(2 * torch.ones_like(logits))[0]
        d_dot, *others = pull(torch.ones_like(logits))
    assert_close(twice, 2 * d_dot, 1e-12, "a second pullback")
    assert_close(logits, expected, 1e-13, "logits")
    for name, w, got in zip(names, wanted, (d_dot, *sum(others, [])), strict=True):
        assert_close(got, w, 1e-12, str(name))
    t = trace.trace_term(EVERY)
    assert set(trace.DERIVATIVES) - {n.op for n in trace.sort_ancestors([t.logit])} == {
        "cosh_of_sinh"
    }


def test_every_operator_that_is_allowed_is_tested():
    called = set()

    class Calls(trace.Tracer):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.add(func.overloadpacket.__name__.removesuffix("_"))
            return super().__torch_dispatch__(func, types, args, kwargs)

    tracer = Calls()
    x = [tracer.add_argument("row", i) for i in range(7)]
    with tracer:
        EVERY.logits(x[0], x[1:3], x[3:5], x[5:])
        # forms of constants, which a tile of pairs has in other shapes
        y = (
            torch.ones_like(x[0])
            + torch.full_like(x[0], 2.0)
            + x[0].clone()
            + where(x[0] > 0, x[0], 0.0)
        )
        y = y + (x[0] > 0).logical_or(x[1] > 0).logical_not().double()
    assert set(trace.OPERATORS) == called
    assert not tracer.find_node(y).is_mask


@needs_compiler
@every_backend
def test_a_term_with_every_operator_on_each_engine(backend):
    dtype = torch.float32 if backend == "cpu" else torch.float64
    inputs = every_inputs()
    expected = outcome(partial(every_score, SAFE), inputs, torch.float64, "reference")
    found = outcome(
        partial(every_score, SAFE if backend == "reference" else EVERY), inputs, dtype, backend
    )
    tolerances = (2e-6, 4e-6) if backend == "cpu" else (1e-12, 1e-11)
    check(found, expected, *tolerances)


FUNCTIONS = {  # C++ name, where it is tried, in float64, largest relative error
    "log": ("logarithm", (1e-37, 0.3, 0.999, 1.0, 1.0001, 3.0, 1e37), torch.log, 2e-7),
    "log1p": ("log_of_one_plus", (-0.999, -0.5, -1e-6, 1e-30, 1e-3, 1.0, 1e30), torch.log1p, 3e-7),
    "expm1": (
        "exponential_less_one",
        (-80.0, -1.0, -0.999, -1e-20, 1e-6, 0.5, 0.999, 1.0, 80.0),
        torch.expm1,
        3e-7,
    ),
    "cosh": ("hyperbolic_cosine", (-80.0, -1.0, 0.0, 1e-3, 2.0, 80.0), torch.cosh, 2e-7),
    "cosh of sinh": (
        "cosine_of_sine",
        (-1e30, -3.0, 0.0, 0.1, 1e8, 1e12, 1e30),
        lambda x: (1 + x * x).sqrt(),
        2e-7,
    ),
    "sigmoid": ("sigmoid", (-80.0, -3.0, 0.0, 1e-3, 2.0, 80.0), torch.sigmoid, 2e-7),
}
EDGES = {"log": {0.0: -math.inf, math.inf: math.inf, -1.0: math.nan}, "expm1": {0.0: 0.0}}


@needs_compiler
def test_vector_functions_are_exact():
    """Between the numbers given and at them, and what they are at the edges."""
    loop = "for (long j = 0; j < n; j += kLanes) store(x + j, {}(load(x + j)));"
    names = [cpp for cpp, *_ in FUNCTIONS.values()]
    calls = "\n".join(
        f'extern "C" void f{i}(float* x, long n) {{ {loop.format(n)} }}'
        for i, n in enumerate(names)
    )
    text = f'#include "{library.SCORE.as_posix()}"\nusing namespace hyper;\n{calls}\n'
    built = native.load_library("test_functions", text, library.SCORE, *library.SHARED)
    for i, (name, (_, spots, exact, tolerance)) in enumerate(FUNCTIONS.items()):
        runs = [torch.linspace(a, b, 64, dtype=torch.float64) for a, b in pairwise(spots)]
        edges = EDGES.get(name, {})
        x = torch.cat([*runs, torch.tensor(list(edges), dtype=torch.float64)]).float()
        x = torch.cat([x, torch.ones(-len(x) % 64)]).contiguous()
        y = x.clone()
        built[f"f{i}"](ctypes.c_void_p(y.data_ptr()), ctypes.c_long(len(y)))
        inner = sum(map(len, runs))
        wanted = exact(x.double())[:inner]
        assert ((y[:inner] - wanted).abs() <= tolerance * wanted.abs()).all(), name
        for at, value in zip(y[inner:].tolist(), edges.values(), strict=False):
            assert at == value or math.isnan(value) and math.isnan(at), name


class Outsider(Term):
    """A softcapped product, a multiple of the cosine, and a learned decay with the logarithm of the distance."""

    name, rows, columns, heads = "outsider_for_test", 2, 2, 3

    def logits(self, dot, row, column, head, squared_distance=None):
        (inverse_q, at_q), (inverse_k, at_k), (cap, c, slope) = row, column, head
        far = (at_q - at_k).detach().abs()
        return (
            cap * torch.tanh(dot / cap)
            + c * dot * inverse_q * inverse_k
            - slope.exp() * torch.log1p(far)
        )


@pytest.fixture
def outsider(monkeypatch):
    """A score of that term, from vectors and parameters."""
    term = Outsider()
    monkeypatch.setitem(TERMS, term.name, term)
    parse_score_key.cache_clear()
    dispatch.RESOLVED.clear()

    def score(q, k, cap, c, slope):
        norms = [x.square().sum(-1).clamp_min(1e-12).sqrt() for x in (q, k)]
        places = [torch.arange(x.shape[2], dtype=q.dtype).expand(x.shape[:3]) for x in (q, k)]
        row, column = ((1 / n, at) for n, at in zip(norms, places, strict=True))

        def definition():
            far = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            dot, lengths = q @ far.mT, (norms[0][..., None], norms[1][..., None, :])
            distance = (places[0][:, :1, :, None] - places[1][:, :1, None]).abs()
            cap_, c_, slope_ = (x[:, None, None] for x in (cap, c, slope))
            return (
                cap_ * torch.tanh(dot / cap_)
                + c_ * dot / lengths[0] / lengths[1]
                - slope_.exp() * torch.log1p(distance)
            )

        return PairScore(
            q, k, (ScoreTerm(term, definition, row=row, column=column, head=(cap, c, slope)),)
        )

    return score


def outsider_inputs(n, m):
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, lq=n, lk=m, d=6, seed=98, scale=2.0)
    k[:, :, 5] = q[:, :1, 3]
    k[:, :, 6] = q[:, 1:, 4] * (1 + 1e-6)
    q[:, :, 7] = k[:, :, 8] = 0
    return [
        q,
        k,
        v,
        torch.tensor([5.0, 30.0]),
        torch.tensor([0.7, -1.3]),
        torch.tensor([-1.0, -4.0]),
    ]


@needs_compiler
@every_backend
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_score_from_outside_on_every_engine(backend, causal, outsider, caplog):
    cpu.log_once.cache_clear()
    inputs, options = outsider_inputs(96, 120), Options(is_causal=causal)
    expected = outcome(outsider, inputs, torch.float64, "reference", options)
    dtype = torch.float32 if backend == "cpu" else torch.float64
    with caplog.at_level(logging.WARNING, "hf_hyperattn"):
        found = outcome(outsider, inputs, dtype, backend, options)
    check(found, expected, *((2e-6, 4e-6) if backend == "cpu" else (1e-13, 1e-12)))
    assert not caplog.records


@needs_compiler
@pytest.mark.parametrize("learns", [False, True], ids=["decode", "operator"])
def test_a_score_from_outside_on_few_queries_with_gates_and_softcap(outsider, learns, monkeypatch):
    q, k, v, *head = outsider_inputs(96, 120)
    gate, outs, taken = torch.tensor([0.5, 2.0]), [], []
    run = kernels.decode
    monkeypatch.setattr(kernels, "decode", lambda *args: taken.append(1) or run(*args))
    for backend, dtype in (("reference", torch.float64), ("cpu", torch.float32)):
        q_, k_, v_, gate_, *head_ = (t.float().to(dtype) for t in (q[:, :, :2], k, v, gate, *head))
        score = outsider(q_, k_, *(h.requires_grad_(learns) for h in head_)).weighted(gate_)
        outs.append(attention(score, v_, Options(softcap=4.0), backend=backend)[0])
    dispatch.RESOLVED.clear()
    assert_close(outs[1], outs[0], 1e-6, "output")
    assert bool(taken) is not learns


class Divided(Term):
    """Divides by what a key has, which is 0 where a register has more lanes than there are keys."""

    name, rows, columns, heads = "divided_for_test", 1, 1, 1

    def logits(self, dot, row, column, head, squared_distance=None):
        return (
            torch.maximum(dot / column[0], row[0] * head[0] / column[0])
            + dot * (row[0] + head[0]) / column[0]
        )


DIVIDED = TERMS.setdefault(Divided.name, Divided())


@needs_compiler
@pytest.mark.parametrize("nan", [False, True], ids=["numbers", "nan"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_what_is_beyond_the_keys_reaches_no_gradient_and_nan_is_not_lost(nan, causal):
    q, k, v = qkv(batch=1, heads=2, lq=21, lk=21, d=3, seed=99)
    row, column = tensor(1, 2, 21, seed=100), tensor(1, 2, 21, seed=101).abs() + 0.5
    if nan:
        q[0, 0, 4, 1] = row[0, 1, 6] = math.nan

    def score(q, k, row, column, head):
        logits = lambda: DIVIDED.logits(
            q @ k.mT, [row[..., None]], [column[:, :, None]], [head[:, None, None]]
        )
        return PairScore(q, k, (ScoreTerm(DIVIDED, logits, (row,), (column,), (head,)),))

    inputs, options = [q, k, v, row, column, torch.tensor([0.5, -1.0])], Options(is_causal=causal)
    expected = outcome(score, inputs, torch.float64, "reference", options)
    found = outcome(score, inputs, torch.float32, "cpu", options)
    if not nan:
        return check(found, expected, 2e-6, 4e-6)
    assert torch.equal(found[0].isnan(), expected[0].isnan())
    assert found[0].isnan().any() and not found[0].isnan().all()


class Ends(Term):
    """Its derivative reads its logits, which blocks overwrite."""

    name = "ends_for_test"

    def logits(self, dot, row, column, head, squared_distance=None):
        return torch.exp(dot / 2)


ENDS = TERMS.setdefault(Ends.name, Ends())


@needs_compiler
@every_backend
def test_a_derivative_that_reads_the_logits(backend):
    score = lambda q, k: PairScore(
        q, k, (ScoreTerm(ENDS, lambda: ENDS.logits(q @ k.mT, (), (), ())),)
    )
    inputs = qkv(batch=1, heads=2, lq=21, lk=21, d=3, seed=102)
    expected = outcome(score, inputs, torch.float64, "reference")
    dtype, tolerance = (torch.float32, 2e-6) if backend == "cpu" else (torch.float64, 1e-12)
    check(outcome(score, inputs, dtype, backend), expected, tolerance, tolerance)


def own_inputs(name, blend):
    """Vectors some of which coincide, nearly coincide or are zero, and two parameters."""
    q, k, v = qkv(batch=1, heads=4, kv_heads=2, lq=96, lk=120, d=8, seed=60, scale=1.5)
    k[:, :, 5], k[:, :, 9] = q[:, ::2, 3], q[:, 1::2, 4] * (1 + 1e-4)
    k[:, :, 10], q[:, :, 7], k[:, :, 8] = k[:, :, 11] * (1 + 1e-6), 0, 0
    ranges = {"u": (0.6, 1.7, 1.5, 0.8), "p": (0.6, 1.7, 1.5, 0.8), "h": (0.01, 0.1, 0.4, 1.3)}.get(
        name[0], (0.5, 2, 0.4, 1.3)
    )
    more = [torch.linspace(-0.5, 0.7, 4)] if blend else []
    return [q, k, v, torch.linspace(*ranges[:2], 4), torch.linspace(*ranges[2:], 4), *more]


def outcome_of(function, inputs, dtype):
    """The output and all gradients of a function of tensors."""
    leaves = [t.float().to(dtype).requires_grad_() for t in inputs]
    out = function(*leaves)
    return out, torch.autograd.grad((out * tensor(*out.shape, seed=97).to(dtype)).sum(), leaves)


@needs_compiler
@first_always(
    "name, blend",
    [
        *[
            ("umbral", False),
            ("geodesic", True),
            ("hype_sinh", True),
            ("hype_cosh", True),
            ("umbral", True),
        ],
        *[
            ("geodesic", False),
            ("penumbral", False),
            ("penumbral", True),
            ("penumbral_squared", False),
        ],
        *[("penumbral_squared", True), ("squared_lorentz", False), ("squared_lorentz", True)],
    ],
)
def test_own_scores_are_as_exact_as_their_formulas(name, blend, monkeypatch):
    """Compiled, and in blocks with the derivative by hand, which in float64 is that of the trace."""
    inputs, options = own_inputs(name, blend), Options(is_causal=True)

    def plain(q, k, v, *numbers):
        return dense.softmax_average(own_logits(name, q, k, *numbers), v, causal=True)

    def run(q, k, v, *numbers, backend):
        return attention(own_score(name, q, k, *numbers), v, options, backend=backend)[0]

    expected = outcome_of(plain, inputs, torch.float64)
    # Lorentz distances are large: of points far out float32 has no more digits. The formula itself, in float32, loses
    # up to 3e-7 of outputs and 4e-6 of gradients, that of a geodesic's curvature above all.
    special = {"squared_lorentz": (2e-5, 2e-4), "geodesic": (2e-6, 1.6e-5)}
    tolerances = special.get(name, (1.2e-6, 8e-6))
    check(outcome_of(partial(run, backend="cpu"), inputs, torch.float32), expected, *tolerances)
    blocks = partial(run, backend="blockwise")
    check(outcome_of(blocks, inputs, torch.float32), expected, *tolerances)
    by_hand = outcome_of(blocks, inputs, torch.float64)
    check(by_hand, expected, 1e-9, 1e-8)
    monkeypatch.setattr(DerivedDistanceTerm, "vjp", DistanceTerm.vjp)
    monkeypatch.setattr(Hype, "vjp", Term.vjp)
    check(outcome_of(blocks, inputs, torch.float64), by_hand, 1e-12, 1e-11)


def test_what_cannot_be_read_is_not_decoded():
    q, k, v, *numbers = (t.float() for t in own_inputs("umbral", False))
    score = own_score("umbral", q[:, :, :1], k, *numbers)
    assert cpu.decodes(score, v, Options()) is not None
    unread = replace(score.terms[0], reader=None)
    assert cpu.decodes(replace(score, terms=(unread,)), v, Options()) is None


CAPTURED = torch.ones(1, 1)
REFUSED = {
    "sum": (lambda d, r, c, h: d.sum(-1, keepdim=True), "operator sum (a reduction"),
    "matrix product": (lambda d, r, c, h: d @ d, "operator mm (a reduction or product"),
    "branch": (lambda d, r, c, h: d if d > 0 else -d, "a branch on values; use torch.where"),
    "number of it": (lambda d, r, c, h: d * d.item(), "a branch on values; use torch.where"),
    "captured": (lambda d, r, c, h: d + CAPTURED, "a tensor of its own; use a statistic"),
    "made": (lambda d, r, c, h: d * torch.tensor(2.0), "a tensor of its own; use a statistic"),
    "returned": (lambda d, r, c, h: CAPTURED, "a tensor of its own; use a statistic"),
    "unknown": (lambda d, r, c, h: torch.erf(d), "operator erf (allowed are abs, acosh, "),
    "power": (lambda d, r, c, h: d.abs() ** 2.3, "pow, but for whole and half numbers"),
    "softplus": (lambda d, r, c, h: F.softplus(d, beta=2), "softplus with another beta than 1"),
    "rounding": (
        lambda d, r, c, h: torch.div(d, 2, rounding_mode="floor"),
        "operator div with arguments that are not",
    ),
    "changed argument": (
        lambda d, r, c, h: d.mul_(2),
        "it changes an argument, or a tensor that shares memory",
    ),
    "changed twice": (
        lambda d, r, c, h: (x := d + 1) * x.detach().mul_(2),
        "it changes an argument, or a tensor that",
    ),
    "too few statistics": (lambda d, r, c, h: d + r[1], "IndexError: tuple index out of range"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_line(case):
    function, words = REFUSED[case]

    class Refused(Term):
        name, rows = "refused_for_test", 1

        def logits(self, dot, row, column, head, squared_distance=None):
            return function(dot, row, column, head)

    with pytest.raises(trace.Untraceable) as error:
        emit_cpp.write_functor(Refused())
    message = str(error.value)
    assert message.startswith("score term 'refused_for_test' cannot be compiled: ")
    assert words in message and "\n" not in message


def test_a_term_that_reads_distances_must_say_how_they_are_made():
    class Reads(Term):
        name, rows, columns = "reads_for_test", 1, 1

        def logits(self, dot, row, column, head, squared_distance=None):
            return (
                2 * dot - row[0] - column[0]
                if squared_distance is None
                else -squared_distance(None)
            )

    with pytest.raises(trace.Untraceable, match="and is no DistanceTerm"):
        emit_cpp.write_functor(Reads())


def test_a_trace_does_not_depend_on_the_callers_modes():
    plain = emit_cpp.write_functor(Outsider())
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        assert emit_cpp.write_functor(Outsider()) == plain


@pytest.mark.parametrize("kind", ["emitted", "refused"])
def test_compiled_whole(kind, outsider, monkeypatch):
    """With a term whose functor is written, or cannot be, while the call is traced."""
    if kind == "refused":
        same = lambda dot, *numbers: Outsider().logits(dot, *numbers) + 0 * torch.erf(dot)
        monkeypatch.setattr(TERMS["outsider_for_test"], "logits", same)
    monkeypatch.setattr(library, "TABLES", {})
    inputs = [t.float() for t in outsider_inputs(24, 24)]

    def call(q, k, v, *head):
        return attention(outsider(q, k, *head), v)[0]

    torch.compiler.reset()
    out = torch.compile(call, backend="eager", fullgraph=True)(*inputs)
    assert_close(out, call(*inputs), 1e-6, "output")


def test_the_text_is_part_of_what_a_library_is_kept_under(outsider):
    text = library.write_source("dot+*outsider_for_test", False)
    assert "struct Emitted1 {" in text and "hyper::Piece<hyper::Emitted1, true, false>" in text


@needs_compiler
@first_always("name", ["geodesic", "umbral", "penumbral"])
def test_weighted_scores_that_read_distances_are_compiled(name):
    """As multiple kernel learning weighs them."""
    inputs = [
        *own_inputs(name, True),
        tensor(1, 4, 96, seed=103).abs(),
        tensor(1, 4, 120, seed=104).abs(),
    ]

    def plain(q, k, v, *numbers):
        *numbers, row, column = numbers
        logits = own_logits(name, q, k, *numbers)
        return dense.softmax_average(logits * row[..., None] * column[:, :, None], v, causal=True)

    def run(q, k, v, *numbers):
        *numbers, row, column = numbers
        score = weighted_score(own_score(name, q, k, *numbers), row, column)
        assert cpu.supports(score, v, Options())
        return attention(score, v, Options(is_causal=True), backend="cpu")[0]

    check(
        outcome_of(run, inputs, torch.float32), outcome_of(plain, inputs, torch.float64), 2e-6, 1e-5
    )
