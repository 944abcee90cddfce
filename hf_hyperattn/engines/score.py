"""The pair-score contract: all that an engine knows about a mechanism.

An engine computes softmax(S)·V without ever seeing a mechanism. What it sees is a `PairScore`: features whose dot
product it forms tile by tile, and one or more *terms*, each a `Term` (cheap arithmetic on a tile) with the per-row,
per-column and per-head numbers that it reads. The logit of a pair is the sum of the terms:

    S_ij = term_0(q̂_i · k̂_j, row_i, column_j, head) + gate_1 · term_1(...) + ...

Dot product, cone, hyperbolic distance, HyPE and their blends all have this form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attached import attach, attached_to
from ..readable import is_exporting, is_forward_mode, is_transformed
from .graph_torch import graph_of, vjp
from .options import Options

#: All terms by name. An engine's custom operator carries a score as the names of its terms, since an operator's
#: arguments can be tensors, numbers and strings, but not functions.
TERMS: dict[str, Term] = {}


class Numbers(NamedTuple):
    """What a term reads beside the product.

    Args:
        row: statistics of queries, each [B, H, N].
        column: statistics of keys, each [B, H, M] or, where they do not differ within a group, [B, Hkv, M].
        head: parameters of query heads, each [H].
        factors: of a score that has its own features: a factor per query [B, H, N] and per key [B, Hkv, M] by which
            the vectors are these.
    """

    row: Sequence[Tensor] = ()
    column: Sequence[Tensor] = ()
    head: Sequence[Tensor] = ()
    factors: tuple[Tensor, Tensor] | None = None


#: Squared distances from differences, see `Term`.
SquaredDistances = Callable[[Tensor | None], Tensor]


class Term:
    """Arithmetic on one tile of pairs; holds no tensors.

    Shapes inside a tile: `dot` is [..., R, C], row statistics are [..., R, 1], column statistics [..., 1, C], head
    parameters [..., 1, 1]; everything broadcasts. `squared_distance`, where there is one, is a function from chosen
    pairs, bool [..., R, C], or None for all of them, to the squared distances of their points, computed from
    differences, and NaN for the others: for pairs whose expansion of the distance through `dot` is too inexact.

    Subclasses set `name`, the counts `rows`, `columns`, `heads`, and `logits`. Compiled engines write their form of it,
    and of its derivative, from `logits`, if that is plain arithmetic (engines/trace.py says what is). Terms override
    `vjp` where a derivative by hand is faster in blocks.
    """

    name: str
    rows: int = 0
    columns: int = 0
    heads: int = 0

    def logits(
        self,
        dot: Tensor,
        row: Sequence[Tensor],
        column: Sequence[Tensor],
        head: Sequence[Tensor],
        squared_distance: SquaredDistances | None = None,
    ) -> Tensor:
        """The term's share of the logits, [..., R, C]."""
        raise NotImplementedError

    def vjp(
        self,
        dot: Tensor,
        row: Sequence[Tensor],
        column: Sequence[Tensor],
        head: Sequence[Tensor],
        squared_distance: SquaredDistances | None = None,
    ) -> tuple[Tensor, Callable]:
        """The logits, and a function from their gradient to `(d_dot, d_rows, d_columns, d_heads)`.

        A gradient may be None (zero), may have its argument's shape, or may be left tile-shaped: the engine sums it
        to the argument's shape. A term that took distances from differences returns a fifth one, d_square, of
        these distances and 0 elsewhere: the gradients by the product and by the norms would cancel. The default takes
        all of them from the product form, by the derivative of the term's graph, or by automatic differentiation.
        """
        graph = graph_of(self)
        if graph is not None:
            return vjp(graph, dot, row, column, head)
        a, b = 1 + len(row), 1 + len(row) + len(column)

        def logits(*numbers: Tensor) -> Tensor:
            return self.logits(numbers[0], numbers[1:a], numbers[a:b], numbers[b:])

        # engines call this inside an operator, where autograd is switched off; torch.func has a tape of its own
        out, pull, *_ = torch.func.vjp(logits, dot, *row, *column, *head)

        def pullback(grad):
            g = pull(grad)
            return g[0], g[1:a], g[a:b], g[b:]

        return out if squared_distance is None else self.logits(
            dot, row, column, head, squared_distance
        ), pullback


