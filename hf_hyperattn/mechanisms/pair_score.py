"""What engines see of a score from outside (scores.py): its term, its numbers, and its dense form for `reference`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from ..engines import DistanceTerm, PairScore, Points, ScoreTerm, Term, repeat_heads
from ..engines.cpu import norms, squared_norms
from ..engines.graph_torch import evaluate_with_vjp, graph_of
from ..engines.score import TERMS, euclidean_distances, working_dtype
from ..engines.trace import Untraceable
from ..geometry.scalars import at_least
from .hype.positions import from_first

SIDES = ("query_", "key_")
FLOOR = 1e-12  # of a norm
# Which squared distances are taken from differences, relative to |q|² + |k|², see cone/terms.py.
NEAR, NEAREST, EXACT = 1e-3, 1 / 16, 1.42e-6
Start = float | tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Definition:
    """A score as its author wrote it.

    Args:
        name: what it is registered under.
        function: from what its arguments name to the logits.
        statistics: functions from vectors [..., d] to numbers [...], by the names that `query_` and `key_` go before.
        sides: of queries and of keys the statistics that the function reads, "square" first where it reads distances.
        learned, constants: starting values, by the names of the function's arguments.
        vectors: those of the statistics' arguments, of which every query head learns one number a dimension.
        formula: a hash of what it computes.
    """

    name: str
    function: Callable[..., Tensor]
    statistics: Mapping[str, Callable[..., Tensor]]
    reads: tuple[str, ...]
    sides: tuple[tuple[str, ...], tuple[str, ...]]
    learned: dict[str, Start]
    constants: dict[str, Start]
    vectors: dict[str, float]
    formula: str = ""

    @property
    def defined_in(self) -> str:
        """Module and name of the function."""
        return f"{self.function.__module__}:{self.function.__qualname__}"

    @property
    def parameters(self) -> dict[str, Start]:
        """What a tile reads a number a head of."""
        return {**self.learned, **self.constants}

    @property
    def reads_positions(self) -> bool:
        """Whether it needs to know which tokens a pair is of."""
        return "position" in self.sides[0] + self.sides[1]

    def logits(self, dot, row, column, head, squared_distance) -> Tensor:
        """The function of tensors in the order of a `Term`."""
        known = {"dot": dot, "squared_distance": squared_distance}
        for prefix, names, numbers in zip(SIDES, self.sides, (row, column), strict=True):
            known |= {
                prefix + n: x.detach() if n == "position" else x
                for n, x in zip(names, numbers, strict=True)
            }
        values = dict(zip(self.parameters, head, strict=False))
        values |= {n: values[n].detach() for n in self.constants}
        out = self.function(**{n: known[n] for n in self.reads}, **values)
        if not isinstance(out, Tensor):
            raise Untraceable(f"it returns a {type(out).__name__}; allowed: a tensor")
        return out if out.shape == dot.shape else out.expand(dot.shape).clone()


def vectors_of(statistic: Callable) -> tuple[str, ...]:
    """The names of a statistic's parameters."""
    return tuple(inspect.signature(statistic).parameters)[1:]


def make_term(d: Definition) -> Term:
    """What engines see of it."""
    return (PairDistanceTerm if "square" in d.sides[0] else PairTerm)(d)


class PairTerm(Term):
    """A score that reads no distance."""

    def __init__(self, definition: Definition):
        self.name, self.definition = definition.name, definition
        self.rows, self.columns = map(len, definition.sides)
        self.heads = len(definition.parameters)

    def logits(self, dot, row, column, head, squared_distance=None):
        return self.definition.logits(dot, row, column, head, None)


class PairDistanceTerm(DistanceTerm):
    """One that does: the squares of the vectors are its first statistics, the root of the scale its last parameter."""

    def __init__(self, definition: Definition):
        self.name, self.definition = definition.name, definition
        self.rows, self.columns = map(len, definition.sides)
        self.heads = len(definition.parameters) + 1

    def by_product(self, dot, row, column, head):
        return (row[0] + column[0]) - 2 * dot

    def is_inexact(self, squared_distance, row, column, head):
        size = row[0] + column[0]
        return squared_distance < size * (EXACT * size).clamp(NEAR, NEAREST)

    def factors(self, row, column, head):
        root = head[-1].detach()
        return 1 / root, root

    def score(self, dot, row, column, head, squared_distance):
        return self.definition.logits(dot, row, column, head, squared_distance)


