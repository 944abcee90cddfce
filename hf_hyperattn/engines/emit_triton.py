"""Write a score's Triton functions from the graph of its terms (trace.py).

All numbers are float32 and broadcast against the tile, also if the tile is transposed. This module
does not import Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch

from .score import DistanceTerm, Term, parse_score_key
from .trace import INDEXED, LEAVES, Node, Traced, Untraceable, sort_ancestors, trace_term

#: Functions without `tl.` are defined in triton/arithmetic.py, because Triton lacks them or is too
#: inexact there.
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


#: Leaves that differ between the pairs of a row.
PER_PAIR = {"dot", "squared_distance", "column"}


class SumOfTerms(Term):
    """All terms of a score as one term.

    Args:
        score_key: See `PairScore.score_key`.
        capped: Whether the call has a softcap; it is the last parameter then.
    """

    def __init__(self, score_key: str, capped: bool):
        self.name = score_key
        self.terms = parse_score_key(score_key)
        self.capped = capped
        self.rows = sum(term.rows for term, *_ in self.terms)
        self.columns = sum(term.columns for term, *_ in self.terms)
        self.heads = sum(term.heads + gated for term, gated, _ in self.terms) + capped

    def split_numbers(self, row, column, head) -> Iterator[tuple]:
        """Yield each term, its numbers, its gate or None, and whether it is capped."""
        rows, columns, heads = iter(row), iter(column), iter(head)
        for term, gated, caps in self.terms:
            counts = ((rows, term.rows), (columns, term.columns), (heads, term.heads))
            numbers = [list(islice(source, count)) for source, count in counts]
            # The gate stands behind its term's parameters, as `serialize` puts it.
            gate = next(heads) if gated else None
            yield term, numbers, gate, caps and self.capped

    def logits(self, dot, row, column, head, squared_distance=None):
        total = 0
        for term, numbers, gate, capped in self.split_numbers(row, column, head):
            # The kernel knows the distance already. `logits` would compute it from the product
            # again.
            formula: Any = term.score if isinstance(term, DistanceTerm) else term.logits
            part = formula(dot, *numbers, squared_distance)
            if capped:
                part = head[-1] * torch.tanh(part / head[-1])
            total = total + (part if gate is None else part * gate)
        return total


class SumWithDistance(SumOfTerms, DistanceTerm):
    """All terms of a score as one term, if one of them reads a squared distance."""

    @property
    def left_out(self) -> int:  # type: ignore[override]  # a plain attribute in DistanceTerm
        """Numbers at a vector's end that the distance does not read."""
        return next(term.left_out for term, *_ in self.terms if isinstance(term, DistanceTerm))

    def find_distance_term(self, row, column, head) -> tuple[DistanceTerm, list]:
        """Return the term that reads the distance, and its numbers."""
        parts = self.split_numbers(row, column, head)
        return next(part[:2] for part in parts if isinstance(part[0], DistanceTerm))

    def by_product(self, dot, row, column, head):
        term, numbers = self.find_distance_term(row, column, head)
        return term.by_product(dot, *numbers)

    def is_inexact(self, squared_distance, row, column, head):
        term, numbers = self.find_distance_term(row, column, head)
        return term.is_inexact(squared_distance, *numbers)

    def factors(self, row, column, head):
        term, numbers = self.find_distance_term(row, column, head)
        return term.factors(*numbers)

    def score(self, dot, row, column, head, squared_distance):
        return self.logits(dot, row, column, head, squared_distance)


@lru_cache(maxsize=256)
def trace_score(score_key: str, capped: bool) -> tuple[Traced | None, str | None]:
    """Return the graph of a score or None, and the reason why there is none or None.

    Args:
        score_key: See `PairScore.score_key`.
        capped: Whether the call has a softcap.
    """
    measures = sum(isinstance(term, DistanceTerm) for term, *_ in parse_score_key(score_key))
    # The kernel holds one squared distance per pair.
    if measures > 1:
        return None, f"more than one term of {score_key} reads distances"
    kind = SumWithDistance if measures else SumOfTerms
    try:
        # Returned, not raised: the cache keeps results, but not exceptions.
        return trace_term(kind(score_key, capped)), None
    except Untraceable as error:
        return None, str(error)


