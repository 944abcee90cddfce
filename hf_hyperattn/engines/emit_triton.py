"""A score's Triton functions, value and derivative, written from the graph of the sum of its terms (trace.py).

All numbers are float32 and broadcast against the tile, whichever way it lies. Nothing here imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch

from .score import DistanceTerm, Term, parse_score_key
from .trace import LEAVES, Node, Traced, Untraceable, ancestors, trace

#: Names that are not Triton's own are functions of triton/arithmetic.py.
EXPRESSIONS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "neg": "-{}",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "eq": "{} == {}",
    "and": "{} & {}",
    "or": "{} | {}",
    "not": "~{}",
    "where": "tl.where({}, {}, {})",
    "max": "larger({}, {})",
    "min": "smaller({}, {})",
    "abs": "tl.abs({})",
    "sqrt": "tl.sqrt({})",
    "exp": "exp({})",
    "expm1": "expm1({})",
    "log": "log({})",
    "log1p": "log1p({})",
    "acosh1p": "log1p({} + {})",
    "sinh": "sinh({})",
    "cosh": "cosh({})",
    "cosh_of_sinh": "cosh_of_sinh({})",
    "tanh": "tanh({})",
    "sigmoid": "tl.sigmoid({})",
}


#: Leaves that differ from pair to pair of a row.
OF_PAIRS = {"dot", "squared_distance", "column"}


class SumOfTerms(Term):
    """All terms of a score as one; the softcap, of a call that has one, is the last parameter."""

    def __init__(self, score_key: str, capped: bool):
        self.name, self.terms, self.capped = score_key, parse_score_key(score_key), capped
        self.rows = sum(term.rows for term, *_ in self.terms)
        self.columns = sum(term.columns for term, *_ in self.terms)
        self.heads = sum(term.heads + gated for term, gated, _ in self.terms) + capped

    def parts(self, row, column, head) -> Iterator[tuple]:
        """Each term with its statistics and parameters, its gate or None, and whether it is capped."""
        rows, columns, heads = iter(row), iter(column), iter(head)
        for term, gated, caps in self.terms:
            counts = ((rows, term.rows), (columns, term.columns), (heads, term.heads))
            numbers = [list(islice(of, n)) for of, n in counts]
            yield term, numbers, next(heads) if gated else None, caps and self.capped

    def logits(self, dot, row, column, head, squared_distance=None):
        total = 0
        for term, numbers, gate, capped in self.parts(row, column, head):
            formula: Any = term.score if isinstance(term, DistanceTerm) else term.logits
            part = formula(dot, *numbers, squared_distance)
            if capped:
                part = head[-1] * torch.tanh(part / head[-1])
            total = total + (part if gate is None else part * gate)
        return total


class SumWithDistance(SumOfTerms, DistanceTerm):
    """The same, where one of them reads a squared distance."""

    @property
    def left_out(self) -> int:  # type: ignore[override]  # of a term it is a number
        """That of the term that measures it."""
        return next(term.left_out for term, *_ in self.terms if isinstance(term, DistanceTerm))

    def measuring(self, row, column, head) -> tuple[DistanceTerm, list]:
        """The term that does, and its numbers."""
        return next(
            part[:2] for part in self.parts(row, column, head) if isinstance(part[0], DistanceTerm)
        )

    def by_product(self, dot, row, column, head):
        term, numbers = self.measuring(row, column, head)
        return term.by_product(dot, *numbers)

    def is_inexact(self, squared_distance, row, column, head):
        term, numbers = self.measuring(row, column, head)
        return term.is_inexact(squared_distance, *numbers)

    def factors(self, row, column, head):
        term, numbers = self.measuring(row, column, head)
        return term.factors(*numbers)

    def score(self, dot, row, column, head, squared_distance):
        return self.logits(dot, row, column, head, squared_distance)


@lru_cache(maxsize=256)
def traced(score_key: str, capped: bool) -> tuple[Traced | None, str | None]:
    """The graph of a score, and why there is none."""
    measures = sum(isinstance(term, DistanceTerm) for term, *_ in parse_score_key(score_key))
    if measures > 1:
        return None, f"more than one term of {score_key} reads distances"
    try:
        return trace((SumWithDistance if measures else SumOfTerms)(score_key, capped)), None
    except Untraceable as error:
        return None, str(error)


class TritonWriter:
    """Lines that compute nodes, each once."""

    def __init__(self, softcap: Node | None):
        self.softcap = softcap
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []

    def text(self, node: Node) -> str:
        """A node's name, after the lines that it needs."""
        if node.op == "number":
            number = (
                repr(node.value) if abs(node.value) < float("inf") else f'float("{node.value}")'
            )
            return f"({number})" if node.value < 0 else number
        if node is self.softcap:
            return "softcap"
        if node.op in LEAVES:
            return f"{node.op}[{node.value}]" if node.op in ("row", "column", "head") else node.op
        if node.op == "local":
            return str(node.value)
        if node.op == "detach":
            return self.text(node.args[0])
        if node not in self.names:
            arguments = [self.text(a) for a in node.args]
            expression = EXPRESSIONS[node.op].format(*arguments)
            if node.op == "where":
                if arguments[1] == arguments[2]:  # but for `detach`
                    return arguments[1]
                expression = self.extreme(node) or expression
            if node.op == "div" and node.args[1].op == "sqrt":  # one instruction
                root = f"tl.rsqrt({self.text(node.args[1].args[0])})"
                expression = (
                    root if node.args[0] is node.graph.number(1) else f"{arguments[0]} * {root}"
                )
            if node.op == "sub" and node.args[1].op == "mul":
                # The compiler would turn x * 2 into x + x, and miss that both are one instruction.
                factor = next((f for f in node.args[1].args if f.op == "number"), None)
                if factor is not None:
                    x = next(f for f in node.args[1].args if f is not factor)
                    expression = f"tl.fma({self.text(x)}, {-factor.value}, {arguments[0]})"
            self.names[node] = f"v{node.order}"
            self.lines.append(f"v{node.order} = {expression}")
        return self.names[node]

    def extreme(self, node: Node) -> str | None:
        """Return a choice between two numbers by their order as a maximum or minimum: one instruction, not two."""
        condition, chosen, other = node.args
        if condition.op not in ("lt", "le"):
            return None
        smaller, larger = condition.args
        functions = {(larger, smaller): "larger", (smaller, larger): "smaller"}
        name = functions.get((chosen, other))
        return name and f"{name}({self.text(smaller)}, {self.text(larger)})"

    def margin(self, condition: Node) -> str:
        """Return a number that is negative where a condition holds of squared_distance / slack, as an expression."""
        if not self.lines:
            self.lines.append("squared_distance = squared_distance * (1.0 / slack)")
        if condition.op == "lt":
            return " - ".join(map(self.text, condition.args))
        if condition.op in ("or", "and"):
            function = "tl.minimum" if condition.op == "or" else "tl.maximum"
            return f"{function}({', '.join(map(self.margin, condition.args))})"
        return f"tl.where({self.text(condition)}, -1.0, 1.0)"


