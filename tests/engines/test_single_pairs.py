"""A term may ask for single pairs from differences; the engine gives those, all of a tile where they are many.

The toy's gap is of other points than its features, so that the logits show which pairs came from where.
"""

import pytest
import torch

from hf_hyperattn.engines import PairScore, Piece, Points, Term, attention, register_term, tiles
from tests.oracles import dense
from tests.oracles.cases import FAST, MANY_BLOCKS, assert_close, qkv, tensor


class Picky(Term):
    """The product, and where it is above a bound per head, minus the gap."""

    name, heads = "toy_picky", 1

    def logits(self, dot, row, column, head, gap=None):
        return dot if gap is None else torch.where(gap.isnan(), dot, -gap)

    def inexact(self, dot, row, column, head):
        pairs = dot > head[0]
        return pairs if pairs.any() else None


PICKY = register_term(Picky())


def score_of(q, k, bound, scale):
    piece = Piece(PICKY, lambda: None, head=(bound,))
    return PairScore(q, k, (piece,), points=lambda: Points(q.flip(-1), k, scale), watch=True)


def expected(q, k, bound, scale):
    far = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    dot = q @ far.mT
    gap = (torch.cdist(q.flip(-1), far) * scale[:, None, None]).square()
    return torch.where(dot > bound[:, None, None], -gap, dot)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("batch, heads, kv_heads, lq, lk", [*MANY_BLOCKS, (2, 4, 2, 5, 7)], ids=str)
def test_single_pairs_are_taken_from_differences(backend, batch, heads, kv_heads, lq, lk, monkeypatch):
    monkeypatch.setattr(tiles, "FEW", 1)  # never whole tiles
    q, k, v = qkv(batch, heads, kv_heads, lq, lk, d=4, seed=120, dtype=torch.float32)
    bound, scale = tensor(heads, seed=121).abs().float(), tensor(heads, seed=122).float() + 2
    out, _ = attention(score_of(q, k, bound, scale), v, backend=backend)
    assert_close(out, dense.softmax_average(expected(q, k, bound, scale), v), 1e-4, "output")


@pytest.mark.parametrize("backend", FAST)
def test_many_pairs_are_taken_with_their_whole_tile(backend):
    q, k, v = qkv(1, 2, 1, 30, 40, d=4, seed=123, dtype=torch.float32)
    bound, scale = torch.zeros(2), torch.tensor([1.0, 0.5])
    out, _ = attention(score_of(q, k, bound, scale), v, backend=backend)
    everything = expected(q, k, torch.full((2,), -1e9), scale)
    assert_close(out, dense.softmax_average(everything, v), 1e-4, "output")
    nothing, _ = attention(score_of(q, k, bound + 1e9, scale), v, backend=backend)
    assert_close(nothing, dense.softmax_average(q @ k.repeat_interleave(2, 1).mT, v), 1e-5, "output")
