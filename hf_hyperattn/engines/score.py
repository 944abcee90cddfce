"""The pair-score contract: all that an engine knows about a mechanism.

An engine computes softmax(S)·V without ever seeing a mechanism. What it sees is a `PairScore`: features whose dot
product it forms tile by tile, and one or more *pieces*, each a `Term` (cheap arithmetic on a tile) with the per-row,
per-column and per-head numbers that the term reads. The logit of a pair is the sum of the pieces:

    S_ij = piece_0(q̂_i · k̂_j, row_i, column_j, head) + gate_1 · piece_1(...) + ...

Dot product, cone, hyperbolic distance, HyPE and their blends all have this form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from .late import Late, LateFields, late, once

#: All terms by name. An engine's custom operator carries a score as the names of its terms, since an operator's
#: arguments can be tensors, numbers and strings, but not functions.
TERMS: dict[str, Term] = {}

#: Squared distances from differences, see `Term`.
Gap = Callable[[Tensor | None], Tensor]


class Term:
    """Arithmetic on one tile of pairs; holds no tensors.

    Shapes inside a tile: `dot` is [..., R, C], row statistics are [..., R, 1], column statistics [..., 1, C], head
    parameters [..., 1, 1]; everything broadcasts. `gap`, where given, is a function from chosen pairs, bool
    [..., R, C], or None for all of them, to the squared distances of their points, computed from differences, and NaN
    for the others: for pairs whose expansion of the distance through `dot` is too inexact.

    Subclasses set `name`, the counts `rows`, `columns`, `heads`, and `logits`. They override `vjp` where a closed
    derivative is faster than the one that is derived. Where the room has the term as a C++ functor too (see
    engines/cpu/score.h), `cpp` names its header and its type; for others one is written from `logits`, if that is plain
    arithmetic (engines/trace.py says what is).
    """

    name: str
    rows: int = 0
    columns: int = 0
    heads: int = 0
    cpp: tuple[Path, str] | None = None

    def logits(
        self,
        dot: Tensor,
        row: Sequence[Tensor],
        column: Sequence[Tensor],
        head: Sequence[Tensor],
        gap: Gap | None = None,
    ) -> Tensor:
        """The term's share of the logits, [..., R, C]."""
        raise NotImplementedError

    def vjp(
        self,
        dot: Tensor,
        row: Sequence[Tensor],
        column: Sequence[Tensor],
        head: Sequence[Tensor],
        gap: Gap | None = None,
    ) -> tuple[Tensor, Callable]:
        """The logits, and a function from their gradient to `(d_dot, d_rows, d_columns, d_heads)`.

        A gradient may be None (zero), may have its argument's shape, or may be left tile-shaped: the engine sums it
        to the argument's shape. A term that took distances from differences returns a fifth one, d_gap [..., R, C], of
        these distances and 0 elsewhere: the gradients by the product and by the norms would cancel. The default takes
        all of them from the product form, by the derivative of the term's graph, or by automatic differentiation.
        """
        from .graph_torch import graph_of, vjp

        graph = graph_of(self)
        if graph is not None:
            return vjp(graph, dot, row, column, head)
        a, b = 1 + len(row), 1 + len(row) + len(column)

        def logits(*numbers: Tensor) -> Tensor:
            return self.logits(numbers[0], numbers[1:a], numbers[a:b], numbers[b:])

        # engines call this inside an operator, where autograd is switched off; torch.func has a tape of its own
        out, pull = torch.func.vjp(logits, dot, *row, *column, *head)

        def pullback(grad):
            g = pull(grad)
            return g[0], g[1:a], g[a:b], g[b:]

        return out if gap is None else self.logits(dot, row, column, head, gap), pullback


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

    def logits(self, dot, row, column, head, gap=None):
        return self.vjp(dot, row, column, head, gap)[0]

    def vjp(self, dot, row, column, head, gap=None):
        from .graph_torch import graph_of, vjp

        squared, near = self.by_product(dot, row, column, head), None
        inexact = None if gap is None else self.is_inexact(squared, row, column, head)
        if inexact is not None and inexact.any():
            exact = gap(inexact)
            near = ~exact.isnan()
            squared = torch.where(near, exact, squared)
        return vjp(graph_of(self, required=True), dot, row, column, head, squared, near)


