"""Which engine `auto` takes: by shape, by what is available, never by a clock."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hf_hyperattn.engines import (
    DOT,
    ENGINES,
    Options,
    PairScore,
    ScoreTerm,
    attention,
    dense,
    dispatch,
    dot_score,
)
from hf_hyperattn.engines.score import TERMS, requires_backward
from hf_hyperattn.functional import cone_attention
from hf_hyperattn.mechanisms.cone.functional import cone_space
from hf_hyperattn.mechanisms.hype.score import with_hype
from tests.engines.test_native import needs_compiler
from tests.oracles.cases import qkv


@pytest.fixture(params=[True, False], ids=["compiled", "uncompiled"])
def compiled(request, monkeypatch):
    """Whether the compiled engine for this machine can do what is asked."""
    monkeypatch.setattr(dispatch.cpu, "supports", lambda *_: request.param)
    return request.param


def chosen(batch, heads, n, m, training=False, weights=False, dot=False):
    q, k, v = qkv(batch=batch, heads=heads, lq=n, lk=m, d=4, dtype=torch.float32)
    q.requires_grad_(training)
    score = (
        dot_score(q, k) if dot else cone_space(q, "umbral", None, 1.0, 1.0, True, False).score(q, k)
    )
    return dispatch.choose_engine(score, v, Options(), weights)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize(
    "shape, tiled_pays",
    [
        ((2, 4, 16, 16), False),  # a toy
        (
            (128, 1, 22, 22),
            False,
        ),  # many short sequences: a tile each is slow, wherever the product of all axes lies
        ((512, 2, 22, 22), False),
        ((1, 8, 1, 512), False),  # a step of decoding
        ((1, 8, 1, 8192), True),
        ((1, 8, 64, 64), True),
        ((32, 12, 32, 32), True),
        ((1, 1, 512, 512), True),
    ],
    ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else "",
)
def test_blocks_where_a_sequence_is_worth_a_tile(monkeypatch, shape, tiled_pays, training):
    monkeypatch.setattr(dispatch.cpu, "supports", lambda *_: False)
    monkeypatch.setattr(dispatch.cpu, "decodes", lambda *_: None)
    assert chosen(*shape, training=training) == ("blockwise" if tiled_pays else "reference")


@pytest.mark.parametrize("shape", [(128, 1, 22, 22), (1, 8, 1, 512), (8, 12, 64, 64)], ids=str)
def test_the_compiled_engine_needs_no_tile_a_sequence(monkeypatch, shape):
    monkeypatch.setattr(dispatch.cpu, "supports", lambda *_: True)
    assert chosen(*shape) == "cpu" == chosen(*shape, training=True)
    assert chosen(1, 4, 16, 16) == "reference"


def test_the_compiled_engine_is_not_built_for_a_toy(monkeypatch):
    def asked(*_):
        raise AssertionError("asked, which would compile it")

    monkeypatch.setattr(dispatch.cpu, "supports", asked)
    assert chosen(1, 2, 8, 8) == "reference"
    assert chosen(1, 2, 99, 99, weights=True) == "reference"


def test_training_keeps_to_the_dense_engine_longer(monkeypatch):
    monkeypatch.setattr(dispatch.cpu, "supports", lambda *_: False)
    assert (
        chosen(1, 8, 32, 32) == "blockwise" and chosen(1, 8, 32, 32, training=True) == "reference"
    )
    with torch.no_grad():  # parameters that want gradients do not get any here
        assert chosen(1, 8, 32, 32, training=True) == "blockwise"


def test_the_dense_engine_never_holds_a_large_matrix(compiled):
    for batch in (1, 2**6, 2**12, 2**18):
        for rest in ((1, 1, 1), (1, 22, 22), (4, 64, 64), (16, 1, 4096), (1, 2048, 2048)):
            shape = (batch, *rest)
            elements = torch.Size(shape).numel()
            for training in (False, True):
                assert elements <= dense.MOST or not dense.is_fastest(shape, training, compiled)


def test_a_dot_product_goes_to_sdpa(compiled):
    assert (
        chosen(1, 8, 64, 64, dot=True) == "sdpa"
        and chosen(1, 8, 64, 64, dot=True, weights=True) == "reference"
    )


def test_a_bias_is_evaluated_in_compiled_tiles_and_columns_where_there_are_none(compiled):
    (q, k, v), at = (
        qkv(batch=1, heads=4, lq=64, d=4, dtype=torch.float32),
        torch.arange(64.0)[None, None],
    )
    number = torch.full((1,), 0.01)
    score = with_hype(dot_score(q, k), (at, at), number, number, "cosh", 64.0)
    assert dispatch.choose_engine(score, v, Options(), False) == ("cpu" if compiled else "sdpa")


def test_every_shape_gives_the_same_result_by_auto(compiled, monkeypatch):
    """On both sides of every threshold, with the blockwise engine in the compiled one's place."""
    monkeypatch.setitem(ENGINES, "cpu", ENGINES["blockwise"])
    monkeypatch.setattr(dispatch, "RESOLVED", {})
    for shape in ((3, 1, 22, 22), (1, 8, 32, 32), (1, 8, 33, 33), (1, 2, 1, 2048), (1, 2, 1, 2049)):
        q, k, v = qkv(
            batch=shape[0], heads=shape[1], lq=shape[2], lk=shape[3], d=4, dtype=torch.float32
        )
        exact = cone_attention(q.double(), k.double(), v.double(), backend="reference")
        assert (cone_attention(q, k, v) - exact).abs().max() < 1e-5