class Dense(torch.autograd.Function):
    """A term's logits of whole matrices by its function, with the gradient of its graph: one rule for all engines."""

    @staticmethod
    def forward(ctx: Any, term, dot, squared, *numbers):
        ctx.term = term
        ctx.save_for_backward(dot, squared, *numbers)
        cut = term.rows, term.rows + term.columns
        parts = numbers[: cut[0]], numbers[cut[0] : cut[1]], numbers[cut[1] :]
        return term.definition.logits(dot, *parts, squared)

    @staticmethod
    def backward(ctx: Any, *grads):
        dot, squared, *numbers = ctx.saved_tensors
        a, b = ctx.term.rows, ctx.term.rows + ctx.term.columns
        graph: Any = graph_of(ctx.term)
        near = None if squared is None else torch.ones_like(squared, dtype=torch.bool)
        _, pull = evaluate_with_vjp(
            graph, dot, numbers[:a], numbers[a:b], numbers[b:], squared, near
        )
        d_dot, *others = pull(grads[0])
        d_squared: Any = None if squared is None else others.pop()
        gradients = [d_dot, d_squared, *(g for part in others for g in part)]
        shapes = [None if t is None else t.shape for t in (dot, squared, *numbers)]
        return None, *(
            None if g is None else g.sum_to_size(s) for g, s in zip(gradients, shapes, strict=True)
        )


class PairSpace(NamedTuple):
    """A definition with its numbers.

    Args:
        values: by name, parameters and constants, a number or a tensor [H] or [1] each; vectors [H, d] or a number.
        scale: of the host's logit.
        positions: of queries [B|1, 1, N] and of keys [B|1, 1, M], where the score reads them.
    """

    definition: Definition
    values: Mapping[str, Tensor | float]
    scale: float
    positions: tuple[Tensor, Tensor] | None = None

    def score(self, query, key, scale=None, gate=None, capped=False) -> PairScore:
        """See `ScoreLayer`; the scale is always the host's."""
        d, heads, dtype = self.definition, query.shape[1], working_dtype(query, key)
        root = self.scale**0.5
        positions = (None, None) if self.positions is None else from_first(*self.positions, dtype)
        row, column = (
            [self.statistic(name, x, root, heads, p, dtype) for name in names]
            for x, names, p in zip((query, key), d.sides, positions, strict=True)
        )
        numbers = [
            *(self.values[name] for name in d.parameters),
            *[root] * ("square" in d.sides[0]),
        ]
        on: Any = dict(dtype=dtype, device=query.device)
        head = [
            x.to(**on).expand(heads) if isinstance(x, Tensor) else torch.full((heads,), x, **on)
            for x in numbers
        ]
        dense = partial(self.logits, query, key, row, column, head)
        points = partial(self.points, query, key, dtype) if "square" in d.sides[0] else None
        term = TERMS[d.name]
        made = ScoreTerm(
            term,
            dense,
            tuple(row),
            tuple(column),
            tuple(head),
            gate=gate,
            capped=capped,
            points=points,
        )
        return PairScore(query, key, (made,), self.scale)

    def statistic(
        self, name: str, x: Tensor, root: float, heads: int, positions: Tensor | None, dtype
    ) -> Tensor:
        """Numbers [B, H, L] of vectors [B, H, L, d] times `root`."""
        if name == "position":
            assert positions is not None
            return positions.expand(*x.shape[:3])
        if name == "norm":
            return at_least(norms(x, dtype) * root, FLOOR)
        if name == "square":
            return squared_norms((x,), dtype, x.shape[-1])[0] * self.scale
        function = self.definition.statistics[name]
        vectors = {n: self.values[n] for n in vectors_of(function)}
        if vectors:
            x = repeat_heads(x, heads)
            vectors = {
                n: v[:, None].to(dtype) if isinstance(v, Tensor) else v for n, v in vectors.items()
            }
        return function(x.to(dtype) * root, **vectors).to(dtype)

    def points(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> Points:
        """What distances are measured between."""
        root = self.scale**0.5
        return Points(query.to(dtype) * root, key.to(dtype) * root)

    def logits(self, query, key, row, column, head) -> Tensor:
        """[B, H, N, M] by the function itself, with distances from differences."""
        term: Any = TERMS[self.definition.name]
        heads, dtype, root = (
            query.shape[1],
            row[0].dtype if row else working_dtype(query, key),
            self.scale**0.5,
        )
        q, k = query.to(dtype) * root, repeat_heads(key.to(dtype), heads) * root
        squared = (
            euclidean_distances(q, k).square() if "square" in self.definition.sides[0] else None
        )
        rows = [x[..., :, None] for x in row]
        columns = [repeat_heads(x, heads)[..., None, :] for x in column]
        numbers = (q @ k.mT, squared, *rows, *columns, *(x[:, None, None] for x in head))
        if torch.compiler.is_compiling() or peek_interpreter_stack() is not None:
            parts = rows, columns, numbers[2 + len(rows) + len(columns) :]
            return term.definition.logits(numbers[0], *parts, squared)
        return Dense.apply(term, *numbers)