def register_term(term: Term) -> Term:
    """Make a term known to the engines under its name; a second term of the same name is refused."""
    if term.name in TERMS:
        raise ValueError(f"term {term.name!r} is registered already, by {type(TERMS[term.name]).__name__}")
    TERMS[term.name] = term
    return term


class DotTerm(Term):
    """The plain dot product of the features (any scaling is folded into them)."""

    name = "dot"
    cpp = (Path(__file__).parent / "cpu" / "score.h", "hyper::Dot")

    def logits(self, dot, row, column, head, gap=None):
        return dot

    def vjp(self, dot, row, column, head, gap=None):
        return dot, lambda grad: (grad, (), (), ())


DOT = register_term(DotTerm())


#: Set on keys that a cache hands out: the same in the working dtype.
CONVERTED = "_hyperattn_converted"


@dataclass(frozen=True)
class Reader:
    """How an engine that reads each key once, for one query or a few, makes a piece's statistics itself.

    Args:
        cpp: the type, in the header of the piece's term, that reads them from vectors (see engines/cpu/score.h).
        head: its parameters: tensors [H] or [1], then numbers.
    """

    cpp: str
    head: tuple[Tensor | float, ...]


@dataclass(frozen=True)
class Piece(LateFields):
    """A term with its numbers, and the definition it must agree with.

    Args:
        term: the arithmetic that tile engines do.
        definition: returns the piece's dense logits [B, H, N, M] straight from the published formula and from
            differences of points. `reference` evaluates this and nothing else.
        row: statistics of queries, each [B, H, N].
        column: statistics of keys, each [B, H, M] or, where they do not differ within a group, [B, Hkv, M].
        head: parameters of query heads, each [H].
        gate: the piece's weight per query head, [H], or None for 1.
        columns: for a piece that reads no features and has low rank: returns float64 factors [B|1, H|1, N, c] and
            [B|1, H|1, M, c] and numbers a row [B|1, H|1, N]; the logits are the factors' product over c plus the
            row's number. None where there are none, or where float32 sums of the product would be too inexact.
        capped: whether `softcap` acts on it, as it does on the first piece: where it takes that one's place in some
            heads.
        reader: makes `row` and `column` from vectors, where the room has that; they may then be given as `Late`.
    """

    term: Term
    definition: Callable[[], Tensor]
    row: tuple[Tensor, ...] = field(default_factory=tuple)
    column: tuple[Tensor, ...] = field(default_factory=tuple)
    head: tuple[Tensor, ...] = field(default_factory=tuple)
    gate: Tensor | None = None
    columns: Callable[[], tuple[Tensor, Tensor, Tensor]] | None = None
    features: Callable[[], tuple[Tensor, Tensor]] | None = None
    capped: bool = False
    reader: Reader | None = None


@dataclass(frozen=True)
class Points:
    """What a gap is measured between, for engines that work from differences: gap = |query - key|²."""

    query: Tensor  # [B, H, N, p]
    key: Tensor  # [B, Hkv, M, p]


@dataclass(frozen=True)
class Source(LateFields):
    """What a score's features were made from, in the caller's dtype, for engines that need no copies of it.

    The features are scale · row · query and column · key, of each vector the first `width` numbers.

    Args:
        query: [B, H, N, d' >= d].
        key: [B, Hkv, M, d'].
        scale: for all queries.
        features: what was made from it: a score with others is not taken for it.
        row: a factor per query [B, H, N], or None for 1; may be given as `Late`.
        column: a factor per key [B, Hkv, M], or None for 1; may be given as `Late`.
        width: d, or None for all of d'.
    """

    query: Tensor
    key: Tensor
    scale: float
    features: tuple[Tensor | Late, Tensor | Late]
    row: Tensor | None = field(default_factory=lambda: None)
    column: Tensor | None = field(default_factory=lambda: None)
    width: int | None = None


