"""Write a score's Triton functions from the graph of its terms (trace.py).

All numbers are float32 and broadcast against the tile, also if the tile is transposed. This module
does not import Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch

from .score import DistanceTerm, SeparableTerm, Term, parse_score_key
from .trace import (
    INDEXED,
    LEAVES,
    Graph,
    Node,
    Traced,
    Tracer,
    Untraceable,
    compute_gradients,
    run_in_thread,
    sort_ancestors,
    trace_term,
)

#: Functions without `tl.` are defined in triton/arithmetic.py, because Triton lacks them or is too
#: inexact there.
EXPRESSIONS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "divide({}, {})",
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
        split: A term that is read as products: its numbers follow the statistics. Default: none.
    """

    def __init__(self, score_key: str, capped: bool, split: Split | None = None):
        self.name = score_key
        self.terms = parse_score_key(score_key)
        self.capped = capped
        self.rows = sum(term.rows for term, *_ in self.terms)
        self.columns = sum(term.columns for term, *_ in self.terms)
        self.heads = sum(term.heads + gated for term, gated, _ in self.terms) + capped
        self.split = split
        self.split_at = self.rows, self.columns
        if split is not None:
            self.rows += len(split.left)
            self.columns += len(split.column_numbers)

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
        parts = self.split_numbers(row, column, head)
        for place, (term, numbers, gate, capped) in enumerate(parts):
            if self.split is not None and place == self.split.place:
                # Added one by one: each product and its sum are one instruction.
                for left, right in self.list_factors(row, column):
                    total = total + left * right
                continue
            # The kernel knows the distance already. `logits` would compute it from the product
            # again.
            formula: Any = term.score if isinstance(term, DistanceTerm) else term.logits
            part = formula(dot, *numbers, squared_distance)
            if capped:
                part = head[-1] * torch.tanh(part / head[-1])
            total = total + (part if gate is None else part * gate)
        return total

    def list_factors(self, row, column) -> Iterator[tuple]:
        """Yield the factors of each product of the split term: a row's number, a column's."""
        assert self.split is not None
        rows_at, columns_at = self.split_at
        rights = iter(column[columns_at:])
        for left, right in zip(row[rows_at:], self.split.right, strict=True):
            yield left, right.value if right.op == "number" else next(rights)


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


class Split(NamedTuple):
    """The graph of a separable term whose numbers kernels compute once for each line.

    Its nodes read the variable `offset`, a position counted from the anchor.

    Args:
        place: Place of the term among the terms.
        positions: Places of the positions among the statistics of rows and of columns.
        heads: Nodes of the term's parameters and of its gate, which is a factor of `left`.
        left, right: For each product, the number of a row and that of a column.
        margins: See `SeparableTerm.split_margins`.
    """

    place: int
    positions: tuple[int, int]
    heads: tuple[Node, ...]
    left: tuple[Node, ...]
    right: tuple[Node, ...]
    margins: tuple[Node, ...]

    @property
    def column_numbers(self) -> list[Node]:
        """The numbers of a column that are no constants."""
        return [node for node in self.right if node.op != "number"]


@lru_cache(maxsize=256)
def trace_split(score_key: str, capped: bool) -> Split | None:
    """Return the graph of the first separable term of a score, or None if there is none.

    The arguments are as in `trace_score`. A capped term is no sum of products.
    """
    rows_at = columns_at = heads_at = 0
    for place, (term, gated, caps) in enumerate(parse_score_key(score_key)):
        if isinstance(term, SeparableTerm) and not (caps and capped):
            starts = (rows_at, columns_at, heads_at)
            return run_in_thread(_trace_split_formulas, term, gated, place, starts)
        rows_at += term.rows
        columns_at += term.columns
        heads_at += term.heads + gated
    return None


def _trace_split_formulas(
    term: SeparableTerm, gated: bool, place: int, starts: tuple[int, int, int]
) -> Split:
    tracer = Tracer()
    rows_at, columns_at, heads_at = starts
    offset = tracer.add_argument("local", "offset")
    head = [tracer.add_argument("head", heads_at + i) for i in range(term.heads)]
    gate = tracer.add_argument("head", heads_at + term.heads) if gated else None

    def read_nodes(numbers: Iterable) -> tuple[Node, ...]:
        return tuple(tracer.graph.cast_argument(tracer.find_node(x), False) for x in numbers)

    with tracer:
        left = term.split_row(offset, head)
        if gate is not None:
            left = [number * gate for number in left]
        right = term.split_column(offset, head)
        margins = term.split_margins(offset, head)
    return Split(
        place=place,
        positions=(rows_at, columns_at),
        heads=read_nodes(head if gate is None else [*head, gate]),
        left=read_nodes(left),
        right=read_nodes(right),
        margins=read_nodes(margins),
    )