class TritonWriter:
    """Write the lines that compute nodes, each node once.

    Args:
        softcap: The node of the softcap, or None without one.
    """

    def __init__(self, softcap: Node | None):
        self.softcap = softcap
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []

    def write_node(self, node: Node) -> str:
        """Return an expression for a node, after adding the lines that it needs."""
        if node.op == "number":
            # Python prints infinity as `inf`, which is no name in the emitted code.
            finite = abs(node.value) < float("inf")
            number = repr(node.value) if finite else f'float("{node.value}")'
            return f"({number})" if node.value < 0 else number
        if node is self.softcap:
            return "softcap"
        if node.op in LEAVES:
            return f"{node.op}[{node.value}]" if node.op in INDEXED else node.op
        if node.op == "local":
            return str(node.value)
        if node.op == "detach":
            return self.write_node(node.args[0])
        if node not in self.names:
            arguments = [self.write_node(a) for a in node.args]
            expression = EXPRESSIONS[node.op].format(*arguments)
            # The graph folds equal branches, but a `detach` makes them different nodes with the
            # same text.
            if node.op == "where" and arguments[1] == arguments[2]:
                return arguments[1]
            if node.op == "where":
                expression = self.write_extreme(node) or expression
            if node.op == "sub" and node.args[1].op == "mul":
                expression = self.write_fused(node) or expression
            # A division by a root is one instruction on a GPU.
            if node.op == "div" and node.args[1].op == "sqrt":
                root = f"tl.rsqrt({self.write_node(node.args[1].args[0])})"
                is_inverse = node.args[0] is node.graph.add_number(1)
                expression = root if is_inverse else f"{arguments[0]} * {root}"
            self.names[node] = f"v{node.order}"
            self.lines.append(f"v{node.order} = {expression}")
        return self.names[node]

    def write_extreme(self, node: Node) -> str | None:
        """Return a choice of the larger or smaller number as one instruction; None for others.

        A comparison with NaN is false, so the choice is the second branch. One instruction does the
        same only if one of the numbers is a constant: `tl.maximum` returns the number beside a NaN,
        and `larger` returns the NaN.
        """
        condition, chosen, other = node.args
        if condition.op not in ("lt", "le"):
            return None
        low, high = condition.args
        is_maximum = (chosen, other) == (high, low)
        if not is_maximum and (chosen, other) != (low, high):
            return None
        if other.op == "number":
            function = "tl.maximum" if is_maximum else "tl.minimum"
        elif chosen.op == "number":
            function = "larger" if is_maximum else "smaller"
        else:
            return None
        return f"{function}({self.write_node(low)}, {self.write_node(high)})"

    def write_fused(self, node: Node) -> str | None:
        """Return a - b · number as one instruction; None if no factor is a number.

        The compiler fuses other products by itself. It turns x · 2 into x + x first, and then
        cannot.
        """
        difference, product = node.args
        for factor, other in (product.args, product.args[::-1]):
            if factor.op == "number":
                x, a = self.write_node(other), self.write_node(difference)
                minus = self.write_node(product.graph.add_number(-factor.value))
                return f"tl.fma({x}, {minus}, {a})"
        return None

    def write_margin(self, condition: Node) -> str:
        """Return a number that is negative if a condition holds of squared_distance / slack."""
        if not self.lines:
            self.lines.append("squared_distance = squared_distance * (1.0 / slack)")
        if condition.op == "lt":
            low, high = map(self.write_node, condition.args)
            return f"{low} - {high}"
        if condition.op in ("or", "and"):
            function = "tl.minimum" if condition.op == "or" else "tl.maximum"
            first, second = map(self.write_margin, condition.args)
            return f"{function}({first}, {second})"
        return f"tl.where({self.write_node(condition)}, -1.0, 1.0)"


