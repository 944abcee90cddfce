"""Define the pair score: everything that an engine knows about a mechanism.

An engine computes softmax(S)·V for a `PairScore`. That is a pair of features, whose dot product the
engine forms tile by tile, and one or more terms. Each `Term` is cheap arithmetic on a tile, with
the numbers per row, column and head that it reads. The logit of a pair is the sum of the terms:

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

from ..utils.attached import attach, attached_to
from ..utils.readable import is_exporting, is_forward_mode, is_transformed
from .graph_torch import evaluate_with_vjp, graph_of
from .options import Options

#: All terms by name. Custom operators get a score as the names of its terms, because their
#: arguments can be tensors, numbers and strings, but not functions.
TERMS: dict[str, Term] = {}


class Numbers(NamedTuple):
    """Numbers that a term reads besides the product.

    Args:
        row: Statistics of queries, each [B, H, N].
        column: Statistics of keys, each [B, H, M], or [B, Hkv, M] if they are equal within a group.
        head: Parameters of query heads, each [H].
        factors: For a score with its own features: one factor per query [B, H, N] and per key [B,
            Hkv, M]. Vectors times factors are the features.
    """

    row: Sequence[Tensor] = ()
    column: Sequence[Tensor] = ()
    head: Sequence[Tensor] = ()
    factors: tuple[Tensor, Tensor] | None = None


#: Computes squared distances from differences, see `Term`.
SquaredDistances = Callable[[Tensor | None], Tensor]


class Term:
    """Arithmetic on one tile of pairs, without tensors of its own.

    Shapes in a tile: `dot` is [..., R, C], row statistics are [..., R, 1], column statistics [...,
    1, C], and head parameters [..., 1, 1]. Everything broadcasts.

    `squared_distance` is for pairs whose distance is too inexact through `dot`. It is None or a
    function from chosen pairs (bool [..., R, C], or None for all) to their squared distances,
    computed from differences of points. Other pairs get NaN.

    Subclasses set `name`, the counts `rows`, `columns`, `heads`, and define `logits`. If that is
    plain arithmetic (engines/trace.py), compiled engines derive their code and its derivative from
    it. Terms override `vjp` if a derivative by hand is faster in blocks.
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
        """Return the term's share of the logits, [..., R, C]."""
        raise NotImplementedError

    def vjp(
        self,
        dot: Tensor,
        row: Sequence[Tensor],
        column: Sequence[Tensor],
        head: Sequence[Tensor],
        squared_distance: SquaredDistances | None = None,
    ) -> tuple[Tensor, Callable]:
        """Return the logits and their derivative.

        The default differentiates the term's graph, or uses automatic differentiation if it has
        none. It takes all distances from the product form.

        Returns:
            The logits, and a function from their gradient to `(d_dot, d_rows, d_columns, d_heads)`.
            Each gradient is None (zero), has the shape of its argument, or has the shape of the
            tile; the engine sums it. A term that took distances from differences returns a fifth
            gradient, of these squared distances, which is 0 elsewhere. Their gradients through the
            product and the norms would cancel.
        """
        graph = graph_of(self)
        if graph is not None:
            return evaluate_with_vjp(graph, dot, row, column, head)
        columns_at = 1 + len(row)
        heads_at = columns_at + len(column)

        def evaluate_logits(*numbers: Tensor) -> Tensor:
            row, column = numbers[1:columns_at], numbers[columns_at:heads_at]
            return self.logits(numbers[0], row, column, numbers[heads_at:])

        # Engines call this inside an operator, where autograd is switched off. torch.func has its
        # own tape.
        out, pull, *_ = torch.func.vjp(evaluate_logits, dot, *row, *column, *head)

        def pull_back(grad):
            g = pull(grad)
            return g[0], g[1:columns_at], g[columns_at:heads_at], g[heads_at:]

        # The logits use exact distances, as in the forward pass. Their derivative stays in the
        # product form.
        if squared_distance is not None:
            out = self.logits(dot, row, column, head, squared_distance)
        return out, pull_back