@dataclass(frozen=True)
class PairScore(LateFields):
    """A score as engines see it: features, and the pieces that read their product.

    Args:
        query: features [B, H, N, d], float32 or float64; may be given as `Late`.
        key: features [B, Hkv, M, d], not repeated for grouped queries; may be given as `Late`.
        pieces: the terms to add up; `softcap` acts on the first, and on those that say so.
        points: returns the points whose gap the pieces are functions of, or None where there is no gap. Terms then take
            the distances of those pairs from differences for which the product form cancels.
        source: what the features were made from, for engines that take half precision as it is.
    """

    query: Tensor
    key: Tensor
    pieces: tuple[Piece, ...]
    points: Callable[[], Points] | None = None
    source: Source | None = None

    @once
    def spec(self) -> str:
        """The pieces as text, for an operator's argument: `"dot+*umbral_on_product"`; a star marks a gate, ^ a cap."""
        return "+".join("*" * (p.gate is not None) + "^" * p.capped + p.term.name for p in self.pieces)

    def numbers(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """All row statistics, column statistics and head parameters, piece by piece; a gate ends its piece's."""
        row = [t for p in self.pieces for t in p.row]
        column = [t for p in self.pieces for t in p.column]
        head = [t for p in self.pieces for t in p.head + ((p.gate,) if p.gate is not None else ())]
        return row, column, head

    def plus(self, piece: Piece, points: Callable[[], Points] | None = None) -> PairScore:
        """This score with one more piece, and where that piece measures a gap, the points it measures between."""
        return self.changed(pieces=(*self.pieces, piece), points=self.points if points is None else points)

    def weighted(self, weight: Tensor) -> PairScore:
        """This score with every piece multiplied by a weight per query head, [H]."""
        gates = [weight if p.gate is None else p.gate * weight for p in self.pieces]
        return self.changed(pieces=tuple(p.changed(gate=g) for p, g in zip(self.pieces, gates, strict=True)))

    @once
    def raw(self) -> Source | None:
        """The source of these very features, where it is known."""
        if self.source is None:
            return None
        for name, feature in zip(("query", "key"), self.source.features, strict=True):
            given = self.given(name)
            if given is not feature and not (isinstance(feature, Late) and given is feature.made):
                return None
        return self.source

    @once
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, N, M), without making features."""
        query, key = (self.query, self.key) if self.raw is None else (self.source.query, self.source.key)
        return (*query.shape[:3], key.shape[2])

    @property
    def kv_heads(self) -> int:
        """Hkv, without making features."""
        return (self.key if self.raw is None else self.source.key).shape[1]

    @once
    def dtype(self) -> torch.dtype:
        """The features' dtype, without making them."""
        return self.query.dtype if self.raw is None else working_dtype(self.source.query, self.source.key)

    @property
    def device(self) -> torch.device:
        """The features' device, without making them."""
        return self.query.device if self.raw is None else self.source.query.device


@lru_cache(maxsize=1024)
def parse_spec(spec: str) -> tuple[tuple[Term, bool], ...]:
    """The inverse of `PairScore.spec`: each term, and whether it has a gate."""
    return tuple((TERMS[part.lstrip("*^")], part.startswith("*")) for part in spec.split("+"))


def capped_in(spec: str) -> list[bool]:
    """Which pieces of a spec `softcap` acts on: the first, and those marked."""
    return [not index or "^" in part for index, part in enumerate(spec.split("+"))]


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor has it, else float32: half precision never does arithmetic here."""
    for t in tensors:
        if t.dtype == torch.float64:
            return torch.float64
    return torch.float32


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, Hkv, ...] to [B, heads, ...], each head repeated for its group of queries; free where they agree."""
    if x.shape[1] == heads:
        return x
    group = heads // x.shape[1]
    # needless from torch 2.13 on: before, an exported length that is free does not survive the joining of two dims
    if torch.compiler.is_exporting():
        return torch.cat([head.expand(-1, group, *head.shape[2:]) for head in x.split(1, 1)], 1)
    return x.repeat_interleave(group, dim=1)


def converted(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype, without a copy where a cache keeps it in that one too."""
    kept = None if torch.compiler.is_compiling() else getattr(t, CONVERTED, None)
    return kept if kept is not None and kept.dtype == dtype else t.to(dtype)


def dot_score(query: Tensor, key: Tensor, scale: float | None = None) -> PairScore:
    """Scaled dot product, scale · q·k; `scale` defaults to 1/sqrt(d). The host's own score, and the base of blends."""
    dtype = working_dtype(query, key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k = late(lambda: query.to(dtype) * scale), late(lambda: converted(key, dtype))
    piece = Piece(DOT, lambda: query.to(dtype) * scale @ repeat_heads(key.to(dtype), query.shape[1]).mT)
    return PairScore(q, k, (piece,), source=Source(query, key, scale, (q, k)))
