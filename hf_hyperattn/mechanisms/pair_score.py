"""A score from `@ha.score` as engines see it: its term, its numbers, and its dense logits.

Read `PairSpace.score` to see how one call of the author's function becomes a `PairScore`.
scores.py makes the definitions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engines import DistanceTerm, PairScore, Points, ScoreTerm, Term, repeat_heads
from ..engines.cpu import norms, squared_norms
from ..engines.graph_torch import evaluate_with_vjp, graph_of
from ..engines.score import TERMS, euclidean_distances, loses_digits, working_dtype
from ..engines.trace import Untraceable
from ..geometry.scalars import at_least
from ..utils.torch_private import find_transform
from .positions import subtract_first

#: Prefixes of the arguments that are statistics of one vector.
SIDES = ("query_", "key_")
#: Least norm, so that scores can divide by the norm of a zero vector.
FLOOR = 1e-12
Start = float | tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Definition:
    """A score as its author wrote it.

    Args:
        name: Registered name.
        function: Function from the arguments in `reads`, and the parameters, to logits.
        statistics: Functions from vectors [..., d] to numbers [...], by name without prefix.
        reads: Arguments of the function that are not parameters.
        sides: Names of the statistics that the function reads, of queries and of keys. "square"
            comes first on both sides if it reads distances.
        learned, constants: Starting values, by argument of the function.
        vectors: Starting values of the vectors [H, d], by argument of a statistic.
        formula: Hash of the graph and the statistics.
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
        """Module and name of the function, "module:name"."""
        return f"{self.function.__module__}:{self.function.__qualname__}"

    @property
    def parameters(self) -> dict[str, Start]:
        """Starting values of the head parameters of the term, in their order."""
        return {**self.learned, **self.constants}

    @property
    def reads_positions(self) -> bool:
        """Whether the function reads positions of tokens."""
        return "position" in self.sides[0] + self.sides[1]

    def evaluate_logits(self, dot, row, column, head, squared_distance) -> Tensor:
        """Call the function with the arguments of a `Term`.

        Args:
            dot, row, column, head: As in `Term`.
            squared_distance: Squared distances of all pairs; None if the function reads none.

        Returns:
            Logits in the shape of `dot`.

        Raises:
            Untraceable: The function does not return a tensor.
        """
        known = {"dot": dot, "squared_distance": squared_distance}
        for prefix, names, numbers in zip(SIDES, self.sides, (row, column), strict=True):
            for name, number in zip(names, numbers, strict=True):
                # Positions get no gradient, in the trace as well.
                known[prefix + name] = number.detach() if name == "position" else number
        # Not strict: a `PairDistanceTerm` has one parameter more, the root of the scale.
        values = dict(zip(self.parameters, head, strict=False))
        values |= {n: values[n].detach() for n in self.constants}
        out = self.function(**{n: known[n] for n in self.reads}, **values)
        if not isinstance(out, Tensor):
            raise Untraceable(f"it returns a {type(out).__name__}; allowed: a tensor")
        # A function that ignores the product may return less than a tile. The clone makes it
        # writable for the engine.
        return out if out.shape == dot.shape else out.expand(dot.shape).clone()


def read_vector_names(statistic: Callable) -> tuple[str, ...]:
    """Return the names of a statistic's vectors: its arguments after the first."""
    return tuple(inspect.signature(statistic).parameters)[1:]


def make_term(d: Definition) -> Term:
    """Return the term of a definition."""
    reads_distance = "square" in d.sides[0]
    return PairDistanceTerm(d) if reads_distance else PairTerm(d)


class PairTerm(Term):
    """The term of a score that reads no distance."""

    def __init__(self, definition: Definition):
        self.name = definition.name
        self.definition = definition
        self.rows, self.columns = map(len, definition.sides)
        self.heads = len(definition.parameters)

    def logits(self, dot, row, column, head, squared_distance=None):
        return self.definition.evaluate_logits(dot, row, column, head, None)


class PairDistanceTerm(DistanceTerm):
    """The term of a score that reads the squared distance.

    The first statistic of each side is scale · |vector|². The last head parameter is the root of
    the scale.
    """

    def __init__(self, definition: Definition):
        self.name = definition.name
        self.definition = definition
        self.rows, self.columns = map(len, definition.sides)
        self.heads = len(definition.parameters) + 1

    def by_product(self, dot, row, column, head):
        return (row[0] + column[0]) - 2 * dot

    def is_inexact(self, squared_distance, row, column, head):
        return loses_digits(squared_distance, row[0] + column[0])

    def factors(self, row, column, head):
        # The query's features already have the whole scale, the key's have none. Both points need
        # its root.
        root = head[-1].detach()
        return 1 / root, root

    def score(self, dot, row, column, head, squared_distance):
        return self.definition.evaluate_logits(dot, row, column, head, squared_distance)


class Dense(torch.autograd.Function):
    """The logits of whole matrices, with the gradient of the term's graph.

    All engines then follow the same rule where autograd would return NaN or infinity, for example
    for `sqrt(0)`.
    """

    @staticmethod
    def forward(ctx: Any, term, dot, squared, *numbers):
        ctx.term = term
        ctx.save_for_backward(dot, squared, *numbers)
        columns_at = term.rows
        heads_at = term.rows + term.columns
        row, column = numbers[:columns_at], numbers[columns_at:heads_at]
        return term.definition.evaluate_logits(dot, row, column, numbers[heads_at:], squared)

    @staticmethod
    def backward(ctx: Any, *grads):
        dot, squared, *numbers = ctx.saved_tensors
        columns_at = ctx.term.rows
        heads_at = ctx.term.rows + ctx.term.columns
        row, column = numbers[:columns_at], numbers[columns_at:heads_at]
        graph: Any = graph_of(ctx.term)
        # All distances came from differences. Their gradient must not also flow through the
        # product and the norms.
        near = None if squared is None else torch.ones_like(squared, dtype=torch.bool)
        _, pull = evaluate_with_vjp(graph, dot, row, column, numbers[heads_at:], squared, near)
        d_dot, d_row, d_column, d_head, *d_squared = pull(grads[0])
        gradients = [d_dot, d_squared[0] if d_squared else None, *d_row, *d_column, *d_head]
        inputs: Any = (dot, squared, *numbers)
        # Gradients may have the shape of the whole matrix: sum what was broadcast. The first None
        # belongs to `term`.
        return None, *(
            None if g is None else g.sum_to_size(x.shape)
            for g, x in zip(gradients, inputs, strict=True)
        )


