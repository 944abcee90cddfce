"""A score's Triton functions, value and derivative, written from the graph of the sum of its terms (trace.py).

All numbers are float32 and broadcast against the tile, whichever way it lies. Triton parses the source of its functions;
the text is kept where Python looks for the source of what was not read from a file (`linecache`), so that nothing that
lies on a disk is ever run. Importing this does not import Triton.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import torch

from .score import DistanceTerm, Term, parse_score_key
from .trace import GRAD, LEAVES, Node, Traced, Untraceable, trace

#: Names that are not Triton's own are functions of triton/arithmetic.py.
EXPRESSIONS = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "neg": "-{}", "lt": "{} < {}",
    "le": "{} <= {}", "eq": "{} == {}", "and": "{} & {}", "or": "{} | {}", "not": "~{}", "where": "tl.where({}, {}, {})",
    "max": "larger({}, {})", "min": "smaller({}, {})", "abs": "tl.abs({})", "sqrt": "tl.sqrt({})", "exp": "exp({})",
    "expm1": "expm1({})", "log": "tl.log({})", "log1p": "log1p({})", "acosh1p": "log1p({} + {})", "sinh": "sinh({})",
    "cosh": "cosh({})", "cosh_of_sinh": "cosh_of_sinh({})", "tanh": "tanh({})", "sigmoid": "tl.sigmoid({})",
}  # fmt: skip


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
            formula = term.score if isinstance(term, DistanceTerm) else term.logits
            part = formula(dot, *numbers, squared_distance)
            if capped:
                part = head[-1] * torch.tanh(part / head[-1])
            total = total + (part if gate is None else part * gate)
        return total


class SumWithDistance(SumOfTerms, DistanceTerm):
    """The same, where one of them reads a squared distance, which is at most one."""

    def measuring(self, row, column, head) -> tuple[DistanceTerm, list]:
        """The term that does, and its numbers."""
        return next(part[:2] for part in self.parts(row, column, head) if isinstance(part[0], DistanceTerm))

    def by_product(self, dot, row, column, head):
        term, numbers = self.measuring(row, column, head)
        return term.by_product(dot, *numbers)

    def is_inexact(self, squared_distance, row, column, head):
        term, numbers = self.measuring(row, column, head)
        return term.is_inexact(squared_distance, *numbers)

    def score(self, dot, row, column, head, squared_distance):
        return self.logits(dot, row, column, head, squared_distance)


@lru_cache(maxsize=256)
def traced(score_key: str, capped: bool) -> tuple[Traced | None, str | None]:
    """The graph of a score, and why there is none."""
    measures = any(isinstance(term, DistanceTerm) for term, *_ in parse_score_key(score_key))
    try:
        return trace((SumWithDistance if measures else SumOfTerms)(score_key, capped)), None
    except Untraceable as error:
        return None, str(error)


class Writer:
    """Lines that compute nodes, each once."""

    def __init__(self, softcap: Node | None):
        self.softcap = softcap
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []

    def text(self, node: Node) -> str:
        """A node's name, after the lines that it needs."""
        if node.op == "number":
            number = repr(node.value) if abs(node.value) < float("inf") else f'float("{node.value}")'
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
            if node.op == "where" and arguments[1] == arguments[2]:  # but for `detach`
                return arguments[1]
            if node.op == "div" and node.args[1].op == "sqrt":  # one instruction
                expression = f"{arguments[0]} * tl.rsqrt({self.text(node.args[1].args[0])})"
            self.names[node] = f"v{node.order}"
            self.lines.append(f"v{node.order} = {expression}")
        return self.names[node]


@dataclass(frozen=True)
class Functions:
    """The `@triton.jit` functions of a score, and which of its statistics and parameters have gradients.

    Args:
        score: from (dot, squared_distance, row, column, head, softcap) to the logits.
        pull: from (grad, ...) and the same to the gradient of dot or None, tuples of those of the statistics of rows
            and columns, and one of the slopes of the logits by the parameters. They are those by the product form,
            wherever the distance was taken from.
        by_product: from (dot, row, column, head) to the squared distance; None where the score reads none.
        is_inexact: from (squared_distance, row, column, head) to the pairs to take from differences.
        rows, columns, heads: the places of what has gradients.
    """

    score: Callable
    pull: Callable
    by_product: Callable | None
    is_inexact: Callable | None
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    heads: tuple[int, ...]


@lru_cache(maxsize=256)
def functions(score_key: str, capped: bool) -> Functions:
    """The Triton functions of a score that has a graph.

    Args:
        score_key: see `PairScore.score_key`.
        capped: whether there is a softcap.
    """
    t, reason = traced(score_key, capped)
    assert t is not None, reason
    g, numbers = t.graph, "row, column, head"
    softcap = g.node("head", value=SumOfTerms(score_key, capped).heads - 1) if capped else None

    def compiled(name: str, arguments: str, result: Callable[[Writer], str]) -> Callable:
        writer = Writer(softcap)
        returned = result(writer)
        lines = [f"def {name}({arguments}):", *(f"    {line}" for line in (*writer.lines, f"return {returned}"))]
        return jit(f"{name} of {score_key}{' capped' * capped}", name, lines)

    by_grad, _ = t.through_logit(g.node("local", value=GRAD), masked=False)
    by_one, _ = t.through_logit(g.number(1), masked=False)
    places = lambda op: tuple(
        sorted(n.value for n, d in by_grad.items() if n.op == op and n is not softcap and d is not g.number(0))
    )
    rows, columns, heads, dots = map(places, ("row", "column", "head", "dot"))

    def gradients(w: Writer) -> str:
        of = lambda op, source, at: listed(w.text(source[g.node(op, value=i)]) for i in at)
        dot = w.text(by_grad[g.node("dot")]) if dots else "None"
        return f"{dot}, {of('row', by_grad, rows)}, {of('column', by_grad, columns)}, {of('head', by_one, heads)}"

    pair = f"dot, squared_distance, {numbers}, softcap"
    distance = t.distance
    return Functions(
        compiled("score", pair, lambda w: w.text(t.logit)),
        compiled("pull", f"grad, {pair}", gradients),
        distance and compiled("by_product", f"dot, {numbers}", lambda w: w.text(distance.by_product)),
        distance and compiled("is_inexact", f"squared_distance, {numbers}", lambda w: w.text(distance.is_inexact)),
        rows, columns, heads,
    )  # fmt: skip


def listed(expressions: Iterable[str]) -> str:
    """A tuple display, also of none or one."""
    return "(" + "".join(f"{e}, " for e in expressions) + ")"


def jit(owner: str, name: str, lines: Sequence[str]) -> Callable:
    """The `@triton.jit` function of these lines; `owner` names the text."""
    import triton

    from .triton import arithmetic

    file = f"<hf_hyperattn {owner}>"
    text = "\n".join(["@triton.jit", *lines]) + "\n"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space: dict[str, Any] = {**vars(arithmetic), "triton": triton, "__name__": __name__}
    exec(compile(text, file, "exec"), space)  # noqa: S102  text of ours, of names and numbers from a graph
    return space[name]
