"""Score terms multiplied by a weight per query and a weight per key.

The engines evaluate these terms tile by tile, with the weights as statistics of rows and columns.
"""

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
    """Another term, optionally capped, times a row weight and a column weight.

    The weights are the last statistics of rows and columns.

    Args:
        inner: The term.
        cap: c of c·tanh(S/c), applied to the inner logits; None for no cap.
    """

    def __init__(self, inner: Term, cap: float | None = None):
        self.inner = inner
        self.cap = cap
        self.name = get_weighted_name(inner, cap)
        self.rows = inner.rows + 1
        self.columns = inner.columns + 1
        self.heads = inner.heads

    def logits(self, dot, row, column, head, gap=None):
        part = self.inner.logits(dot, row[:-1], column[:-1], head, gap)
        return self._apply_cap(part) * row[-1] * column[-1]

    def _apply_cap(self, part: Tensor) -> Tensor:
        return part if self.cap is None else self.cap * torch.tanh(part / self.cap)

    def vjp(self, dot, row, column, head, gap=None):
        part, pull = self.inner.vjp(dot, row[:-1], column[:-1], head, gap)
        part = self._apply_cap(part)
        weight = row[-1] * column[-1]

        def pullback(grad):
            by_part = grad * part
            # The weights are factors of each logit, so their gradients are sums over a row or
            # column.
            d_row = (by_part * column[-1]).sum(-1, keepdim=True)
            d_column = (by_part * row[-1]).sum(-2, keepdim=True)
            d_part = grad * weight
            if self.cap is not None:
                # The derivative of c·tanh(S/c) is 1 - tanh², and tanh is `part / c` here.
                d_part = d_part * (1 - (part / self.cap).square())
            d_dot, d_rows, d_columns, *others = pull(d_part)
            return d_dot, (*d_rows, d_row), (*d_columns, d_column), *others

        return part * weight, pullback


class WeightedDistanceTerm(WeightedTerm, DistanceTerm):
    """A weighted term that reads the distances of its inner term."""

    def __init__(self, inner: DistanceTerm, cap: float | None = None):
        super().__init__(inner, cap)
        self.inner: DistanceTerm = inner
        # The engines read this property of the distance directly.
        self.left_out = inner.left_out

    def by_product(self, dot, row, column, head):
        return self.inner.by_product(dot, row[:-1], column[:-1], head)

    def is_inexact(self, squared_distance, row, column, head):
        return self.inner.is_inexact(squared_distance, row[:-1], column[:-1], head)

    def factors(self, row, column, head):
        return self.inner.factors(row[:-1], column[:-1], head)

    def score(self, dot, row, column, head, squared_distance):
        part = self.inner.score(dot, row[:-1], column[:-1], head, squared_distance)
        return self._apply_cap(part) * row[-1] * column[-1]


def get_weighted_name(inner: Term, cap: float | None) -> str:
    """Return the registered name of a weighted term."""
    if cap is None:
        return f"weighted:{inner.name}"
    # "+" separates the terms in the key of a score, so a cap such as 1e+20 must not contain one.
    return f"weighted@{cap!r}:{inner.name}".replace("+", "")


def weighted_term(inner: Term, cap: float | None = None) -> Term:
    """Return the weighted form of a term; register it with the engines on first use."""
    # Engines treat distance terms differently, so a weighted one must be one too.
    kind: Any = WeightedDistanceTerm if isinstance(inner, DistanceTerm) else WeightedTerm
    return TERMS.get(get_weighted_name(inner, cap)) or register_term(kind(inner, cap))


def weighted_score(
    score: PairScore, row: Tensor, column: Tensor, cap: float | None = None
) -> PairScore:
    """Return a score with every term weighted.

    A plain dot product takes the weights into its features. The keys then differ between the query
    heads of a group. Other terms get the weights as one more statistic of rows and columns.

    Args:
        score: The score.
        row: Weights of queries, shape [B, H, N], in the score's dtype.
        column: Weights of keys, shape [B, H, M], in the score's dtype.
        cap: The call's softcap, which the weighted terms then contain.
    """
    heads = score.shape[1]
    first = score.terms[0]
    # Scaled features keep the fast engines for dot products. A cap or gate forbids it.
    if cap is None and len(score.terms) == 1 and first.term is DOT and first.gate is None:
        query, key = score.features()
        term = ScoreTerm(DOT, partial(weighted_logits, first, row, column, None))
        return PairScore(
            query * row[..., None], repeat_heads(key, heads) * column[..., None], (term,)
        )
    terms = []
    for index, term in enumerate(score.terms):
        # The softcap acts on the score itself and on terms that are marked as capped.
        inner_cap = cap if index == 0 or term.capped else None
        numbers = term.numbers()
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
    """Return the dense logits of a weighted term, by definition."""
    logits = term.definition()
    return weighted(logits if cap is None else cap * torch.tanh(logits / cap), row, column)