class PairSpace(NamedTuple):
    """A definition with the numbers and positions of one call.

    Args:
        definition: The score.
        values: Numbers by name. Parameters and constants are floats or tensors [H] or [1]. Vectors
            are floats or tensors [H, d] or [H, 1].
        scale: Scale of the attention layer, above 0.
        positions: Positions of queries [B|1, 1, N] and keys [B|1, 1, M]; None if the score does not
            read them.
    """

    definition: Definition
    values: Mapping[str, Tensor | float]
    scale: float
    positions: tuple[Tensor, Tensor] | None = None

    def score(self, query, key, scale=None, gate=None, capped=False) -> PairScore:
        """Return the score of queries and keys.

        Args:
            query: [B, H, N, d].
            key: [B, Hkv, M, d].
            scale: Ignored: the score always uses `self.scale`. See `ScoreLayer`.
            gate: Weight of the term per query head [H]. Default: 1.
            capped: Whether the model's softcap applies to the term.
        """
        d = self.definition
        heads, dtype = query.shape[1], working_dtype(query, key)
        root = self.scale**0.5
        reads_distance = "square" in d.sides[0]
        at_queries, at_keys = None, None
        if self.positions is not None:
            at_queries, at_keys = subtract_first(*self.positions, dtype)
        # Statistics are made here, once per token and not once per pair.
        row = [self.read_statistic(n, query, root, heads, at_queries, dtype) for n in d.sides[0]]
        column = [self.read_statistic(n, key, root, heads, at_keys, dtype) for n in d.sides[1]]
        numbers = [self.values[name] for name in d.parameters]
        if reads_distance:
            numbers.append(root)
        on: Any = dict(dtype=dtype, device=query.device)
        head = [
            x.to(**on).expand(heads) if isinstance(x, Tensor) else torch.full((heads,), x, **on)
            for x in numbers
        ]
        term = ScoreTerm(
            # The registered term, because compiled engines find it by name.
            term=TERMS[d.name],
            definition=partial(self.compute_dense_logits, query, key, row, column, head),
            row=tuple(row),
            column=tuple(column),
            head=tuple(head),
            gate=gate,
            capped=capped,
            points=partial(self.make_points, query, key, dtype) if reads_distance else None,
        )
        return PairScore(query, key, (term,), self.scale)

    def read_statistic(
        self, name: str, x: Tensor, root: float, heads: int, positions: Tensor | None, dtype
    ) -> Tensor:
        """Return a statistic of scaled vectors, [B, H or Hkv, L].

        Args:
            name: Name without prefix.
            x: Vectors [B, H or Hkv, L, d], not scaled yet.
            root: Root of the scale.
            heads: Number of query heads.
            positions: Positions of the tokens [B|1, 1, L], or None.
            dtype: Dtype of the result.
        """
        if name == "position":
            assert positions is not None
            return positions.expand(*x.shape[:3])
        if name == "norm":
            return at_least(norms(x, dtype) * root, FLOOR)
        if name == "square":
            return squared_norms((x,), dtype, x.shape[-1])[0] * self.scale
        function = self.definition.statistics[name]
        vectors = {n: self.values[n] for n in read_vector_names(function)}
        if vectors:
            # Query heads that share a key head have different vectors, so each needs its own copy.
            x = repeat_heads(x, heads)
            vectors = {
                n: v[:, None].to(dtype) if isinstance(v, Tensor) else v for n, v in vectors.items()
            }
        return function(x.to(dtype) * root, **vectors).to(dtype)

    def make_points(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> Points:
        """Return the scaled vectors whose distances the score reads."""
        root = self.scale**0.5
        return Points(query.to(dtype) * root, key.to(dtype) * root)

    def compute_dense_logits(self, query, key, row, column, head) -> Tensor:
        """Return the logits from the function itself, with all distances from differences.

        Args:
            query: [B, H, N, d].
            key: [B, Hkv, M, d].
            row, column, head: As in `ScoreTerm`.

        Returns:
            [B, H, N, M].
        """
        term: Any = TERMS[self.definition.name]
        heads = query.shape[1]
        dtype = row[0].dtype if row else working_dtype(query, key)
        root = self.scale**0.5
        q = query.to(dtype) * root
        k = repeat_heads(key.to(dtype), heads) * root
        squared = None
        if "square" in self.definition.sides[0]:
            squared = euclidean_distances(q, k).square()
        dot = q @ k.mT
        # Statistics get an axis for the other side, parameters get two for the pair.
        rows = [x[..., :, None] for x in row]
        columns = [repeat_heads(x, heads)[..., None, :] for x in column]
        parameters = [x[:, None, None] for x in head]
        # The compiler and torch.func differentiate plain operators. They cannot use `Dense`.
        if torch.compiler.is_compiling() or find_transform() is not None:
            return term.definition.evaluate_logits(dot, rows, columns, parameters, squared)
        return Dense.apply(term, dot, squared, *rows, *columns, *parameters)