class DistanceTerm(Term):
    """A term that reads a squared distance of features: |query_factor · q - key_factor · k|².

    Engines take it from the product, and for the pairs for which that cancels from differences. All methods are plain
    arithmetic on a tile. The `points` of a score with such a term are the features times the factors.
    """

    left_out = 0  # numbers at a vector's end that its point has not

    def by_product(self, dot, row, column, head) -> Tensor:
        """The squared distance from the product."""
        raise NotImplementedError

    def is_inexact(self, squared_distance, row, column, head) -> Tensor:
        """Which pairs to take from differences, bool, told by the distance from the product."""
        raise NotImplementedError

    def factors(self, row, column, head) -> tuple[Tensor | float, Tensor | float]:
        """(query_factor, key_factor)."""
        return 1.0, 1.0

    def score(self, dot, row, column, head, squared_distance) -> Tensor:
        """The logits."""
        raise NotImplementedError

    def logits(self, dot, row, column, head, squared_distance=None):
        squared, _ = self.squared_distances(dot, row, column, head, squared_distance)
        return self.score(dot, row, column, head, squared)

    def squared_distances(
        self, dot, row, column, head, squared_distance=None
    ) -> tuple[Tensor, Tensor | None]:
        """All squared distances, and which of them were taken from differences, bool, or None for no one."""
        squared = self.by_product(dot, row, column, head)
        if squared_distance is None:
            return squared, None
        inexact = self.is_inexact(squared, row, column, head)
        if not inexact.any():
            return squared, None
        exact = squared_distance(inexact)
        near = ~exact.isnan()
        return torch.where(near, exact, squared), near

    def vjp(self, dot, row, column, head, squared_distance=None):
        squared, near = self.squared_distances(dot, row, column, head, squared_distance)
        graph: Any = graph_of(self, required=True)
        return vjp(graph, dot, row, column, head, squared, near)


