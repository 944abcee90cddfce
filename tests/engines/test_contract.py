"""The pair-score contract from outside: a mechanism of our own, with statistics, a parameter and a gate.

The toy is minus a scaled squared distance, β·(2 x·y - |x|² - |y|²): linear in the product, so it cannot hide a
mistake in how an engine sums the gradients of statistics, parameters and gates.
"""

import pytest
import torch

from hf_hyperattn.engines import (
    TERMS,
    Options,
    PairScore,
    Points,
    ScoreTerm,
    Term,
    attention,
    dot_score,
    register_term,
)
from tests.oracles import dense
from tests.oracles.cases import BACKENDS, assert_close, assert_gradients, qkv, tensor
from tests.oracles.marks import every_backend


class Nearness(Term):
    """-β |x - y|², from the product or, where an engine offers it, from the squared distance itself."""

    name = "toy_nearness"
    rows, columns, heads = 1, 1, 1

    def logits(self, dot, row, column, head, squared_distance=None):
        squared = (
            row[0] + column[0] - 2 * dot if squared_distance is None else squared_distance(None)
        )
        return -head[0] * squared


class WatchedNearness(Nearness):
    """The same under another name, for scores with points."""

    name = "toy_nearness_watched"


PLAIN, WATCHED = register_term(Nearness()), register_term(WatchedNearness())


def nearness(q, k, beta, gate=None, term=PLAIN):
    def definition():
        far = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return -beta[:, None, None] * ((q[..., :, None, :] - far[..., None, :, :]) ** 2).sum(-1)

    statistics = {"row": (q.square().sum(-1),), "column": (k.square().sum(-1),)}
    points = (lambda: Points(q, k)) if term is WATCHED else None
    return ScoreTerm(term, definition, head=(beta,), gate=gate, points=points, **statistics)


def score_of(q, k, beta, term=PLAIN):
    return PairScore(q, k, (nearness(q, k, beta, term=term),))


def plain_logits(q, k, beta):
    far = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (
        -beta[:, None, None] * torch.cdist(q, far, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    )


def inputs(lq=3, lk=4, heads=2, kv_heads=1, d=3):
    q, k, v = qkv(batch=1, heads=heads, kv_heads=kv_heads, lq=lq, lk=lk, d=d, seed=80)
    beta, gate = tensor(heads, seed=81) + 1.5, tensor(heads, seed=82)
    return [t.clone().requires_grad_() for t in (q, k, v, beta, gate)]


@every_backend
@pytest.mark.parametrize("term", [PLAIN, WATCHED], ids=["product", "differences"])
@pytest.mark.parametrize("lq, lk", [(3, 4), (560, 900)])
def test_a_term_from_outside_runs_in_every_engine(backend, term, lq, lk):
    q, k, v, beta, _ = inputs(lq, lk)
    out, _ = attention(score_of(q, k, beta, term), v, backend=backend)
    plain = dense.softmax_average(plain_logits(q, k, beta), v)
    assert_close(out, plain, 1e-9, "output")
    weight, leaves = tensor(*plain.shape, seed=83), (q, k, v, beta)
    grads = [torch.autograd.grad((o * weight).sum(), leaves) for o in (out, plain)]
    assert_gradients(*grads, 1e-8, ("query", "key", "value", "beta"))


@every_backend
def test_a_blend_adds_up_and_its_gate_learns(backend):
    """dot + g·nearness on one product; at g = 0 it is the dot product, and g still gets its gradient."""
    q, k, v, beta, gate = inputs()

    def blend(q, k, v, beta, gate):
        return attention(dot_score(q, k, 1.0).plus(nearness(q, k, beta, gate)), v, backend=backend)[
            0
        ]

    far = k.repeat_interleave(2, dim=1)
    logits = q @ far.mT + gate[:, None, None] * plain_logits(q, k, beta)
    assert_close(blend(q, k, v, beta, gate), dense.softmax_average(logits, v), 1e-9, "blend")
    assert torch.autograd.gradcheck(blend, (q, k, v, beta, gate))
    zero = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    out = blend(q, k, v, beta, zero)
    assert_close(
        out, torch.softmax(q @ far.mT, -1) @ v.repeat_interleave(2, dim=1), 1e-12, "at gate zero"
    )
    assert torch.autograd.grad(out.square().sum(), zero)[0].abs().min() > 0


@every_backend
def test_a_whole_score_can_be_weighted_by_head(backend):
    q, k, v, beta, gate = inputs()

    def weighted(q, k, v, beta, gate):
        return attention(score_of(q, k, beta).weighted(gate), v, backend=backend)[0]

    logits = gate[:, None, None] * plain_logits(q, k, beta)
    assert_close(weighted(q, k, v, beta, gate), dense.softmax_average(logits, v), 1e-9, "output")
    assert torch.autograd.gradcheck(weighted, (q, k, v, beta, gate))


def test_softcap_acts_on_the_first_piece_only():
    """The host's own logits are capped; what a mechanism adds is not."""
    q, k, v, beta, gate = inputs()
    far = k.repeat_interleave(2, dim=1)
    logits = 0.5 * torch.tanh(q @ far.mT / 0.5) + gate[:, None, None] * plain_logits(q, k, beta)
    for backend in BACKENDS:
        score = dot_score(q, k, 1.0).plus(nearness(q, k, beta, gate))
        out, _ = attention(score, v, Options(softcap=0.5), backend=backend)
        assert_close(out, dense.softmax_average(logits, v), 1e-9, f"output of {backend}")


def test_a_second_term_of_one_name_is_refused():
    with pytest.raises(ValueError, match="toy_nearness"):
        register_term(Nearness())
    assert TERMS["toy_nearness"] is PLAIN


@pytest.mark.parametrize("backend", ["cpu", "blockwise"])
def test_features_that_no_factor_leads_to_are_taken_as_they_are(backend):
    q, k, v = qkv(batch=1, heads=2, lq=5, lk=300, d=8, dtype=torch.float32)
    score = dot_score(q, k, 1.0)
    doubled = PairScore(q, k, score.terms, make_features=lambda: (2 * q, k))
    expected = (2 * q @ k.mT).softmax(-1) @ v
    assert_close(attention(doubled, v, backend=backend)[0], expected, 1e-5, "output")
