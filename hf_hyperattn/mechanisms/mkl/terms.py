"""The terms of a score times a number per query and one per key, as engines compute them on a tile."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...engines.score import (
    DOT,
    TERMS,
    DistanceTerm,
    PairScore,
    ScoreTerm,
    Term,
    register_term,
    repeat_heads,
)
from .reference import weighted


class WeightedTerm(Term):
    """Another term, with a cap where there is one, times a weight of the row and one of the column, which come last.

    Args:
        inner: the term.
        cap: c of c·tanh(S/c), which acts on the inner logits; None for none.
    """

    def __init__(self, inner: Term, cap: float | None = None):
        self.inner, self.cap = inner, cap
        self.name = name_of(inner, cap)
        self.rows, self.columns, self.heads = inner.rows + 1, inner.columns + 1, inner.heads

    def logits(self, dot, row, column, head, gap=None):
        part = self.inner.logits(dot, row[:-1], column[:-1], head, gap)
        return self._capped(part) * row[-1] * column[-1]

    def _capped(self, part: Tensor) -> Tensor:
        return part if self.cap is None else self.cap * torch.tanh(part / self.cap)

    def vjp(self, dot, row, column, head, gap=None):
        part, pull = self.inner.vjp(dot, row[:-1], column[:-1], head, gap)
        part = self._capped(part)
        weight = row[-1] * column[-1]

        def pullback(grad):
            by_part = grad * part
            d_row = (by_part * column[-1]).sum(-1, keepdim=True)
            d_column = (by_part * row[-1]).sum(-2, keepdim=True)
            d_part = grad * weight
            if self.cap is not None:
                d_part = d_part * (1 - (part / self.cap).square())
            d_dot, d_rows, d_columns, *others = pull(d_part)
            return d_dot, (*d_rows, d_row), (*d_columns, d_column), *others

        return part * weight, pullback


class WeightedDistanceTerm(WeightedTerm, DistanceTerm):
    """The same of a term that reads distances, which are the inner one's."""

    def __init__(self, inner: DistanceTerm, cap: float | None = None):
        super().__init__(inner, cap)
        self.inner: DistanceTerm = inner
        self.left_out = inner.left_out

    def by_product(self, dot, row, column, head):
        return self.inner.by_product(dot, row[:-1], column[:-1], head)

    def is_inexact(self, squared_distance, row, column, head):
        return self.inner.is_inexact(squared_distance, row[:-1], column[:-1], head)

    def factors(self, row, column, head):
        return self.inner.factors(row[:-1], column[:-1], head)

    def score(self, dot, row, column, head, squared_distance):
        part = self.inner.score(dot, row[:-1], column[:-1], head, squared_distance)
        return self._capped(part) * row[-1] * column[-1]


def name_of(inner: Term, cap: float | None) -> str:
    """How the weighted term is called among all terms."""
    # a plus stands between the terms of a score
    return (
        f"weighted:{inner.name}"
        if cap is None
        else f"weighted@{cap!r}:{inner.name}".replace("+", "")
    )


def weighted_term(inner: Term, cap: float | None = None) -> Term:
    """The weighted form of a term, registered with the engines when it is first used."""
    kind: Any = WeightedDistanceTerm if isinstance(inner, DistanceTerm) else WeightedTerm
    return TERMS.get(name_of(inner, cap)) or register_term(kind(inner, cap))


def weighted_score(
    score: PairScore, row: Tensor, column: Tensor, cap: float | None = None
) -> PairScore:
    """The score with every term weighted.

    A plain dot product takes the weights into its features; the weights of keys then give every query head keys of its
    own. Other terms get the weights as one more statistic of rows and of columns.

    Args:
        row: [B, H, N], column: [B, H, M], in the score's dtype.
        cap: the call's softcap, which the weighted terms then have in them.
    """
    heads, first = score.shape[1], score.terms[0]
    if cap is None and len(score.terms) == 1 and first.term is DOT and first.gate is None:
        query, key = score.features()
        term = ScoreTerm(DOT, partial(weighted_logits, first, row, column, None))
        return PairScore(
            query * row[..., None], repeat_heads(key, heads) * column[..., None], (term,)
        )
    terms = []
    for index, term in enumerate(score.terms):
        inner_cap, numbers = cap if index == 0 or term.capped else None, term.numbers()
        terms.append(
            ScoreTerm(
                weighted_term(term.term, inner_cap),
                partial(weighted_logits, term, row, column, inner_cap),
                row=(*numbers.row, row),
                column=(*numbers.column, column),
                head=tuple(numbers.head),
                gate=term.gate,
                points=term.points,
            )
        )
    return PairScore(*score.features(), tuple(terms))


def weighted_logits(term: ScoreTerm, row: Tensor, column: Tensor, cap: float | None) -> Tensor:
    """The definition of a weighted term."""
    logits = term.definition()
    return weighted(logits if cap is None else cap * torch.tanh(logits / cap), row, column)
