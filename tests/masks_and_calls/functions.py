"""Attention functions beside their definitions, which are evaluated in float64, one text after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

import hf_hyperattn.functional as F
from hf_hyperattn.hierarchy.windows import windows_tree
from hf_hyperattn.mechanisms.cone import reference as cone
from hf_hyperattn.mechanisms.hsa.reference import definition_both
from hf_hyperattn.mechanisms.hype import reference as hype
from hf_hyperattn.mechanisms.hyperbolic import reference as hyperbolic
from hf_hyperattn.mechanisms.mkl import reference as mkl
from hf_hyperattn.mechanisms.sparse import reference as sparse
from hf_hyperattn.rules import Exact, Pages, SparseRule, Window
from tests.oracles import key_tying
from tests.oracles.hyperbolic import dense_midpoints

from .texts import DTYPES, FORMS, Form, Row, draw_packed, draw_padded, draw_prefix, draw_windowed

HEADS, WIDTH = 2, 4
SCALE = WIDTH**-0.5  # 0.5, by which no number is rounded
#: How far a result may be from the definition, as a share of its largest number. Arithmetic is float32 for all.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
#: Where query and key are nearly one point, or far out, engines may lose this much (see tests/test_functional.py).
NEAR_OR_FAR = 5e-3
#: MKL rounds weighted queries to their own dtype, so that fused kernels of half precision take them.
WEIGHTED = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
#: How vectors are drawn. Sums of round numbers are exact, so that choices among equals are defined.
VECTORS = (
    "normal",
    "large",
    "equal keys",
    "nearly equal keys",
    "queries that are keys",
    "round",
    "round and equal",
)


@dataclass(frozen=True)
class Text:
    """One text: queries [H, n, d], keys and values [Hkv, n, d], and what else its definition reads.

    Args:
        seen: bool [n, n], which keys each query sees.
        slots: int64 [n], where its tokens stand in the row.
        second: key and value of three-way attention, as `key` and `value`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    seen: Tensor
    slots: Tensor
    second: tuple[Tensor, Tensor]

    def by_head(self, t: Tensor) -> Tensor:
        """Return keys or values [H, n, d]."""
        return t.repeat_interleave(HEADS // len(t), 0)

    @property
    def dots(self) -> Tensor:
        """[H, n, n], scaled."""
        return SCALE * self.query @ self.by_head(self.key).mT

    def weights(self, logits: Tensor) -> Tensor:
        """Return the softmax of logits [H, n, n] over what is seen."""
        return torch.softmax(logits.masked_fill(~self.seen, -torch.inf), -1)

    def mean(self, logits: Tensor) -> Tensor:
        """Return the values averaged by logits, [H, n, dv]."""
        return self.weights(logits) @ self.by_head(self.value)


# Definitions: a text to its result [H, n, dv].


GAMMA, RADIUS = torch.tensor([0.7, 1.6]), torch.tensor([1.5, 0.8])
CURVATURE, TEMPERATURE = torch.tensor([0.5, 1.5]), torch.tensor([1.2, 0.6])
MU, TAU = torch.tensor([0.1, 0.3]), torch.tensor([1.0, 0.4])
MIX = torch.tensor([[0.7, 0.3], [-0.2, 1.1]])
BETA = torch.tensor([0.5, -0.5])
SIZES = (2, 4)


def cone_of(text: Text, **space) -> Tensor:
    logits = cone.definition(
        text.query[None], text.key[None], GAMMA.double(), RADIUS.double(), **space
    )
    return text.mean(logits[0])


def hyperbolic_of(text: Text, distance: str, aggregation: str) -> Tensor:
    numbers = CURVATURE.double(), TEMPERATURE.double()
    logits = hyperbolic.definition(
        text.query[None], text.key[None], *numbers, scale=SCALE, distance=distance
    )
    if aggregation == "mean":
        return text.mean(logits[0])
    value = text.value.where(
        text.value.norm(dim=-1, keepdim=True) > 0, 1e-9
    )  # the oracle divides by lengths
    return dense_midpoints(
        text.weights(logits), value[None], curvature=CURVATURE.double(), scale=SCALE
    )[0]


def hype_of(text: Text, form: str) -> Tensor:
    place = torch.arange(len(text.slots)).double()[None, None]
    bias = hype.definition(place, place, MU.double(), TAU.double(), form)
    return text.mean(text.dots + bias[0])


def mkl_of(text: Text, combine: bool) -> Tensor:
    logits = mkl.weighted(text.dots[None], mkl.head_weights(BETA.double()))
    return text.mean(mkl.combined(logits)[0].expand(HEADS, -1, -1) if combine else logits[0])


def talking_of(text: Text) -> Tensor:
    mixed = torch.einsum("hg,gnm->hnm", MIX.double(), text.dots)
    return torch.einsum("hg,gnm->hnm", MIX.T.double(), text.weights(mixed)) @ text.by_head(
        text.value
    )


def trilinear_of(text: Text, windows: tuple[int, int] | None, causal: bool) -> Tensor:
    key2, value2 = map(text.by_head, text.second)
    logits = SCALE * torch.einsum("hnd,hjd,hkd->hnjk", text.query, text.by_head(text.key), key2)
    back = text.slots[:, None] - text.slots
    first = second = text.seen
    if windows is not None:
        near = [back.abs() < w if not causal else (back < w) & (back >= 0) for w in windows]
        first, second = (text.seen & n for n in near)
    logits = logits.masked_fill(~(first[:, :, None] & second[:, None]), -torch.inf)
    weights = torch.softmax(logits.flatten(-2), -1).unflatten(-1, logits.shape[-2:])
    return torch.einsum("hnjk,hjv,hkv->hnv", weights, text.by_head(text.value), value2)


def key_tied_of(text: Text, **rule) -> Tensor:
    count = len(text.slots)
    tree, window = (
        key_tying.windows(0, count, SIZES),
        partial(key_tying.bottom_window, first=0, last=count, size=2),
    )
    weights = [
        key_tying.weights(logits, tree, window, visible=text.seen, **rule) for logits in text.dots
    ]
    return torch.stack(weights) @ text.by_head(text.value)


def both_tied_of(text: Text, keep_diagonal: bool = True) -> Tensor:
    tree = windows_tree(len(text.slots), SIZES)
    return definition_both(text.dots, tree, keep_diagonal)[0] @ text.by_head(text.value)


def sparse_of(text: Text, rule: SparseRule) -> Tensor:
    out = torch.zeros(*text.query.shape[:2], text.value.shape[-1], dtype=torch.float64)
    key, value = text.by_head(text.key), text.by_head(text.value)
    for h, query in enumerate(text.query):
        for i, tokens in enumerate(sparse.list_seen(rule, query, key[h], SCALE)):
            tokens = [j for j in sorted(tokens) if text.seen[i, j]]
            out[h, i] = torch.softmax(SCALE * key[h, tokens] @ query[i], 0) @ value[h, tokens]
    return out


# Functions, and what may be drawn for them.


@dataclass(frozen=True)
class Function:
    """An attention function and its definition.

    Args:
        call: takes query, key, value, attn_mask, is_causal, backend, and what `extra` gives.
        define: a text to its result.
        backends: engines that it has besides "auto".
        rows: how rows may be drawn.
        causal: True or False where it is so always; None where either is drawn.
        chooses: whether it chooses keys by their scores, so that rounding may decide.
        extra: arguments that depend on the case.
        fewer: "last" where the queries may be the last ones of the keys, "first" for the first ones, or None.
    """

    call: Callable[..., Tensor]
    define: Callable[..., Tensor]
    backends: tuple[str, ...] = ("reference", "blockwise", "cpu")
    rows: tuple[Callable, ...] = (draw_padded, draw_packed, draw_prefix, draw_windowed)
    causal: bool | None = None
    chooses: bool = False
    extra: Callable[[Case], dict] = lambda case: {}
    fewer: str | None = "last"


ALL = ("reference", "blockwise", "cpu", "sdpa")


def cone_function(variant: str, mapping: str) -> Function:
    space = dict(
        variant=variant, mapping=mapping, squared=True, clamp_heights=variant == "penumbral"
    )
    call = partial(F.cone_attention, gamma=GAMMA, radius=RADIUS, **space)
    return Function(call, partial(cone_of, **space))


def hyperbolic_function(distance: str, aggregation: str) -> Function:
    space = dict(distance=distance, aggregation=aggregation)
    call = partial(
        F.hyperbolic_attention, curvature=CURVATURE, temperature=TEMPERATURE, scale=SCALE, **space
    )
    return Function(call, partial(hyperbolic_of, **space))


def hype_function(form: str) -> Function:
    def places(case: Case) -> dict:
        place = torch.stack([row.places for row in case.rows])
        return dict(query_positions=place[:, case.asked], key_positions=place)

    call = partial(F.hype_attention, mu=MU, tau=TAU, form=form)
    return Function(call, partial(hype_of, form=form), ALL, extra=places)


def mkl_function(combine: bool) -> Function:
    return Function(
        partial(F.mkl_attention, beta=BETA, combine=combine), partial(mkl_of, combine=combine), ALL
    )


def trilinear_function(windows: tuple[int, int] | None, causal: bool | None) -> Function:
    def second(case: Case) -> dict:
        key2, value2 = case.vectors[3:]
        return dict(key2=key2, value2=value2)

    def call(*vectors, **options) -> Tensor:
        return F.trilinear_attention(*vectors, windows=windows, **options)

    return Function(
        call,
        partial(trilinear_of, windows=windows, causal=causal),
        backends=("reference", "blockwise"),
        rows=(draw_padded, draw_packed),
        causal=causal,
        extra=second,
        fewer="last" if windows is None else "first",
    )


def key_tied_function(refine_top_k: int = 0, **rule) -> Function:
    given = dict(rule, refine_top_k=refine_top_k)
    call = partial(F.hierarchical_attention, hierarchy=SIZES, tying="key", **given)
    return Function(
        call,
        partial(key_tied_of, top_k=refine_top_k, **rule),
        ("torch",),
        chooses=refine_top_k > 0,
        fewer=None,
    )


def sparse_function(rule: SparseRule, rows: tuple[Callable, ...]) -> Function:
    return Function(
        partial(F.sparse_attention, rules=rule),
        partial(sparse_of, rule=rule),
        ALL,
        rows=rows,
        causal=True,
        chooses=isinstance(rule, Pages),
        extra=lambda case: dict(first=case.queries[0]),
    )


FUNCTIONS = {
    "cone": cone_function("umbral", "xi"),
    "cone, penumbral": cone_function("penumbral", "psi"),
    "hyperbolic": hyperbolic_function("geodesic", "einstein"),
    "hyperbolic, squared": hyperbolic_function("squared_lorentz", "mean"),
    "hype": hype_function("sinh"),
    "hype, cosh": hype_function("cosh"),
    "mkl": mkl_function(False),
    "mkl, combined": mkl_function(True),
    "talking heads": Function(
        partial(F.talking_heads_attention, before=MIX, after=MIX.T),
        talking_of,
        ("reference", "blockwise"),
    ),
    "trilinear": trilinear_function(None, None),
    "trilinear, windows": trilinear_function((3, 2), True),
    "hsa": key_tied_function(),
    "hsa, near": key_tied_function(near=2, block_bias=0.3),
    "hsa, sinks": key_tied_function(sinks=1),
    "hsa, refined": key_tied_function(near=1, sinks=1, refine_top_k=1),
    "hsa, both": Function(
        partial(F.hierarchical_attention, hierarchy=SIZES),
        both_tied_of,
        backends=(),
        rows=(draw_padded,),
        causal=False,
        fewer=None,
    ),
    "sparse, exact": sparse_function(Exact(), (draw_padded, draw_packed, draw_windowed)),
    "sparse, window": sparse_function(
        Window(near=3, sinks=0), (draw_padded, draw_packed, draw_windowed)
    ),
    "sparse, sinks": sparse_function(Window(near=2, sinks=1), (draw_padded, draw_packed)),
    "sparse, pages": sparse_function(
        Pages(page=2, top=1, near=2, sinks=1), (draw_padded, draw_packed)
    ),
    "sparse, mean pages": sparse_function(
        Pages(page=2, top=1, near=1, sinks=0, summary="mean"), (draw_padded,)
    ),
}
#: What a function may refuse, and what its sentence then says.
REFUSALS = {
    "sparse, sinks": ("several texts", "its rules know rows of one whole text"),
    "sparse, pages": ("several texts", "its rules know rows of one whole text"),
}


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        rows: what its rows hold.
        queries: the tokens of the queries, first and behind the last.
        causal: whether a query sees later tokens.
        flag: whether `is_causal` says so, too.
        form: of the mask.
        dtype: of the vectors.
        kv_heads: heads of keys and values.
        kind: how vectors are drawn, by `seed`.
    """

    rows: tuple[Row, ...]
    queries: tuple[int, int]
    causal: bool
    flag: bool
    form: Form
    dtype: torch.dtype
    kv_heads: int
    kind: str
    seed: int

    @property
    def length(self) -> int:
        """M."""
        return len(self.rows[0].texts)

    @property
    def asked(self) -> slice:
        """The tokens of the queries."""
        return slice(*self.queries)

    @property
    def seen(self) -> Tensor:
        """Bool [B, 1, M, M], which keys each query sees."""
        return torch.stack([row.sees(self.causal) for row in self.rows])[:, None]

    @property
    def facts(self) -> set[str]:
        """Names of what a function may refuse."""
        return {"several texts"} if max(len(row.of_texts()) for row in self.rows) > 1 else set()

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """Query of all tokens, key, value, key2, value2."""
        generator = torch.Generator().manual_seed(self.seed)
        draw = partial(torch.randn, generator=generator)
        batch, heads, length = len(self.rows), self.kv_heads, self.length
        query = draw(batch, HEADS, length, WIDTH)
        key, value, key2, value2 = draw(4, batch, heads, length, WIDTH)
        if self.kind.startswith("round"):
            query, key, value, key2, value2 = (
                t.mul(1.5).round() for t in (query, key, value, key2, value2)
            )
        if self.kind == "large":
            query, key = 6 * query, 2 * key
        if self.kind == "nearly equal keys":
            key = key[:, :, :1] + 1e-5 * key
        if self.kind.endswith("and equal") or self.kind == "equal keys":
            pick = torch.randint(0, min(2, length), (length,), generator=generator)
            key = key[:, :, pick]
        if self.kind == "queries that are keys":
            query = key.repeat_interleave(HEADS // heads, 1)
        return tuple(t.to(self.dtype) for t in (query, key, value, key2, value2))


@st.composite
def draw_cases(draw, function: Function) -> Case:
    length = draw(st.integers(1, 12))
    kinds = function.rows if length > 1 else (draw_padded,)
    kind = draw(st.sampled_from(kinds))
    rows = tuple(kind(draw, length) for _ in range(draw(st.integers(1, 2))))
    causal = function.causal
    causal = (kind is draw_prefix or draw(st.booleans())) if causal is None else causal
    count = draw(st.integers(1, length)) if function.fewer and draw(st.booleans()) else length
    queries = (length - count, length) if function.fewer == "last" else (0, count)
    flag = causal and kind is not draw_prefix and not queries[0] and draw(st.booleans())
    return Case(
        rows,
        queries,
        causal,
        flag,
        form=draw(FORMS),
        dtype=draw(st.sampled_from(DTYPES)),
        kv_heads=draw(st.sampled_from([1, 2])),
        kind=draw(st.sampled_from(VECTORS)),
        seed=draw(st.integers(0, 10**6)),
    )


def call_function(name: str, case: Case, backend: str) -> Tensor:
    """Return [B, H, N, dv], what the function gives."""
    function = FUNCTIONS[name]
    query, key, value = case.vectors[:3]
    return function.call(
        query[:, :, case.asked],
        key,
        value,
        attn_mask=case.form.write(case.seen[:, :, case.asked]),
        is_causal=case.flag or name.startswith("sparse"),
        enable_gqa=True,
        backend=backend,
        **function.extra(case),
    )


def evaluate_definition(name: str, case: Case, noise: float = 0.0) -> Tensor:
    """Return float64 [B, H, N, dv], text by text. Padding gets zeros.

    Args:
        noise: the share by which numbers of queries and keys are changed.
    """
    query, key, value, key2, value2 = (t.double() for t in case.vectors)
    if noise:
        generator = torch.Generator().manual_seed(0)
        query, key = (
            t * (1 + noise * torch.randn(t.shape, generator=generator)) for t in (query, key)
        )
    out = torch.zeros_like(query)
    for b, (row, seen) in enumerate(zip(case.rows, case.seen[:, 0], strict=True)):
        for at in row.of_texts():
            parts = (t[b][:, at] for t in (query, key, value))
            text = Text(*parts, seen[at][:, at], at, (key2[b][:, at], value2[b][:, at]))
            out[b, :, at] = FUNCTIONS[name].define(text)
    return out[:, :, case.asked]


def tolerance(name: str, case: Case) -> float:
    """Return how far a result may be off, as a share of the largest number."""
    share = TOLERANCE[case.dtype]
    if name.startswith(("cone", "hyperbolic")) and case.kind in (
        "nearly equal keys",
        "queries that are keys",
        "large",
    ):
        share = max(share, NEAR_OR_FAR)
    return max(share, WEIGHTED.get(case.dtype, 0.0)) if name.startswith("mkl") else share


def is_clear(name: str, case: Case, expected: Tensor) -> bool:
    """Whether rounding cannot change what is chosen: sums are exact, or a small change changes little."""
    if not FUNCTIONS[name].chooses or case.kind.startswith("round"):
        return True
    scale = float(expected.abs().max())
    return all(
        float((evaluate_definition(name, case, sign * 1e-5) - expected).abs().max()) <= 1e-3 * scale
        for sign in (1, -1)
    )