@needs_compiler
def test_few_queries_whose_products_are_of_a_part_are_of_another_kind(monkeypatch):
    """They are read as they are only where all of each vector is multiplied."""
    monkeypatch.setattr(dispatch, "RESOLVED", {})
    q, k, v = qkv(batch=1, heads=2, lq=1, lk=512, d=8, dtype=torch.float32)
    for width in (None, 5, None):
        term = ScoreTerm(DOT, lambda: q @ k.mT)
        out, _ = attention(PairScore(q, k, (term,), 1.0, width), v, backend="cpu")
        assert torch.allclose(
            out, torch.softmax(q[..., :width] @ k[..., :width].mT, -1) @ v, atol=1e-5
        )


@pytest.mark.parametrize("place", ["row", "column", "head"])
def test_numbers_of_any_kind_can_be_learned(place):
    q, k, v = qkv(batch=1, heads=2, lq=1, lk=8, d=4, dtype=torch.float32)
    shape = {"row": (1, 2, 1), "column": (1, 2, 8), "head": (2,)}[place]
    term = ScoreTerm(DOT, lambda: q @ k.mT, **{place: (torch.zeros(shape, requires_grad=True),)})
    assert requires_backward(PairScore(q, k, (term,)), v, Options())


def call_of(n=8, m=16, **changes):
    """A score, values and options; `changes` are of the term, of the score, and of the call."""
    q, k, v = qkv(batch=1, heads=2, lq=n, lk=m, d=4, dtype=torch.float32)
    term = {name: changes.pop(name) for name in TERM if name in changes}
    score = {name: changes.pop(name) for name in ("width", "make_features") if name in changes}
    name = changes.pop("term", "dot")
    v = changes.pop("value", lambda v: v)(v)
    q.requires_grad_(changes.pop("learned", False))
    terms = (ScoreTerm(TERMS[name], lambda: q @ k.mT, **term),)
    return replace(PairScore(q, k, terms), **score), v, Options(**changes)


TERM = ("gate", "capped", "reader", "low_rank_factors", "statistics")
FLOATS = torch.zeros(1, 1, 8, 16)
#: What an engine resolves otherwise, one at a time.
OTHERWISE = {
    "one query": dict(n=1),
    "more pairs": dict(n=16, m=64),
    "many pairs": dict(n=64, m=64),
    "wide values": dict(value=lambda v: v.repeat(1, 1, 1, 40)),
    "values in half precision": dict(value=torch.Tensor.bfloat16),
    "learned": dict(learned=True),
    "softcap": dict(softcap=5.0),
    "dropout": dict(dropout_p=0.1),
    "a mask that is learned": dict(mask=FLOATS.clone().requires_grad_()),
    "a bias that is learned": dict(bias=FLOATS.clone().requires_grad_()),
    "products of a part": dict(width=3),
    "features": dict(make_features=lambda: None),
    "term": dict(term="umbral"),
    "gate": dict(gate=torch.ones(2)),
    "capped": dict(capped=True),
    "reader": dict(reader=SimpleNamespace(name="one", parameters=(), head=())),
    "another reader": dict(reader=SimpleNamespace(name="two", parameters=(), head=())),
    "low rank": dict(low_rank_factors=lambda: None),
    "statistics": dict(statistics=lambda: None),
}


def test_calls_that_differ_in_one_thing_are_resolved_apart(monkeypatch):
    resolved = []

    def resolve(score, value, options, backend, weights):
        resolved.append(backend)
        return lambda *_: (value, None)

    monkeypatch.delenv("HF_HYPERATTN_NATIVE", raising=False)
    monkeypatch.setattr(dispatch, "resolve_engine", resolve)
    monkeypatch.setattr(dispatch, "RESOLVED", {})
    calls = {"plain": {}, **OTHERWISE}
    for again in (False, True):
        for name, changes in calls.items():
            before = len(resolved)
            attention(*call_of(**changes))
            assert len(resolved) == before + (not again), name
    attention(*call_of(), backend="blockwise")
    monkeypatch.setenv("HF_HYPERATTN_NATIVE", "0")
    attention(*call_of())
    with torch.no_grad():
        attention(*call_of(learned=True))  # as the plain one
    assert resolved[len(calls) :] == ["blockwise", "auto"]