class Emitted(NamedTuple):
    """The Triton functions of a score, and which of its statistics and parameters have gradients.

    Args:
        texts: by their names,
            score: from (dot, squared_distance, row, column, head, softcap) to the logits.
            slopes: from the same to the slopes of the logits by dot (or None), by the statistics of rows, by those of
                columns and by the parameters, tuples. They are those by the product form, wherever the distance was
                taken from.
            by_product: from (dot, row, column, head) to the squared distance, where the score reads one.
            is_inexact: from (squared_distance, row, column, head) to the pairs to take from differences, likewise.
            margin, bound: from (squared_distance, slack, row, column, head) and from (slack, row, head) to numbers of a
                pair and of a row, likewise. The margin is less than the bound for the pairs that `is_inexact` finds by
                squared_distance / slack. The smallest margin of a row then tells whether it has such a pair. A loop
                carries that minimum with one instruction for each pair, and a tile of truth values with several.
            factors: from (row, column, head) to what queries and keys are multiplied with for that, likewise.
        rows, columns, heads: the places of what has gradients.
        left_out: numbers at a vector's end that distances do not read.
    """

    texts: dict[str, str]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    heads: tuple[int, ...]
    left_out: int = 0


@lru_cache(maxsize=256)
def emitted(score_key: str, capped: bool) -> Emitted:
    """The Triton functions of a score that has a graph.

    Args:
        score_key: see `PairScore.score_key`.
        capped: whether there is a softcap.
    """
    t, reason = traced(score_key, capped)
    assert t is not None, reason
    g, numbers = t.graph, "row, column, head"
    softcap = g.node("head", value=SumOfTerms(score_key, capped).heads - 1) if capped else None
    slopes, _ = t.through_logit(g.number(1), masked=False)
    learns = [n for n, d in slopes.items() if n is not softcap and d is not g.number(0)]
    rows, columns, heads = (
        tuple(sorted(n.value for n in learns if n.op == op)) for op in ("row", "column", "head")
    )

    def all_slopes(w: TritonWriter) -> str:
        of = lambda op, at: listed(w.text(slopes[g.node(op, value=i)]) for i in at)
        dot = w.text(slopes[g.node("dot")]) if g.node("dot") in learns else "None"
        return f"{dot}, {of('row', rows)}, {of('column', columns)}, {of('head', heads)}"

    texts: dict[str, str] = {}

    def write(name: str, arguments: str, result: Callable[[TritonWriter], str]) -> None:
        writer = TritonWriter(softcap)
        returned = result(writer)
        texts[name] = (
            "\n    ".join([f"def {name}({arguments}):", *writer.lines, f"return {returned}"]) + "\n"
        )

    pair = f"dot, squared_distance, {numbers}, softcap"
    write("score", pair, lambda w: w.text(t.logit))
    write("slopes", pair, all_slopes)
    if t.distance is not None:
        by_product, is_inexact = t.distance.by_product, t.distance.is_inexact
        write("by_product", f"dot, {numbers}", lambda w: w.text(by_product))
        factors = t.distance.factors
        write("is_inexact", f"squared_distance, {numbers}", lambda w: w.text(is_inexact))
        if is_bounded_by_row(is_inexact):
            write("margin", f"squared_distance, slack, {numbers}", lambda w: "squared_distance")
            write("bound", "slack, row, head", lambda w: f"slack * {w.text(is_inexact.args[1])}")
        else:
            write("margin", f"squared_distance, slack, {numbers}", lambda w: w.margin(is_inexact))
            write("bound", "slack, row, head", lambda w: "0.0")
        write("factors", numbers, lambda w: listed(w.text(f) for f in factors))
    return Emitted(texts, rows, columns, heads, 0 if t.distance is None else t.distance.left_out)


def is_bounded_by_row(condition: Node) -> bool:
    """Return whether a condition asks if the squared distance is less than a number of the row."""
    if condition.op != "lt" or condition.args[0].op != "squared_distance":
        return False
    return not {node.op for node in ancestors(condition.args[1:])} & OF_PAIRS


def listed(expressions: Iterable[str]) -> str:
    """A tuple display, also of none or one."""
    return "(" + "".join(f"{e}, " for e in expressions) + ")"