@lru_cache(maxsize=256)
def trace_score(
    score_key: str, capped: bool, split: Split | None = None
) -> tuple[Traced | None, str | None]:
    """Return the graph of a score or None, and the reason why there is none or None.

    Args:
        score_key: See `PairScore.score_key`.
        capped: Whether the call has a softcap.
        split: A term that is read as products, see `SumOfTerms`. Default: none.
    """
    measures = sum(isinstance(term, DistanceTerm) for term, *_ in parse_score_key(score_key))
    # The kernel holds one squared distance per pair.
    if measures > 1:
        return None, f"more than one term of {score_key} reads distances"
    kind = SumWithDistance if measures else SumOfTerms
    try:
        # Returned, not raised: the cache keeps results, but not exceptions.
        return trace_term(kind(score_key, capped, split)), None
    except Untraceable as error:
        return None, str(error)


class TritonWriter:
    """Write the lines that compute nodes, each node once.

    Args:
        softcap: Place of the softcap among the parameters, or None without one.
    """

    def __init__(self, softcap: int | None):
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
        if node.op == "head" and node.value == self.softcap:
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


class SplitLayout(NamedTuple):
    """Counts and places of a separable term.

    Args:
        row_at, column_at: Places of the positions among the statistics.
        heads: Parameters of the term, its gate included.
        rows, columns: Numbers of a row and of a column that the logits read.
        constants: 1 if one factor of a column is constant, else 0.
        sums: Numbers of a column that gradients read.
    """

    row_at: int
    column_at: int
    heads: int
    rows: int
    columns: int
    constants: int
    sums: int


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

            The last five exist only if the score reads a distance. If it has a separable term:

            - `split_row` and `split_column` from (position, anchor, head) to the numbers of a line,
              and its two margins (`SeparableTerm`). The numbers of a column end with those that only
              gradients need.
            - `split_score` and `split_slopes`, like `score` and `slopes`. The numbers of a line
              follow its statistics, and the term's parameters have no slopes.
            - `pull_split` from (sums, position, anchor, head) to the gradients of the term's
              parameters. The sums are those of a row's gradients of logits times 1, if one factor
              of a column is constant, and times each number of a column.
        rows, columns, heads: Indices of the statistics and parameters that have gradients; those of
            the separable term come last.
        left_out: Numbers at a vector's end that distances do not read.
        split: Layout of the separable term, or None.
    """

    texts: dict[str, str]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    heads: tuple[int, ...]
    left_out: int = 0
    split: SplitLayout | None = None


def write_distance(distance: Any, numbers: str, write_function: Callable[..., None]) -> None:
    """Write the functions that tell pairs whose distance from the product is too inexact.

    Args:
        distance: Of the traced score.
        numbers: The arguments of a function that reads numbers of both sides.
        write_function: Writes one function.
    """
    by_product, is_inexact, factors, _ = distance
    write_function("by_product", f"dot, {numbers}", lambda w: w.write_node(by_product))
    write_function("is_inexact", f"squared_distance, {numbers}", lambda w: w.write_node(is_inexact))
    arguments = f"squared_distance, slack, {numbers}"
    if is_bounded_by_row(is_inexact):
        # The distance is the margin: the slack multiplies the bound instead, once a row.
        bound = is_inexact.args[1]
        write_function("margin", arguments, lambda w: "squared_distance")
        write_function("bound", "slack, row, head", lambda w: f"slack * {w.write_node(bound)}")
    else:
        write_function("margin", arguments, lambda w: w.write_margin(is_inexact))
        write_function("bound", "slack, row, head", lambda w: "0.0")
    write_function("factors", numbers, lambda w: format_tuple(w.write_node(f) for f in factors))


@lru_cache(maxsize=256)
def emit_functions(score_key: str, capped: bool) -> Emitted:
    """Return the Triton functions of a score that `trace_score` can trace.

    Args:
        score_key: See `PairScore.score_key`.
        capped: Whether the call has a softcap.
    """
    t, reason = trace_score(score_key, capped)
    assert t is not None, reason
    split = trace_split(score_key, capped)
    count = SumOfTerms(score_key, capped).heads
    slopes = compute_slopes(t)
    by_kind: list[list[int]] = [
        sorted(node.value for node in slopes if node.op == op) for op in INDEXED
    ]
    rows, columns, heads = by_kind
    if capped:
        # The softcap is a parameter in the graph only.
        heads = [i for i in heads if i != count - 1]
    own = [] if split is None else [node.value for node in split.heads]
    heads = [i for i in heads if i not in own] + own

    texts: dict[str, str] = {}

    def write_function(
        name: str, arguments: str, result: Callable[[TritonWriter], str], *lines: str
    ) -> None:
        writer = TritonWriter(count - 1 if capped else None)
        returned = result(writer)
        body = [f"def {name}({arguments}):", *lines, *writer.lines, f"return {returned}"]
        texts[name] = "\n    ".join(body) + "\n"

    numbers = "row, column, head"
    pair = f"dot, squared_distance, {numbers}, softcap"
    places = (rows, columns, heads)
    write_function("score", pair, lambda w: w.write_node(t.logit))
    write_function("slopes", pair, lambda w: write_slopes(w, t, places))
    if split is not None:
        whole, reason = trace_score(score_key, capped, split)
        assert whole is not None, reason
        plain = (rows, columns, [i for i in heads if i not in own])
        write_function("split_score", pair, lambda w: w.write_node(whole.logit))
        write_function("split_slopes", pair, lambda w: write_slopes(w, whole, plain))
        write_split(split, write_function)
    if t.distance is not None:
        write_distance(t.distance, numbers, write_function)
    return Emitted(
        texts=texts,
        rows=tuple(rows),
        columns=tuple(columns),
        heads=tuple(heads),
        left_out=0 if t.distance is None else t.distance.left_out,
        split=None if split is None else describe_split(split),
    )


def describe_split(split: Split) -> SplitLayout:
    """Return the counts and places that kernels need."""
    sums = list_split_sums(split)
    factors = len(split.column_numbers)
    constants = len(split.right) - factors
    return SplitLayout(
        row_at=split.positions[0],
        column_at=split.positions[1],
        heads=len(split.heads),
        rows=len(split.left),
        columns=factors,
        constants=constants,
        sums=len(sums) - constants,
    )


def compute_slopes(traced: Traced) -> dict[Node, Node]:
    """Return the slopes of the logit by the leaves that have one other than 0."""
    one, zero = traced.graph.add_number(1), traced.graph.add_number(0)
    # Not masked: Triton kernels take all gradients through the product form.
    slopes, _ = traced.through_logit(one, masked=False)
    sorter = CaseSorter(slopes.values())
    slopes = {leaf: sorter.sort(slope) for leaf, slope in slopes.items()}
    return {leaf: slope for leaf, slope in slopes.items() if slope is not zero}


class CaseSorter:
    """Rewrites values so that each is a choice by plain comparisons, one inside the other.

    The derivative of a choice leaves masks that are unions and intersections of others, and choices
    with 0 that are added up. On a GPU few truth values fit in registers, and packing them costs more
    than the choices.

    Args:
        nodes: The values.
    """

    #: Values with more conditions stay as they are: cases double with each condition.
    MOST = 5
    #: So do values of which fewer conditions are shared: they fit in registers. Sorting three would
    #: cost umbral attention with a dot product a sixth of its backward pass (counted for sm_90).
    FEWEST = 4

    def __init__(self, nodes: Iterable[Node]):
        self.memory: dict[tuple[Node, frozenset], Node] = {}
        choices = [n for n in sort_ancestors(nodes) if n.op == "where" and not is_extreme(n)]
        masks = [choice.args[0] for choice in choices]
        #: Unions and intersections whose comparisons occur nowhere else: they stay whole.
        self.units: set[Node] = set()
        # Users come first, so the largest ones are found first.
        for mask in sort_ancestors(masks):
            if mask.op in ("and", "or"):
                others = set().union(*(self.list_conditions(m, mask) for m in masks))
                if not others & self.list_conditions(mask):
                    self.units.add(mask)
        counts: dict[Node, int] = {}
        for mask in masks:
            for condition in self.list_conditions(mask):
                counts[condition] = counts.get(condition, 0) + 1
        #: Conditions that several choices depend on.
        self.shared = {condition for condition, count in counts.items() if count > 1}

    def list_conditions(self, mask: Node, without: Node | None = None) -> set[Node]:
        """Return the comparisons and units that a mask is made of, those of `without` left out."""
        if mask is without:
            return set()
        if mask.op in ("and", "or", "not") and mask not in self.units:
            return set().union(*(self.list_conditions(a, without) for a in mask.args))
        return {mask}

    def sort(self, node: Node, known: dict[Node, bool] | None = None) -> Node:
        """Return a value as choices, for conditions that are known already."""
        known = known or {}
        node = self.resolve(node, known)
        counts: dict[Node, int] = {}
        for other in sort_ancestors([node]):
            if other.op == "where" and not is_extreme(other):
                for condition in self.list_conditions(other.args[0]):
                    if condition in self.shared and decide(condition, known) is None:
                        counts[condition] = counts.get(condition, 0) + 1
        if not counts or len(self.shared) < self.FEWEST:
            return node
        if not known and len(counts) > self.MOST:
            return node
        # The condition that most choices depend on goes first.
        condition = max(counts, key=lambda c: (counts[c], -c.order))
        cases = (self.sort(node, known | {condition: truth}) for truth in (True, False))
        return choose(condition, *cases)

    def resolve(self, node: Node, known: dict[Node, bool]) -> Node:
        """Return a value without the choices that known conditions decide."""
        key = node, frozenset(known.items())
        if key not in self.memory:
            self.memory[key] = self._resolve_new(node, known)
        return self.memory[key]

    def _resolve_new(self, node: Node, known: dict[Node, bool]) -> Node:
        if node.is_mask or not node.args or is_extreme(node):
            return node
        if node.op == "detach":
            # Nothing is differentiated any more. Without it, equal values become one node.
            return self.resolve(node.args[0], known)
        if node.op == "where":
            truth = decide(node.args[0], known)
            if truth is not None:
                return self.resolve(node.args[1 if truth else 2], known)
        arguments = [a if a.is_mask else self.resolve(a, known) for a in node.args]
        if all(new is old for new, old in zip(arguments, node.args, strict=True)):
            return node
        return node.graph.add_node(node.op, *arguments)


def is_extreme(node: Node) -> bool:
    """Return whether a choice is the larger or the smaller of two numbers."""
    condition, *branches = node.args
    return condition.op in ("lt", "le") and set(branches) == set(condition.args)


def choose(condition: Node, chosen: Node, other: Node) -> Node:
    """Return the node of a choice; what both branches have in common stands outside.

    Several slopes are then the same choice, times different factors or plus different numbers.
    """
    if chosen is other:
        return chosen
    graph = condition.graph
    zero = graph.add_number(0)
    for common in list_summands(chosen):
        if common in list_summands(other) and common is not zero:
            rests = (subtract_summand(branch, common) for branch in (chosen, other))
            return common + choose(condition, *rests)
    products = [split_product(branch) for branch in (chosen, other) if branch is not zero]
    # 0 times infinity would be NaN.
    if not all(0 < abs(p.number) < float("inf") for p in products):
        return graph.add_node("where", condition, chosen, other)
    # A 0 has every factor.
    shared = [f for f in products[0].factors if all(f in p.factors for p in products)]
    number = products[0].number
    rests = (zero if b is zero else divide_product(b, shared, number) for b in (chosen, other))
    return multiply_factors(graph.add_node("where", condition, *rests), number, shared)


def list_summands(node: Node) -> tuple[Node, ...]:
    """Return the two summands of a sum, or the node itself."""
    return node.args if node.op == "add" else (node,)


def subtract_summand(node: Node, summand: Node) -> Node:
    """Return a node without one of its summands."""
    if node is summand:
        return node.graph.add_number(0)
    first, second = node.args
    return second if first is summand else first


class Product(NamedTuple):
    """A number, different leaves and the rest, whose product a node is."""

    number: float
    factors: tuple[Node, ...]
    rest: Node


def split_product(node: Node) -> Product:
    """Return the factors of a node; a leaf that stands there twice is a factor once."""
    one = node.graph.add_number(1)
    if node.op == "number":
        return Product(node.value, (), one)
    if node.op in LEAVES:
        return Product(1.0, (node,), one)
    if node.op == "neg":
        inner = split_product(node.args[0])
        return inner._replace(number=-inner.number)
    if node.op != "mul":
        return Product(1.0, (), node)
    a, b = map(split_product, node.args)
    rest = a.rest * b.rest
    for factor in b.factors:
        if factor in a.factors:
            rest = rest * factor
    factors = (*a.factors, *(f for f in b.factors if f not in a.factors))
    return Product(a.number * b.number, factors, rest)


def divide_product(node: Node, factors: Sequence[Node], number: float) -> Node:
    """Return a product without some of its factors and divided by a number."""
    product = split_product(node)
    others = [f for f in product.factors if f not in factors]
    return multiply_factors(product.rest, product.number / number, others)


def multiply_factors(node: Node, number: float, factors: Iterable[Node]) -> Node:
    """Return a node times a number and leaves: first those of a row, then those of a column.

    Their products are then computed once for each line.
    """
    product, one = node, node.graph.add_number(1)
    kinds = (("head", "row"), ("column",), ("dot", "squared_distance"))
    for place, kind in enumerate(kinds):
        scale = one if place else node.graph.add_number(number)
        for factor in sorted((f for f in factors if f.op in kind), key=lambda f: f.order):
            scale = scale * factor
        product = product * scale
    return product


def decide(mask: Node, known: dict[Node, bool]) -> bool | None:
    """Return whether a mask is true, as far as known conditions tell; None if they do not."""
    if mask in known:
        return known[mask]
    if mask.op == "not":
        truth = decide(mask.args[0], known)
        return None if truth is None else not truth
    if mask.op in ("and", "or"):
        truths = [decide(a, known) for a in mask.args]
        absorbing = mask.op == "or"
        if absorbing in truths:
            return absorbing
        return None if None in truths else not absorbing
    if mask.op == "le" and mask.args[1].op == "number":
        # max(x, c) <= y is false if c is larger than y.
        low, high = mask.args
        bounds = [a.value for a in low.args[1:] if a.op == "number"] if low.op == "where" else []
        if bounds and is_extreme(low) and low.args[0].args[0] is low.args[2]:
            return False if bounds[0] > high.value else None
    return None


def write_slopes(writer: TritonWriter, traced: Traced, places: Sequence[Sequence[int]]) -> str:
    """Return the text of the slopes by dot, rows, columns and heads; see `Emitted`."""
    graph, slopes = traced.graph, compute_slopes(traced)
    dot = graph.add_node("dot")
    parts = [writer.write_node(slopes[dot]) if dot in slopes else "None"]
    for op, indices in zip(INDEXED, places, strict=True):
        nodes = (slopes[graph.add_node(op, value=i)] for i in indices)
        parts.append(format_tuple(writer.write_node(node) for node in nodes))
    return ", ".join(parts)


def write_split(split: Split, write_function: Callable[..., None]) -> None:
    """Write the functions of a separable term, see `Emitted`.

    Args:
        split: The term's graph.
        write_function: Writes a function from its name, its arguments, its result, and lines to
            begin with.
    """

    def write_tuple(nodes: Iterable[Node]) -> Callable[[TritonWriter], str]:
        return lambda writer: format_tuple(map(writer.write_node, nodes))

    from_anchor = "offset = position - anchor"
    sums = [node for node, *_ in list_split_sums(split) if node.op != "number"]
    for name, nodes in (("split_row", split.left), ("split_column", sums)):

        def write_side(w: TritonWriter, nodes: Iterable[Node] = nodes) -> str:
            return f"{write_tuple(nodes)(w)}, {', '.join(map(w.write_node, split.margins))}"

        write_function(name, "position, anchor, head", write_side, from_anchor)
    gradients = write_tuple(derive_split(split))
    write_function("pull_split", "sums, position, anchor, head", gradients, from_anchor)


def list_split_sums(split: Split) -> list[tuple[Node, int, Node | None]]:
    """Return the numbers of a column that the gradients of the term's parameters need.

    Returns:
        Each number, the place of its product, and the parameter by which it is a derivative of the
        column's factor; None for the factor itself.
    """
    graph: Graph = split.left[0].graph
    found: list[tuple[Node, int, Node | None]] = []
    found += [(node, place, None) for place, node in enumerate(split.right)]
    for place, node in enumerate(split.right):
        by_head = compute_gradients((node, None, graph.add_number(1)))
        found += [(slope, place, leaf) for leaf, slope in by_head.items()]
    return found


def derive_split(split: Split) -> list[Node]:
    """Return the gradients of the term's parameters in terms of `sums`."""
    graph: Graph = split.left[0].graph
    zero = graph.add_number(0)
    starts = []
    through_columns: dict[Node, Node] = {}
    for number, (_, place, leaf) in enumerate(list_split_sums(split)):
        total, left = graph.add_node("local", value=f"sums[{number}]"), split.left[place]
        if leaf is None:
            starts.append((left, None, total))
        else:
            through_columns[leaf] = through_columns.get(leaf, zero) + left * total
    by_head = compute_gradients(*starts)
    return [by_head.get(leaf, zero) + through_columns.get(leaf, zero) for leaf in split.heads]


def is_bounded_by_row(condition: Node) -> bool:
    """Return whether a condition asks if the squared distance is less than a number of the row."""
    if condition.op != "lt" or condition.args[0].op != "squared_distance":
        return False
    return not {node.op for node in sort_ancestors(condition.args[1:])} & PER_PAIR


def format_tuple(expressions: Iterable[str]) -> str:
    """Return the text of a tuple, with a comma after every element."""
    return "(" + "".join(f"{e}, " for e in expressions) + ")"