#: Smallest and largest share of the squared lengths below which a squared distance is taken from
#: differences, see `loses_digits`.
NEAR = 1e-3
NEAREST = 1 / 16
#: (2 eps / 2e-4)² with the eps of float32: 2e-4 is the allowed error of a distance.
EXACT = 1.42e-6


def loses_digits(
    squared_distance: Tensor, squared_lengths: Tensor, weight: Tensor | float = 1.0
) -> Tensor:
    """Return where a squared distance from the product is too inexact, bool [..., R, C].

    Its error is about eps times the squared lengths. The error of its root and of the gradient is
    much larger if points nearly coincide. The share of the lengths below which pairs are computed
    from differences keeps the error of the weighted distance below 2e-4.

    Args:
        squared_distance: |x - y|², from the product.
        squared_lengths: |x|² + |y|², or |x|² if the lengths of near points are nearly equal.
        weight: Factor of squared distances in the score. Default: 1.
    """
    share = (EXACT * weight * squared_lengths).clamp_(NEAR, NEAREST)
    return squared_distance < squared_lengths * share


class SeparableTerm(Term):
    """A term of two positions that is a short sum of products.

    Its only statistics are a position of the row and one of the column. They have no gradient, and
    only their difference matters. With positions counted from an anchor, the logits are

        sum over c of split_row(..)[c] · split_column(..)[c]

    Kernels choose an anchor for each block of rows or columns. They multiply and add for each pair,
    and compute the numbers of a side once for each line. All methods are plain arithmetic (see
    `Term`).
    """

    rows = columns = 1

    def split_row(self, offset: Tensor, head: Sequence[Tensor]) -> Sequence[Tensor | float]:
        """Return one number of a row for each product.

        Args:
            offset: The row's position, counted from the anchor.
            head: Parameters of the term.
        """
        raise NotImplementedError

    def split_column(self, offset: Tensor, head: Sequence[Tensor]) -> Sequence[Tensor | float]:
        """Return one number of a column for each product. A constant number stands first.

        The arguments are as in `split_row`.
        """
        raise NotImplementedError

    def split_margins(self, offset: Tensor, head: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return two numbers that tell how far the products are exact at an offset from the anchor.

        The first holds for the side that the anchor was chosen for, the second for the other side.
        If one is negative for any line of a block, the kernel computes the block pair by pair.
        """
        raise NotImplementedError


class DistanceTerm(Term):
    """A term that reads |query_factor · q - key_factor · k|².

    Engines compute it from the product, except for pairs where that cancels: these use differences.
    All methods are plain arithmetic on a tile. The `points` of a score with such a term are the
    features times the factors.
    """

    #: Numbers at a vector's end that its point does not include.
    left_out = 0

    def by_product(self, dot, row, column, head) -> Tensor:
        """Return the squared distance, computed from the product."""
        raise NotImplementedError

    def is_inexact(self, squared_distance, row, column, head) -> Tensor:
        """Return which pairs need differences, bool.

        The squared distance from the product decides.
        """
        raise NotImplementedError

    def factors(self, row, column, head) -> tuple[Tensor | float, Tensor | float]:
        """Return (query_factor, key_factor). Default: 1 for both."""
        return 1.0, 1.0

    def score(self, dot, row, column, head, squared_distance) -> Tensor:
        """Return the logits for given squared distances."""
        raise NotImplementedError

    def logits(self, dot, row, column, head, squared_distance=None):
        squared, _ = self.squared_distances(dot, row, column, head, squared_distance)
        return self.score(dot, row, column, head, squared)

    def squared_distances(
        self, dot, row, column, head, squared_distance=None
    ) -> tuple[Tensor, Tensor | None]:
        """Return all squared distances, and which of them came from differences.

        Returns:
            Distances [..., R, C] and a bool of the same shape, or None instead of the bool if all
            came from the product.
        """
        squared = self.by_product(dot, row, column, head)
        if squared_distance is None:
            return squared, None
        inexact = self.is_inexact(squared, row, column, head)
        # Most tiles have no such pair, and then nothing is gathered.
        if not inexact.any():
            return squared, None
        # The engine may compute more pairs than asked, so its NaN say which ones it left out.
        exact = squared_distance(inexact)
        near = ~exact.isnan()
        return torch.where(near, exact, squared), near

    def vjp(self, dot, row, column, head, squared_distance=None):
        squared, near = self.squared_distances(dot, row, column, head, squared_distance)
        graph: Any = graph_of(self, required=True)
        return evaluate_with_vjp(graph, dot, row, column, head, squared, near)


class DerivedDistanceTerm(DistanceTerm):
    """A `DistanceTerm` with a derivative by hand for engines in torch.

    Compiled engines differentiate `score` instead.
    """

    def derive(self, row, column, head, squared_distance) -> tuple[Tensor, Callable]:
        """Return the logits and their derivative for given squared distances.

        Returns:
            The logits, and a function from their gradient to `(d_squared_distance, d_rows,
            d_columns, d_heads)`. It covers the statistics that this method reads. They stand before
            the statistics that only `by_product` reads.
        """
        raise NotImplementedError

    def through_product(
        self, d_squared, dot, row, column
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """Differentiate `by_product`.

        Args:
            d_squared: Gradient of the squared distance; may be overwritten.
            dot, row, column: As in `by_product`.

        Returns:
            Gradients of the product, and of the row and column statistics that `derive` does not
            cover.
        """
        raise NotImplementedError

    def score(self, dot, row, column, head, squared_distance):
        return self.derive(row, column, head, squared_distance)[0]

    def logits(self, dot, row, column, head, squared_distance=None):
        squared, _ = self.squared_distances(dot, row, column, head, squared_distance)
        return self.derive(row, column, head, squared)[0]

    def vjp(self, dot, row, column, head, squared_distance=None):
        squared, near = self.squared_distances(dot, row, column, head, squared_distance)
        logits, pull = self.derive(row, column, head, squared)

        def pull_back(grad):
            d_squared, d_row, d_column, d_head = pull(grad)
            exact = ()
            if near is not None:
                exact = (torch.where(near, d_squared, 0.0),)
                # Pairs from differences get no gradient through the product, where it would cancel.
                d_squared.masked_fill_(near, 0.0)
            d_dot, more_row, more_column = self.through_product(d_squared, dot, row, column)
            return d_dot, (*d_row, *more_row), (*d_column, *more_column), d_head, *exact

        return logits, pull_back


def register_term(term: Term) -> Term:
    """Make a term known to the engines under its name, and return it.

    Raises:
        ValueError: A term of this name is registered already.
    """
    if term.name in TERMS:
        raise ValueError(
            f"term {term.name!r} is registered already, by {type(TERMS[term.name]).__name__}"
        )
    TERMS[term.name] = term
    return term


class DotTerm(Term):
    """The plain dot product of the features, which include any scale."""

    name = "dot"

    def logits(self, dot, row, column, head, squared_distance=None):
        return dot

    def vjp(self, dot, row, column, head, squared_distance=None):
        return dot, lambda grad: (grad, (), (), ())


DOT = register_term(DotTerm())


@dataclass(frozen=True)
class Reader:
    """Arithmetic that makes a term's statistics from vectors.

    It is for engines that read each key once (decoding).

    Args:
        name: Unique name of the reader.
        read: Plain arithmetic (see `Term`) from lists of tensors to the factor of a vector and the
            term's first statistics. Its arguments are `(d,)`, `(last number, sum of squares of the
            point's numbers)` and the parameters. Decoding computes distances from differences, so
            statistics that only `by_product` reads are not made.
        parameters: Number of parameters.
        left_out: Numbers at a vector's end that its point does not include.
        columns: Number of column arguments, if it reads no vectors (`Aggregation`). Default: the
            two above.
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


# eq=False here and below: comparing tensors gives no single truth value.
@dataclass(frozen=True, eq=False)
class VectorReader:
    """A term's reader with its numbers.

    Args:
        name: Name of the reader in READERS.
        parameters: Parameters of the reader: numbers, or tensors [H] or [1].
        head: Head parameters of the term when it uses the reader: numbers, or tensors [H].
    """

    name: str
    parameters: tuple[Tensor | float, ...]
    head: tuple[Tensor | float, ...] = ()


@dataclass(frozen=True)
class Points:
    """Points between which distances are measured."""

    query: Tensor  # [B, H, N, p]
    key: Tensor  # [B, Hkv, M, p]


@dataclass(frozen=True, eq=False)
class ScoreTerm:
    """A term with its numbers, and the definition that it must agree with.

    Args:
        term: Arithmetic for engines with tiles.
        definition: Returns the term's dense logits [B, H, N, M] from the published formula and from
            differences of points. `reference` evaluates only this.
        row, column, head: As in `Numbers`.
        gate: Weight of the term per query head [H]; None (default) for 1.
        statistics: Returns the `Numbers` when an engine asks for them, instead of `row`, `column`
            and `head`.
        low_rank_factors: For a term of low rank that reads no features. Returns float64 factors
            [B|1, H|1, N, c] and [B|1, H|1, M, c], and one number per row [B|1, H|1, N]. The logits
            are the factors multiplied and summed over c, plus the row's number. None if the term
            has no such form, or if float32 sums would be too inexact.
        linear_features: Returns features [B, H, N, e] and [B, Hkv or H, M, e] whose plain product
            is the term, for callers that need a score linear in the key. None if there are none.
        capped: Whether `softcap` applies to this term as it does to the first. Set it if this term
            replaces the first one in some heads.
        reader: Makes the statistics from vectors, if the mechanism supports that.
        points: Returns the points whose distances the term reads. The engine then computes the
            distances from differences where the product form cancels. None if the term reads no
            distance.
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
        """Return the numbers that the term reads besides the product."""
        if self.statistics is not None:
            return self.statistics()
        return Numbers(self.row, self.column, self.head)

    def with_repeated_keys(self, heads: int) -> ScoreTerm:
        """Return the term for `heads` key heads, see `PairScore.with_repeated_keys`."""

        def repeat_numbers() -> Numbers:
            row, column, head, factors = self.numbers()
            if factors is not None:
                factors = factors[0], repeat_heads(factors[1], heads)
            column = [repeat_heads(t, heads) for t in column]
            return Numbers(row=row, column=column, head=head, factors=factors)

        def repeat_points() -> Points:
            there = self.points()  # type: ignore[misc]  # only used if there are points
            return Points(there.query, repeat_heads(there.key, heads))

        # Functions, so that nothing is repeated for engines that read neither numbers nor points.
        points = None if self.points is None else repeat_points
        return replace(self, statistics=repeat_numbers, points=points)


@dataclass(eq=False)
class PairScore:
    """A score as engines see it: vectors to multiply, and terms.

    An engine uses one of two forms. Either it reads the caller's vectors (`raw_query`, `raw_key`,
    `scale`, `width`, and the `factors` among the first term's numbers), or the features made from
    them (`features`, or `query` and `key`).

    Args:
        raw_query: Queries [B, H, N, d' >= d] in any dtype.
        raw_key: Keys [B, Hkv, M, d'], not repeated for grouped queries.
        terms: Terms that are summed; `softcap` applies to the first and to terms with `capped`.
        scale: Factor of all products. Default: 1.
        width: How many numbers d of each vector are multiplied. Default: all.
        make_features: Returns the features [B, H, N, d] and [B, Hkv, M, d] in the working dtype, if
            they are not just scale · query and key. If a term has `factors`, vectors times factors
            must equal the features.
    """

    raw_query: Tensor
    raw_key: Tensor
    terms: tuple[ScoreTerm, ...]
    scale: float = 1.0
    width: int | None = None
    make_features: Callable[[], tuple[Tensor, Tensor]] | None = None
    _features: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    def features(self) -> tuple[Tensor, Tensor]:
        """Return the features in the working dtype.

        The terms read their plain product.

        Returns:
            Query features [B, H, N, d] and key features [B, Hkv, M, d].
        """
        # Stored, because the terms, their definitions and the engine may all ask for the features.
        if self._features is None:
            self._features = self.make_features() if self.make_features else self._scale_vectors()
        return self._features

    def _scale_vectors(self) -> tuple[Tensor, Tensor]:
        dtype = self.dtype
        query = self.raw_query.to(dtype)
        return query if self.scale == 1 else query * self.scale, self.raw_key.to(dtype)

    @property
    def query(self) -> Tensor:
        """Features of the queries."""
        return self.features()[0]

    @property
    def key(self) -> Tensor:
        """Features of the keys."""
        return self.features()[1]

    @property
    def is_product(self) -> bool:
        """Whether the features are just the scaled vectors."""
        return self.make_features is None and self.width is None

    @property
    def score_key(self) -> str:
        """The terms as text, for an operator's argument.

        An example is `"dot+*umbral_on_product"`. A star marks a gate, and ^ a cap.
        """
        return "+".join(
            "*" * (t.gate is not None) + "^" * t.capped + t.term.name for t in self.terms
        )

    @property
    def points(self) -> Callable[[], Points] | None:
        """The points of the term that reads distances, or None; at most one term does."""
        for term in self.terms:
            if term.points is not None:
                return term.points
        return None

    def plus(self, term: ScoreTerm) -> PairScore:
        """Return this score with one more term."""
        return replace(self, terms=(*self.terms, term))

    def weighted(self, weight: Tensor) -> PairScore:
        """Return this score with every term multiplied by a weight per query head, [H]."""
        gated = (replace(t, gate=weight if t.gate is None else t.gate * weight) for t in self.terms)
        return replace(self, terms=tuple(gated))

    def with_repeated_keys(self, heads: int) -> PairScore:
        """Return the same score with keys repeated to `heads` heads.

        Each key head is repeated for its group of queries.
        """
        if heads == self.kv_heads:
            return self
        # `replace` starts without stored features, which have the old number of heads.
        score = replace(self, raw_key=repeat_heads(self.raw_key, heads), terms=())
        if self.make_features is not None:
            score.make_features = lambda: (self.query, repeat_heads(self.key, heads))
        score.terms = tuple(t.with_repeated_keys(heads) for t in self.terms)
        return score

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape (B, H, N, M) of the logits."""
        batch, heads, n, _ = self.raw_query.shape
        return batch, heads, n, self.raw_key.shape[2]

    @property
    def kv_heads(self) -> int:
        """Number of key heads."""
        return self.raw_key.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the features."""
        return working_dtype(self.raw_query, self.raw_key)

    @property
    def device(self) -> torch.device:
        """Device of the vectors."""
        return self.raw_query.device


@lru_cache(maxsize=1024)
def parse_score_key(key: str) -> tuple[tuple[Term, bool, bool], ...]:
    """Return the terms of a `PairScore.score_key`.

    Each comes with whether it has a gate and whether it is capped.
    """
    # `not i`: the softcap always applies to the first term.
    parts = enumerate(key.split("+"))
    return tuple((TERMS[p.lstrip("*^")], p.startswith("*"), not i or "^" in p) for i, p in parts)


def requires_backward(score: PairScore, value: Tensor, options: Options) -> bool:
    """Return whether a backward pass will follow, as far as the known tensors tell.

    Statistics are not made for this question, because that would cost as much as a decoding step.
    """
    if not torch.is_grad_enabled():
        return False
    tensors: list[Tensor | float | None]
    tensors = [score.raw_query, score.raw_key, value, options.mask, options.bias, options.sinks]
    if options.aggregation is not None:
        tensors += (*options.aggregation.parameters, options.aggregation.gate)
    for term in score.terms:
        tensors += (*term.row, *term.column, *term.head, term.gate)
        if term.reader is not None:
            tensors += (*term.reader.parameters, *term.reader.head)
    return any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if any tensor has it, else float32.

    Half precision is never used for arithmetic here.
    """
    for t in tensors:
        if t.dtype == torch.float64:
            return torch.float64
    return torch.float32


#: Before torch 2.13, exporting with a free length fails if two dims are joined.
OLD_EXPORTER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each key head for its group of queries.

    Args:
        x: Tensor [B, Hkv, ...].
        heads: Number of heads of the result.

    Returns:
        Tensor [B, heads, ...], or `x` itself if it has that many heads.
    """
    if x.shape[1] == heads:
        return x
    group = heads // x.shape[1]
    # `repeat_interleave` joins the axes of heads and groups, see OLD_EXPORTER.
    if is_exporting() and OLD_EXPORTER:
        return torch.cat([head.expand(-1, group, *head.shape[2:]) for head in x.split(1, 1)], 1)
    return x.repeat_interleave(group, dim=1)


def euclidean_distances(x: Tensor, y: Tensor) -> Tensor:
    """Return distances [..., N, M] of x [..., N, d] and y [..., M, d].

    They are computed from differences. The gradient at distance 0 is 0.
    """
    # ONNX has no cdist, and cdist has no forward-mode derivative.
    if is_exporting() or is_forward_mode():
        return torch.linalg.vector_norm(x[..., :, None, :] - y[..., None, :, :], dim=-1)
    x, y = x.contiguous(), y.contiguous()
    learns = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    # torch.func does not support this kind of `Function`. Compiled calls have no second derivative
    # anyway.
    if not learns or torch.compiler.is_compiling() or is_transformed():
        return _exact_cdist(x, y)
    return Euclidean.apply(x, y)


def _exact_cdist(x: Tensor, y: Tensor) -> Tensor:
    # cdist's default for many points expands the square, which cancels for near points.
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


class Euclidean(torch.autograd.Function):
    """`euclidean_distances` with derivatives of every order.

    torch's `cdist` has only the first.
    """

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor):
        distance = _exact_cdist(x, y)
        ctx.save_for_backward(x, y, distance)
        return distance

    @staticmethod
    def backward(ctx, grad):
        x, y, distance = ctx.saved_tensors
        # Grad mode is on only for create_graph=True: a second derivative needs plain operators, and
        # all differences.
        if torch.is_grad_enabled():
            difference = x[..., :, None, :] - y[..., None, :, :]
            square = difference.square().sum(-1)
            # At distance 0 the gradient is 0. The inner `where` keeps 1/0 out of the next
            # derivative.
            apart = square > 0
            slope = torch.where(apart, grad / torch.where(apart, square, 1.0).sqrt(), 0.0)
            parts = slope[..., None] * difference
            return parts.sum(-2), -parts.sum(-3)
        grad, columns = grad.contiguous(), distance.mT.contiguous()
        # Distances are symmetric: the gradient of y is the same function with everything
        # transposed.
        d_x = torch.ops.aten._cdist_backward(grad, x, y, 2.0, distance)
        return d_x, torch.ops.aten._cdist_backward(grad.mT.contiguous(), y, x, 2.0, columns)


def upcast_for_grad(x: Tensor) -> Tensor:
    """Return a half-precision leaf in float32 if it needs an exact gradient.

    That is a leaf on a CPU that will get a gradient; any other tensor is returned itself.

    The gradient of a distance has two parts, through the product and through the norms. They nearly
    cancel if two points nearly coincide. Autograd rounds each part to the dtype of the leaf before
    it adds them, so that mostly rounding is left. With one float32 tensor only the sum is rounded.
    The compiled kernels recognise such tensors (`is_upcast`): they multiply bfloat16 numbers and
    return float32 gradients.
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
    """Mark for float32 tensors of `upcast_for_grad` that hold bfloat16 numbers."""


def is_upcast(x: Tensor) -> bool:
    """Return whether these are bfloat16 numbers that need float32 gradients.

    `upcast_for_grad` marks them.
    """
    return attached_to(x, HoldsBfloat16) is not None


def dot_score(query: Tensor, key: Tensor, scale: float | None = None) -> PairScore:
    """Return the scaled dot product: the attention layer's own score.

    Blends add their terms to it.

    Args:
        query: Queries [B, H, N, d].
        key: Keys [B, Hkv, M, d].
        scale: Factor of the product. Default: 1/sqrt(d).
    """
    factor: float = float(query.shape[-1]) ** -0.5 if scale is None else scale
    return PairScore(
        raw_query=query, raw_key=key, terms=(dot_term(query, key, factor),), scale=factor
    )


def dot_term(query: Tensor, key: Tensor, scale: float) -> ScoreTerm:
    """Return the plain dot product as a term."""
    return ScoreTerm(DOT, partial(dot_logits, query, key, scale))


def dot_logits(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return scale · q·k, [B, H, N, M], in the working dtype."""
    dtype = working_dtype(query, key)
    return query.to(dtype) * scale @ repeat_heads(key.to(dtype), query.shape[1]).mT