class DerivedDistanceTerm(DistanceTerm):
    """A `DistanceTerm` with a derivative by hand for engines in torch. Compiled ones derive that of `score`."""

    def derive(self, row, column, head, squared_distance) -> tuple[Tensor, Callable]:
        """The logits, and a function from their gradient to `(d_squared_distance, d_rows, d_columns, d_heads)`, with
        the statistics that it reads, which come before those of the product.
        """
        raise NotImplementedError

    def through_product(
        self, d_squared, dot, row, column
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """Gradients of the product and of the further statistics from that of `by_product`; may overwrite it."""
        raise NotImplementedError

    def score(self, dot, row, column, head, squared_distance):
        return self.derive(row, column, head, squared_distance)[0]

    def logits(self, dot, row, column, head, squared_distance=None):
        squared, _ = self.squared_distances(dot, row, column, head, squared_distance)
        return self.derive(row, column, head, squared)[0]

    def vjp(self, dot, row, column, head, squared_distance=None):
        squared, near = self.squared_distances(dot, row, column, head, squared_distance)
        logits, pull = self.derive(row, column, head, squared)

        def pullback(grad):
            d_squared, d_row, d_column, d_head = pull(grad)
            exact = ()
            if near is not None:
                exact = (torch.where(near, d_squared, 0.0),)
                d_squared.masked_fill_(near, 0.0)
            d_dot, more_row, more_column = self.through_product(d_squared, dot, row, column)
            return d_dot, (*d_row, *more_row), (*d_column, *more_column), d_head, *exact

        return logits, pullback


def register_term(term: Term) -> Term:
    """Make a term known to the engines under its name; a second term of the same name is refused."""
    if term.name in TERMS:
        raise ValueError(
            f"term {term.name!r} is registered already, by {type(TERMS[term.name]).__name__}"
        )
    TERMS[term.name] = term
    return term


class DotTerm(Term):
    """The plain dot product of the features (any scaling is folded into them)."""

    name = "dot"

    def logits(self, dot, row, column, head, squared_distance=None):
        return dot

    def vjp(self, dot, row, column, head, squared_distance=None):
        return dot, lambda grad: (grad, (), (), ())


DOT = register_term(DotTerm())


@dataclass(frozen=True)
class Reader:
    """How a term's statistics are made of vectors, for engines that read each key once, for one query or a few.

    Args:
        name: among all readers.
        read: from lists of tensors, `(d,)`, `(last number, sum of the squares of the numbers that points have)` and
            parameters, to the factor by which a vector is its point and the term's first statistics: plain arithmetic
            (see `Term`). Distances are taken from differences then, so that what only `by_product` reads is left out.
        parameters: how many there are.
        left_out: numbers at a vector's end that its point has not.
        columns: how many numbers it takes in place of the two, where it reads no vectors (`Aggregation`).
    """

    name: str
    read: Callable[
        [Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]
    ]
    parameters: int
    left_out: int = 0
    columns: int = 2


#: All readers by name.
READERS: dict[str, Reader] = {}


@dataclass(frozen=True, eq=False)
class VectorReader:
    """A term's reader, with its numbers.

    Args:
        name: the reader's, among READERS.
        parameters: what it takes: numbers, or tensors [H] or [1].
        head: what the term itself takes then: numbers, or tensors [H].
    """

    name: str
    parameters: tuple[Tensor | float, ...]
    head: tuple[Tensor | float, ...] = ()


@dataclass(frozen=True)
class Points:
    """What distances are measured between."""

    query: Tensor  # [B, H, N, p]
    key: Tensor  # [B, Hkv, M, p]


@dataclass(frozen=True, eq=False)
class ScoreTerm:
    """A term with its numbers, and the definition it must agree with.

    Args:
        term: the arithmetic that tile engines do.
        definition: returns the term's dense logits [B, H, N, M] straight from the published formula and from
            differences of points. `reference` evaluates this and nothing else.
        row, column, head: as in `Numbers`.
        gate: the term's weight per query head, [H], or None for 1.
        statistics: returns its `Numbers`, for terms that make them when an engine asks, in place of the three.
        low_rank_factors: for a term that reads no features and has low rank: returns float64 factors
            [B|1, H|1, N, c] and [B|1, H|1, M, c] and numbers a row [B|1, H|1, N]; the logits are the factors' product
            over c plus the row's number. None where there are none, or where float32 sums would be too inexact.
        linear_features: returns features [B, H, N, e] and [B, Hkv or H, M, e] whose plain product is the term, for
            what needs a score that is linear in the key. None where there are none.
        capped: whether `softcap` acts on it, as it does on the first term: where it takes that one's place in some
            heads.
        reader: makes statistics from vectors, where the room has that.
        points: returns the points whose distances the term is a function of, None where it is of none. Terms then take
            the distances of those pairs from differences for which the product form cancels.
    """

    term: Term
    definition: Callable[[], Tensor]
    row: tuple[Tensor, ...] = ()
    column: tuple[Tensor, ...] = ()
    head: tuple[Tensor, ...] = ()
    gate: Tensor | None = None
    statistics: Callable[[], Numbers] | None = None
    low_rank_factors: Callable[[], tuple[Tensor, Tensor, Tensor]] | None = None
    linear_features: Callable[[], tuple[Tensor, Tensor]] | None = None
    capped: bool = False
    reader: VectorReader | None = None
    points: Callable[[], Points] | None = None

    def numbers(self) -> Numbers:
        """What it reads beside the product."""
        return (
            Numbers(self.row, self.column, self.head)
            if self.statistics is None
            else self.statistics()
        )

    def with_repeated_keys(self, heads: int) -> ScoreTerm:
        """See `PairScore.with_repeated_keys`."""

        def numbers() -> Numbers:
            row, column, head, factors = self.numbers()
            if factors is not None:
                factors = factors[0], repeat_heads(factors[1], heads)
            return Numbers(row, [repeat_heads(t, heads) for t in column], head, factors)

        def points() -> Points:
            there = self.points()  # type: ignore[misc]  # there is one
            return Points(there.query, repeat_heads(there.key, heads))

        return replace(self, statistics=numbers, points=None if self.points is None else points)


@dataclass(eq=False)
class PairScore:
    """A score as engines see it: what they multiply, and the terms that read the product.

    An engine takes what it wants: the vectors as the caller has them (`raw_query`, `raw_key`, `scale`, `width`, and the
    `factors` among the first term's numbers), or features made of them (`features`, or `query` and `key`).

    Args:
        raw_query: [B, H, N, d' >= d], in any dtype.
        raw_key: [B, Hkv, M, d'], not repeated for grouped queries.
        terms: what is added up; `softcap` acts on the first, and on those that say so.
        scale: what all products are multiplied with.
        width: d, how many numbers of each vector are multiplied; None for all.
        make_features: returns the features, [B, H, N, d] and [B, Hkv, M, d] in the working dtype, where they are
            more than scale · query and key. Where a term has `factors`, the vectors times these must be the same.
    """

    raw_query: Tensor
    raw_key: Tensor
    terms: tuple[ScoreTerm, ...]
    scale: float = 1.0
    width: int | None = None
    make_features: Callable[[], tuple[Tensor, Tensor]] | None = None
    _features: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    def features(self) -> tuple[Tensor, Tensor]:
        """Queries [B, H, N, d] and keys [B, Hkv, M, d] in the working dtype, whose plain product the terms read."""
        if self._features is None:
            self._features = self.make_features() if self.make_features else self._scaled()
        return self._features

    def _scaled(self) -> tuple[Tensor, Tensor]:
        dtype = self.dtype
        query = self.raw_query.to(dtype)
        return query if self.scale == 1 else query * self.scale, self.raw_key.to(dtype)

    @property
    def query(self) -> Tensor:
        """The queries' features."""
        return self.features()[0]

    @property
    def key(self) -> Tensor:
        """The keys' features."""
        return self.features()[1]

    @property
    def is_product(self) -> bool:
        """Whether what is multiplied are the vectors as they are, scaled."""
        return self.make_features is None and self.width is None

    @property
    def score_key(self) -> str:
        """The terms as text, for an operator's argument: `"dot+*umbral_on_product"`; a star marks a gate, ^ a cap."""
        return "+".join(
            "*" * (t.gate is not None) + "^" * t.capped + t.term.name for t in self.terms
        )

    def numbers(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """All row statistics, column statistics and head parameters, term by term; a gate ends its term's."""
        lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
        rows, columns, heads = lists
        for term in self.terms:
            row, column, head, _ = term.numbers()
            rows += row
            columns += column
            heads += head
            if term.gate is not None:
                heads.append(term.gate)
        return rows, columns, heads

    @property
    def points(self) -> Callable[[], Points] | None:
        """The points of the term that measures distances, which is at most one."""
        for term in self.terms:
            if term.points is not None:
                return term.points
        return None

    def plus(self, term: ScoreTerm) -> PairScore:
        """This score with one more term."""
        return replace(self, terms=(*self.terms, term))

    def weighted(self, weight: Tensor) -> PairScore:
        """This score with every term multiplied by a weight per query head, [H]."""
        gated = (replace(t, gate=weight if t.gate is None else t.gate * weight) for t in self.terms)
        return replace(self, terms=tuple(gated))

    def with_repeated_keys(self, heads: int) -> PairScore:
        """The same score with so many heads of keys, each of them repeated for its group of queries."""
        if heads == self.kv_heads:
            return self
        score = replace(self, raw_key=repeat_heads(self.raw_key, heads), terms=())
        if self.make_features is not None:
            score.make_features = lambda: (self.query, repeat_heads(self.key, heads))
        score.terms = tuple(t.with_repeated_keys(heads) for t in self.terms)
        return score

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, N, M)."""
        batch, heads, n, _ = self.raw_query.shape
        return batch, heads, n, self.raw_key.shape[2]

    @property
    def kv_heads(self) -> int:
        """Hkv."""
        return self.raw_key.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The features' dtype."""
        return working_dtype(self.raw_query, self.raw_key)

    @property
    def device(self) -> torch.device:
        """Where the vectors are."""
        return self.raw_query.device


@lru_cache(maxsize=1024)
def parse_score_key(key: str) -> tuple[tuple[Term, bool, bool], ...]:
    """The inverse of `PairScore.score_key`: each term, whether it has a gate, and whether `softcap` acts on it."""
    parts = enumerate(key.split("+"))
    return tuple((TERMS[p.lstrip("*^")], p.startswith("*"), not i or "^" in p) for i, p in parts)


def learns(score: PairScore, value: Tensor, options: Options) -> bool:
    """Whether there will be a backward pass, as far as is known without making statistics."""
    if not torch.is_grad_enabled():
        return False
    tensors: list[Tensor | float | None]
    tensors = [score.raw_query, score.raw_key, value, options.mask, options.bias, options.sinks]
    if options.aggregation is not None:
        tensors += (*options.aggregation.parameters, options.aggregation.gate)
    for term in score.terms:
        tensors += (
            *term.row,
            *term.column,
            *term.head,
            term.gate,
            *(() if term.reader is None else (*term.reader.parameters, *term.reader.head)),
        )
    return any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor has it, else float32: half precision never does arithmetic here."""
    for t in tensors:
        if t.dtype == torch.float64:
            return torch.float64
    return torch.float32


#: Before torch 2.13 an exported length that is free does not survive the joining of two dims.
OLD_EXPORTER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, Hkv, ...] to [B, heads, ...], each head repeated for its group of queries; free where they agree."""
    if x.shape[1] == heads:
        return x
    group = heads // x.shape[1]
    if is_exporting() and OLD_EXPORTER:
        return torch.cat([head.expand(-1, group, *head.shape[2:]) for head in x.split(1, 1)], 1)
    return x.repeat_interleave(group, dim=1)


def euclidean(x: Tensor, y: Tensor) -> Tensor:
    """Distances [..., N, M] of [..., N, d] and [..., M, d], from differences; the gradient at distance 0 is 0."""
    if (
        is_exporting() or is_forward_mode()
    ):  # ONNX has no cdist, and that has no forward-mode derivative
        return torch.linalg.vector_norm(x[..., :, None, :] - y[..., None, :, :], dim=-1)
    x, y = x.contiguous(), y.contiguous()
    learns = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    if not learns or torch.compiler.is_compiling() or is_transformed():
        return _distances(x, y)
    return Euclidean.apply(x, y)


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


class Euclidean(torch.autograd.Function):
    """`euclidean` with derivatives of every order: those of torch's `cdist` end with the first."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor):
        distance = _distances(x, y)
        ctx.save_for_backward(x, y, distance)
        return distance

    @staticmethod
    def backward(ctx, grad):
        x, y, distance = ctx.saved_tensors
        if (
            torch.is_grad_enabled()
        ):  # for a second derivative, which takes the memory of all differences
            difference = x[..., :, None, :] - y[..., None, :, :]
            square = difference.square().sum(-1)
            apart = square > 0
            slope = torch.where(apart, grad / torch.where(apart, square, 1.0).sqrt(), 0.0)
            parts = slope[..., None] * difference
            return parts.sum(-2), -parts.sum(-3)
        grad, columns = grad.contiguous(), distance.mT.contiguous()
        d_x = torch.ops.aten._cdist_backward(grad, x, y, 2.0, distance)
        return d_x, torch.ops.aten._cdist_backward(grad.mT.contiguous(), y, x, 2.0, columns)


def upcast_for_grad(x: Tensor) -> Tensor:
    """`x` in float32 where it is a half-precision leaf of a score on a CPU and will get a gradient; else `x` itself.

    The gradient of a distance has two parts, by the product and by the norms, which nearly cancel where two points
    nearly coincide. Autograd rounds each part that reaches a half-precision tensor before it adds them up, and what is
    left is rounding; from one float32 tensor only the sum is rounded. The compiled kernels know such tensors by
    `is_upcast`: they multiply bfloat16 numbers, and return float32 gradients.
    """
    if x.device.type != "cpu" or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x
    whole = x.float()
    if x.dtype == torch.bfloat16 and not torch.compiler.is_compiling():
        attach(whole, HoldsBfloat16())
    return whole


class HoldsBfloat16:
    """Said of float32 tensors of `upcast_for_grad` that hold bfloat16 numbers."""


def is_upcast(x: Tensor) -> bool:
    """Whether these are bfloat16 numbers whose gradients are wanted in float32 (`upcast_for_grad`)."""
    return attached_to(x, HoldsBfloat16) is not None


def dot_score(query: Tensor, key: Tensor, scale: float | None = None) -> PairScore:
    """Scaled dot product, scale · q·k; `scale` defaults to 1/sqrt(d). The host's own score, and the base of blends."""
    factor: float = float(query.shape[-1]) ** -0.5 if scale is None else scale
    return PairScore(query, key, (dot_term(query, key, factor),), factor)


def dot_term(query: Tensor, key: Tensor, scale: float) -> ScoreTerm:
    """The plain dot product as a term."""
    return ScoreTerm(DOT, partial(dot_logits, query, key, scale))


def dot_logits(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """scale · q·k, [B, H, N, M], in the working dtype."""
    dtype = working_dtype(query, key)
    return query.to(dtype) * scale @ repeat_heads(key.to(dtype), query.shape[1]).mT