class Emitted(NamedTuple):
    """The Triton functions of a score, and the numbers that have gradients.

    Args:
        texts: Functions by their names:

            - `score` from (dot, squared_distance, row, column, head, softcap) to the logits.
            - `slopes` from the same to the slopes of the logits: by dot or None, and tuples of those
              by row statistics, by column statistics and by parameters. They go through the product
              form, also for distances from differences.
            - `by_product` from (dot, row, column, head) to the squared distance.
            - `is_inexact` from (squared_distance, row, column, head) to the pairs to compute from
              differences.
            - `margin` from (squared_distance, slack, row, column, head) to a number of each pair, and
              `bound` from (slack, row, head) to one of each row. The margin is less than the bound
              for the pairs that `is_inexact` finds by squared_distance / slack. The smallest margin
              of a row then tells whether it has such a pair. A loop keeps that minimum with one
              instruction for each pair; a tile of truth values takes several.
            - `factors` from (row, column, head) to the factors of queries and keys for the
              differences.

            The last five exist only if the score reads a distance.
        rows, columns, heads: Indices of the statistics and parameters that have gradients.
        left_out: Numbers at a vector's end that distances do not read.
    """

    texts: dict[str, str]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    heads: tuple[int, ...]
    left_out: int = 0


@lru_cache(maxsize=256)
def emit_functions(score_key: str, capped: bool) -> Emitted:
    """Return the Triton functions of a score that `trace_score` can trace.

    Args:
        score_key: See `PairScore.score_key`.
        capped: Whether the call has a softcap.
    """
    t, reason = trace_score(score_key, capped)
    assert t is not None, reason
    g = t.graph
    numbers = "row, column, head"
    softcap = None
    if capped:
        softcap = g.add_node("head", value=SumOfTerms(score_key, capped).heads - 1)
    # Not masked: Triton kernels take all gradients through the product form.
    slopes, _ = t.through_logit(g.add_number(1), masked=False)
    # The softcap is a parameter in the graph only. A gradient of constant 0 needs no code.
    learned = [n for n, d in slopes.items() if n is not softcap and d is not g.add_number(0)]
    rows, columns, heads = (tuple(sorted(n.value for n in learned if n.op == op)) for op in INDEXED)

    def write_slopes(w: TritonWriter) -> str:
        def write_tuple(op: str, places: tuple[int, ...]) -> str:
            return format_tuple(w.write_node(slopes[g.add_node(op, value=i)]) for i in places)

        dot = g.add_node("dot")
        by_dot = w.write_node(slopes[dot]) if dot in learned else "None"
        by_row = write_tuple("row", rows)
        by_column = write_tuple("column", columns)
        by_head = write_tuple("head", heads)
        return f"{by_dot}, {by_row}, {by_column}, {by_head}"

    texts: dict[str, str] = {}

    def write_function(name: str, arguments: str, result: Callable[[TritonWriter], str]) -> None:
        writer = TritonWriter(softcap)
        returned = result(writer)
        lines = [f"def {name}({arguments}):", *writer.lines, f"return {returned}"]
        texts[name] = "\n    ".join(lines) + "\n"

    pair = f"dot, squared_distance, {numbers}, softcap"
    write_function("score", pair, lambda w: w.write_node(t.logit))
    write_function("slopes", pair, write_slopes)
    if t.distance is not None:
        by_product, is_inexact, factors, _ = t.distance
        write_function("by_product", f"dot, {numbers}", lambda w: w.write_node(by_product))
        write_function(
            "is_inexact", f"squared_distance, {numbers}", lambda w: w.write_node(is_inexact)
        )
        distance = f"squared_distance, slack, {numbers}"
        if is_bounded_by_row(is_inexact):
            # The distance is the margin: the slack multiplies the bound instead, once a row.
            bound = is_inexact.args[1]
            write_function("margin", distance, lambda w: "squared_distance")
            write_function("bound", "slack, row, head", lambda w: f"slack * {w.write_node(bound)}")
        else:
            write_function("margin", distance, lambda w: w.write_margin(is_inexact))
            write_function("bound", "slack, row, head", lambda w: "0.0")
        write_function("factors", numbers, lambda w: format_tuple(w.write_node(f) for f in factors))
    left_out = 0 if t.distance is None else t.distance.left_out
    return Emitted(texts=texts, rows=rows, columns=columns, heads=heads, left_out=left_out)


def is_bounded_by_row(condition: Node) -> bool:
    """Return whether a condition asks if the squared distance is less than a number of the row."""
    if condition.op != "lt" or condition.args[0].op != "squared_distance":
        return False
    return not {node.op for node in sort_ancestors(condition.args[1:])} & PER_PAIR


def format_tuple(expressions: Iterable[str]) -> str:
    """Return the text of a tuple, with a comma after every element."""
    return "(" + "".join(f"{e}, " for e in expressions) + ")"
