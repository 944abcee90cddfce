"""Every mechanism on every CPU engine under every kind of mask, against its definition under the same mask as bool.

A mask says which keys a query sees: padding, packed texts, a prefix that sees itself whole. It can say so in bool, or
add -inf, the lowest number of a dtype, -1e4 or -1e9 in float32, bfloat16 or float16. The result must be the same.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hf_hyperattn.functional as F
from hf_hyperattn.engines.options import hide_with_infinity, read_visible
from hf_hyperattn.hierarchy.windows import windows_tree
from hf_hyperattn.mechanisms.hsa.reference import definition_both, definition_key
from hf_hyperattn.mechanisms.sparse import reference as sparse_reference
from hf_hyperattn.rules import Exact, Pages, Window
from tests.oracles.cases import assert_close, tensor

BATCH, HEADS, WIDTH = 2, 2, 4
SIZES = (2, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMBERS = {"-inf": -torch.inf, "lowest": None, "-1e4": -1e4, "-1e9": -1e9}
QUICK = settings(max_examples=80, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Row:
    """Texts of one row: for every token the number of its text, -1 for padding; and how long prefixes are."""

    texts: tuple[int, ...]
    prefix: int = 0

    def sees(self, causal: bool) -> Tensor:
        """Bool [N, N], which keys each query sees. A query that is padding sees nothing."""
        text = torch.tensor(self.texts)
        place = torch.arange(len(text))
        seen = (text[:, None] == text) & (text >= 0)
        if not causal:
            return seen
        in_prefix = self.places < self.prefix
        return seen & ((place <= place[:, None]) | (in_prefix & in_prefix[:, None]))

    @property
    def places(self) -> Tensor:
        """int64 [N], the number of each token in its text; padding comes after every prefix."""
        text = torch.tensor(self.texts)
        same = (text[:, None] == text).tril(-1)
        return same.sum(1).masked_fill(text < 0, len(text))

    def of_texts(self) -> list[Tensor]:
        """The tokens of each text."""
        text = torch.tensor(self.texts)
        return [(text == number).nonzero()[:, 0] for number in sorted(set(self.texts) - {-1})]


def padded(draw, length: int) -> Row:
    """One text with padding at its left, its right, and inside."""
    left = draw(st.integers(0, length - 1))
    right = draw(st.integers(0, length - 1 - left))
    texts = [-1] * left + [0] * (length - left - right) + [-1] * right
    hole = draw(st.none() | st.integers(0, length - 1))
    if hole is not None and texts.count(0) > 1:
        texts[hole] = -1
    return Row(tuple(texts))


def packed(draw, length: int) -> Row:
    """Up to three texts one after the other, with padding before the first."""
    cuts = sorted(draw(st.lists(st.integers(1, length), max_size=2)))
    left = draw(st.integers(0, 2 if length > 2 else 0))
    texts = [sum(i >= cut for cut in cuts) for i in range(length)]
    return Row(tuple([-1] * left + texts[left:]))


def with_prefix(draw, length: int) -> Row:
    """A padded text whose first tokens see each other."""
    return Row(padded(draw, length).texts, draw(st.integers(1, length)))


@dataclass(frozen=True)
class Case:
    """A call: what its queries see, the form of the mask that says it, and the seed of its vectors."""

    rows: tuple[Row, ...]
    causal: bool
    number: str | None
    dtype: torch.dtype
    seed: int

    @property
    def seen(self) -> Tensor:
        """Bool [B, 1, N, N], which keys each query sees."""
        return torch.stack([row.sees(self.causal) for row in self.rows])[:, None]

    @property
    def mask(self) -> Tensor:
        """The mask in the form that is passed."""
        if self.number is None:
            return self.seen
        added = torch.finfo(self.dtype).min if self.number == "lowest" else NUMBERS[self.number]
        return torch.zeros(self.seen.shape).masked_fill(~self.seen, added).to(self.dtype)

    @property
    def vectors(self) -> list[Tensor]:
        """Query, key, value, key2 and value2 in float64, of numbers that float32 holds."""
        shape = (BATCH, HEADS, len(self.rows[0].texts), WIDTH)
        return [tensor(*shape, seed=self.seed + i, scale=2.0).float().double() for i in range(5)]


@st.composite
def cases(draw, kinds=(padded, packed, with_prefix), causal=None) -> Case:
    length = draw(st.integers(2, 13))
    kind = draw(st.sampled_from(kinds))
    return Case(
        rows=tuple(kind(draw, length) for _ in range(BATCH)),
        causal=kind is with_prefix or (draw(st.booleans()) if causal is None else causal),
        number=draw(st.sampled_from([None, *NUMBERS])),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 1000)),
    )


def check(case: Case, function, expected: Tensor, backend: str, dtype=torch.float32) -> None:
    """The function with the mask as it is passed, in a dtype, gives what is expected."""
    vectors = (t.to(dtype) for t in case.vectors[:3])
    got = function(*vectors, attn_mask=case.mask, backend=backend)
    assert_close(got, expected, 1e-4, f"{case.mask.dtype} mask {case.mask[0, 0].tolist()}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minus_ten_thousand_hides_in_every_dtype(dtype):
    """bfloat16 makes it -9984, and a mask may be widened after that, or have a bias added."""
    mask = torch.tensor([-10_000.0, 0.0, -9_800.0], dtype=dtype)
    assert read_visible(mask.float() + 5.0).tolist() == [False, True, True]
    assert hide_with_infinity(mask).isneginf().tolist() == [True, False, False]


# Scores, mixed heads and three-way attention: `reference` is their definition.


MIX = torch.tensor([[0.7, 0.3], [-0.2, 1.1]])
FUNCTIONS = {
    "cone": (partial(F.cone_attention, variant="umbral", mapping="xi"), ("reference", "blockwise", "cpu")),
    "hyperbolic": (partial(F.hyperbolic_attention, aggregation="mean"), ("reference", "blockwise", "cpu")),
    "midpoint": (partial(F.hyperbolic_attention, aggregation="einstein"), ("reference", "blockwise", "cpu")),
    "hype": (partial(F.hype_attention, mu=0.2, tau=0.3), ("reference", "blockwise", "cpu", "sdpa")),
    "mkl": (partial(F.mkl_attention, beta=torch.tensor([0.5, -0.5])), ("reference", "blockwise", "cpu", "sdpa")),
    "mkl combined": (
        partial(F.mkl_attention, beta=torch.tensor([0.5, -0.5]), combine=True),
        ("reference", "blockwise", "cpu", "sdpa"),
    ),
    "talking heads": (
        partial(F.talking_heads_attention, before=MIX, after=MIX.T),
        ("reference", "blockwise"),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@QUICK
@given(case=cases(), data=st.data())
def test_scores(name, case, data):
    function, backends = FUNCTIONS[name]
    backend = data.draw(st.sampled_from((*backends, "auto")), "backend")
    expected = function(*case.vectors[:3], attn_mask=case.seen, backend="reference")
    assert not expected[~case.seen.any(-1).expand(-1, HEADS, -1)].any(), "queries that see no key"
    check(case, function, expected, backend)


@QUICK
@given(
    case=cases(),
    windows=st.sampled_from([None, (3, 2)]),
    backend=st.sampled_from(["reference", "blockwise", "auto"]),
)
def test_trilinear(case, windows, backend):
    def function(query, key, value, **rest):
        key2, value2 = (t.to(query.dtype) for t in case.vectors[3:])
        return F.trilinear_attention(query, key, value, key2=key2, value2=value2, windows=windows, **rest)

    expected = function(*case.vectors[:3], attn_mask=case.seen, backend="reference")
    check(case, function, expected, backend)


# Hierarchical attention: the definition knows one text without padding, so it is asked text by text.


def text_by_text(case: Case, define) -> Tensor:
    """[B, H, N, dv]: the weights [H, n, n] that `define(logits, seen)` gives of every text, times its values."""
    query, key, value = case.vectors[:3]
    out = torch.zeros_like(value)
    for b, row in enumerate(case.rows):
        for at in row.of_texts():
            logits = query[b, :, at] @ key[b, :, at].mT * WIDTH**-0.5
            out[b, :, at] = define(logits, case.seen[b, 0][at][:, at]) @ value[b, :, at]
    return out


RULES = {
    "closed": dict(),
    "near": dict(near=2),
    "sinks": dict(sinks=1),
    "refined": dict(refine_top_k=1),
    "all": dict(near=1, sinks=1, refine_top_k=1),
}


ways = dict(rule=st.sampled_from([*RULES]), backend=st.sampled_from(["auto", "torch"]))


@QUICK
@given(case=cases(), **ways)
def test_key_tied(case, rule, backend):
    def define(logits, seen):
        tree = windows_tree(logits.shape[-1], SIZES)
        return definition_key(logits, tree, visible=seen, **RULES[rule])

    function = partial(F.hierarchical_attention, hierarchy=SIZES, tying="key", **RULES[rule])
    check(case, function, text_by_text(case, define), backend)


@QUICK
@given(case=cases(kinds=(padded, packed), causal=True), **ways)
def test_key_tied_and_causal(case, rule, backend):
    """`is_causal` and the mask say the same of later tokens."""

    def define(logits, seen):
        return definition_key(logits, windows_tree(logits.shape[-1], SIZES), visible=seen, **RULES[rule])

    function = partial(F.hierarchical_attention, hierarchy=SIZES, tying="key", is_causal=True, **RULES[rule])
    check(case, function, text_by_text(case, define), backend)


@QUICK
@given(case=cases(kinds=(padded,), causal=False))
def test_both_tied(case):
    def define(logits, seen):
        return definition_both(logits, windows_tree(logits.shape[-1], SIZES))[0]

    check(case, partial(F.hierarchical_attention, hierarchy=SIZES), text_by_text(case, define), "auto")


@QUICK
@given(case=cases(kinds=(packed, with_prefix)))
def test_both_tied_refuses_masks_that_hide_more_than_padding(case):
    as_padding = (torch.tensor(row.texts) >= 0 for row in case.rows)
    if not all(torch.equal(seen, real & real[:, None]) for seen, real in zip(case.seen[:, 0], as_padding)):
        with pytest.raises(ValueError, match="a mask that hides more than padding"):
            check(case, partial(F.hierarchical_attention, hierarchy=SIZES), case.vectors[2], "auto")


# Sparse rules.

SPARSE = {
    "exact": Exact(),
    "window": Window(near=3, sinks=0),
    "window and sinks": Window(near=2, sinks=1),
    "pages": Pages(page=2, top=1, near=2, sinks=1),
}


#: Rules by which a query sees the same wherever its text begins.
LOCAL = ("exact", "window")


@QUICK
@given(
    case=cases(kinds=(padded, packed), causal=True),
    rule=st.sampled_from([*SPARSE]),
    backend=st.sampled_from(["reference", "blockwise", "cpu", "sdpa", "auto"]),
)
def test_sparse(case, rule, backend):
    function = partial(F.sparse_attention, rules=SPARSE[rule], is_causal=True)
    if rule not in LOCAL and any(len(row.of_texts()) > 1 for row in case.rows):
        with pytest.raises(ValueError, match="its rules know rows of one whole text"):
            check(case, function, case.vectors[2], backend)
        return
    expected = torch.zeros_like(case.vectors[2])
    for b, row in enumerate(case.rows):
        for at in row.of_texts():
            for h in range(HEADS):
                text = (t[b, h, at] for t in case.vectors[:3])
                expected[b, h, at] = sparse_reference.attention(SPARSE[rule], *text, WIDTH**-0.5)
    check(case, function, expected, backend)
