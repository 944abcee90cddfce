"""A term may ask for single pairs from differences; the engine gives those, all of a tile where they are many.

The toy's gap is of other points than its features, so that the logits show which pairs came from where.
"""

import pytest
import torch

from hf_hyperattn.engines import PairScore, Points, ScoreTerm, Term, attention, register_term, tiles
from tests.oracles import dense
from tests.oracles.cases import FAST, MANY_BLOCKS, assert_close, qkv, tensor


class Picky(Term):
    """The product, and where it is above a bound per head, minus the squared distance."""

    name, heads = "toy_picky", 1

    def logits(self, dot, row, column, head, squared_distance=None):
        return self.vjp(dot, row, column, head, squared_distance)[0]

    def vjp(self, dot, row, column, head, squared_distance=None):
        found = squared_distance(dot > head[0])
        near = ~found.isnan()

        def pullback(grad):
            return grad.masked_fill(near, 0.0), (), (), (None,), (-grad).masked_fill(~near, 0.0)

        return torch.where(near, -found, dot), pullback


PICKY = register_term(Picky())


def score_of(q, k, bound):
    points = lambda: Points(q.flip(-1), k)
    return PairScore(q, k, (ScoreTerm(PICKY, lambda: None, head=(bound,), points=points),))


def expected(q, k, bound):
    far = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    dot = q @ far.mT
    gap = torch.cdist(q.flip(-1), far).square()
    return torch.where(dot > bound[:, None, None], -gap, dot)


def check(q, k, v, bound, below, backend):
    """The output, and the gradients of the points, for pairs from differences above `below`."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, _ = attention(score_of(*leaves[:2], bound), leaves[2], backend=backend)
    plain = dense.softmax_average(expected(*leaves[:2], below), leaves[2])
    assert_close(out, plain, 1e-4, "output")
    weight = tensor(*out.shape, seed=124).float()
    grads = [
        torch.autograd.grad((o * weight).sum(), leaves, allow_unused=True) for o in (out, plain)
    ]
    for found, wanted, leaf in zip(*grads, leaves, strict=True):
        wanted = torch.zeros_like(leaf) if wanted is None else wanted
        assert_close(found, wanted, 1e-4 * max(1.0, float(wanted.abs().max())), "gradient")


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("batch, heads, kv_heads, lq, lk", [*MANY_BLOCKS, (2, 4, 2, 5, 7)], ids=str)
def test_single_pairs_are_taken_from_differences(
    backend, batch, heads, kv_heads, lq, lk, monkeypatch
):
    monkeypatch.setattr(tiles, "FEW", 1)  # never whole tiles
    q, k, v = qkv(batch, heads, kv_heads, lq, lk, d=4, seed=120, dtype=torch.float32)
    bound = tensor(heads, seed=121).abs().float()
    check(q, k, v, bound, bound, backend)


@pytest.mark.parametrize("backend", FAST)
def test_many_pairs_are_taken_with_their_whole_tile(backend):
    q, k, v = qkv(1, 2, 1, 30, 40, d=4, seed=123, dtype=torch.float32)
    bound = torch.zeros(2)
    check(q, k, v, bound, torch.full((2,), -1e9), backend)
    check(q, k, v, bound + 1e9, bound + 1e9, backend)
