"""A score term's arithmetic as a small graph: traced once, folded, with its derivative; emit_cpp.py writes it in C++.

A term is arithmetic on one pair, so it is traced on tensors [1, 1]: every torch operator that it calls becomes one node
or a few, or is refused by name. Nodes that are the same are one node.

The derivative is taken on the graph, since automatic differentiation of torch gives NaN where a branch that is not
taken has an infinite slope. Masks stand beside adjoints and are applied last, so that nothing infinite is ever
multiplied by 0. At ties `maximum` and `minimum` share the gradient evenly, as torch does; at 0 the slope of `sqrt` and
of `acosh(1 + y)` is 0, and that of `abs` too. At its bounds `clamp` lets the gradient through, as torch does until 2.13
(from 2.14 on it gives 0 there).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LEAVES = ("dot", "row", "column", "head", "squared_distance")
MASKS = ("lt", "le", "eq", "and", "or", "not", "near")
GRAD, NEAR = (
    "grad",
    "s.near",
)  # variables: the gradient of the logit; which distances are from differences
ARITHMETIC = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
}


class Untraceable(ValueError):
    """A term does what a fused engine cannot: one line that says what, and what is allowed."""


def _operation(op: str) -> Callable[..., Node]:
    return lambda self, *others: self.graph.node(op, self, *others)


@dataclass(eq=False)
class Node:
    """One operation. Two of them are equal where they are the same node; arguments have a lower `order`."""

    graph: Graph
    op: str  # one of DERIVATIVES, MASKS and LEAVES, or "number", "detach", "local": a variable of the text
    args: tuple[Node, ...]
    value: Any  # of a number; the place of a statistic or parameter; the name of a variable
    order: int
    is_mask: bool = field(init=False)
    varies: bool = field(init=False)  # whether a gradient can flow through it
    of_row: bool = field(init=False)  # plain arithmetic with what all pairs of a row share

    def __post_init__(self):
        self.is_mask = self.op in MASKS
        self.varies = (
            self.op in LEAVES or self.op in DERIVATIVES and any(a.varies for a in self.args)
        )
        plain = self.op in (*ARITHMETIC, "neg", "detach") and all(a.of_row for a in self.args)
        self.of_row = plain or self.op in ("number", "row", "head")

    __add__, __sub__, __mul__ = _operation("add"), _operation("sub"), _operation("mul")
    __truediv__, __neg__ = _operation("div"), _operation("neg")
    __lt__, __le__ = _operation("lt"), _operation("le")
    __and__, __or__, __invert__ = _operation("and"), _operation("or"), _operation("not")


class Graph:
    """All nodes of a term, each once."""

    def __init__(self):
        self.nodes: dict[tuple, Node] = {}

    def node(self, op: str, *args: Node | float, value: Any = 0.0) -> Node:
        """The node of an operation, in a simpler form where there is one."""
        logical = op in ("and", "or", "not")
        nodes = tuple(self.cast(a, logical or op == "where" and not i) for i, a in enumerate(args))
        simpler = self.simplified(op, *nodes) if nodes else None
        if simpler is not None:
            return simpler
        key = op, nodes, value
        if key not in self.nodes:
            self.nodes[key] = Node(self, op, nodes, value, len(self.nodes))
        return self.nodes[key]

    def number(self, value: float) -> Node:
        return self.node("number", value=float(value))

    def cast(self, x: Node | float, to_mask: bool) -> Node:
        """An argument as a node, and a mask as numbers, or numbers as a mask, where the operator takes those."""
        x = x if isinstance(x, Node) else self.number(x)
        if to_mask and not x.is_mask:
            return ~self.node("eq", x, 0.0)
        return x if to_mask or not x.is_mask else self.node("where", x, 1.0, 0.0)

    def simplified(
        self, op: str, a: Node, b: Node | None = None, c: Node | None = None
    ) -> Node | None:
        """What an operation is without computing it; None where it has to be."""
        x = a.value if a.op == "number" else None
        if b is None:
            if op == "neg" and x is not None:
                return self.number(-x)
            return a.args[0] if op in ("neg", "not") and a.op == op else None
        y = b.value if b.op == "number" else None
        if op in ARITHMETIC and x is not None and y is not None and (op != "div" or y):
            return self.number(ARITHMETIC[op](x, y))
        if (
            (op == "add" and x == 0)
            or (op == "mul" and (x == 1 or y == 0))
            or (op == "where" and b is c)
        ):
            return b
        if (op in ("add", "sub") and y == 0) or (op in ("mul", "div") and (x == 0 or y == 1)):
            return a
        if (op == "sub" and x == 0) or (op == "mul" and x == -1):
            return -b
        if op == "mul" and y == -1:
            return -a
        return a if op in ("and", "or") and a is b else None


def where(mask: Node, a: Node | float, b: Node | float) -> Node:
    """`torch.where` on nodes."""
    return mask.graph.node("where", mask, a, b)


def sign(x: Node) -> Node:
    """-1, 0 or 1."""
    return where(x.graph.number(0) < x, 1.0, where(x < 0.0, -1.0, 0.0))


def inverse(x: Node) -> Node:
    """1 / x, one node for all that is divided by x: gradients and slopes are."""
    return x.graph.number(1) / x


def _apply(op: str, g: Graph, *args) -> Node:
    return g.node(op, *args)


def _sum(op: str, g: Graph, a, b, alpha=1) -> Node:
    return g.node(op, a, g.node("mul", b, alpha))


def _clamp(g: Graph, x, low=None, high=None) -> Node:
    x = x if low is None else where(x < low, low, x)
    return x if high is None else where(g.node("lt", high, x), high, x)


def _power(g: Graph, x, exponent) -> Node:
    if isinstance(exponent, Node) or 2 * exponent % 1 or abs(exponent) > 8:
        raise Untraceable("pow, but for whole and half numbers up to 8 as exponents")
    power = g.node("sqrt", x) if exponent % 1 else g.number(1)
    for _ in range(int(abs(exponent))):
        power = power * x
    return power if exponent >= 0 else g.number(1) / power


def _acosh(g: Graph, x) -> Node:
    """From y = x - 1, which a term mostly has: acosh(1 + y) = log1p(y + sqrt(y (y + 2)))."""
    ones = [i for i, a in enumerate(x.args) if x.op == "add" and a is g.number(1)]
    y = x.args[1 - ones[0]] if ones else x - 1.0
    return g.node("acosh1p", y, g.node("sqrt", y * (y + 2.0)))


def _log1p(g: Graph, x) -> Node:
    """Of y + sqrt(y (y + 2)) it is acosh(1 + y), in the form that a term takes where y may be small."""
    for y, root in (x.args, x.args[::-1]) if x.op == "add" else ():
        if root is g.node("sqrt", y * (y + 2.0)) or root is g.node("sqrt", (y + 2.0) * y):
            return g.node("acosh1p", y, root)
    return g.node("log1p", x)


def _softplus(g: Graph, x, beta=1, threshold=20) -> Node:
    if beta != 1:
        raise Untraceable("softplus with another beta than 1")
    return g.node("max", x, 0.0) + g.node("log1p", g.node("exp", -g.node("abs", x)))


#: What a term may call, by ATen's names: from its arguments, nodes or Python numbers, to a node.
OPERATORS: dict[str, Callable[..., Node]] = {
    **{
        op: partial(_apply, op)
        for op in (
            "mul",
            "div",
            "neg",
            "abs",
            "sqrt",
            "exp",
            "log",
            "expm1",
            "sinh",
            "cosh",
            "tanh",
            "sigmoid",
            "where",
            "lt",
            "le",
            "eq",
            "detach",
        )
    },
    "maximum": partial(_apply, "max"),
    "minimum": partial(_apply, "min"),
    "add": partial(_sum, "add"),
    "sub": partial(_sum, "sub"),
    "rsub": lambda g, a, b, alpha=1: _sum("sub", g, b, a, alpha),
    "addcmul": lambda g, a, b, c, value=1: a + b * c * value,
    "reciprocal": lambda g, x: g.number(1) / x,
    "rsqrt": lambda g, x: g.number(1) / g.node("sqrt", x),
    "log1p": _log1p,
    "pow": _power,
    "acosh": _acosh,
    "softplus": _softplus,
    "relu": lambda g, x: where(x <= 0.0, 0.0, x),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda g, x, high: _clamp(g, x, None, high),
    "sign": lambda g, x: sign(x),
    "masked_fill": lambda g, x, mask, value: g.node("where", mask, value, x),
    "gt": lambda g, a, b: g.node("lt", b, a),
    "ge": lambda g, a, b: g.node("le", b, a),
    "ne": lambda g, a, b: ~g.node("eq", a, b),
    **{
        f"{kind}_{op}": partial(_apply, op)
        for kind in ("logical", "bitwise")
        for op in ("and", "or", "not")
    },
    "scalar_tensor": lambda g, value, **_: g.number(value),
    "full_like": lambda g, x, value, **_: g.number(value),
    "zeros_like": lambda g, x, **_: g.number(0),
    "ones_like": lambda g, x, **_: g.number(1),
    "_to_copy": lambda g, x, **_: x,
    "clone": lambda g, x, **_: x,
}
#: Why others are refused, where there is more to say than what is allowed.
ALLOWED = "allowed are " + ", ".join(sorted(name for name in OPERATORS if name[0] != "_"))
OWN_TENSOR = "a tensor of its own; use a statistic, a parameter, a number"
REFUSED = {
    "a branch on values; use torch.where": "_local_scalar_dense is_nonzero item equal",
    "a reduction or product; a term is arithmetic on one pair": "sum mean amax amin max min any all prod _softmax mm",
    OWN_TENSOR: "lift_fresh lift_fresh_copy zeros ones full arange empty rand randn",
}


class Tracer(TorchDispatchMode):
    """Writes what is called on its tensors into a graph."""

    def __init__(self):
        super().__init__()
        self.graph = Graph()
        self.nodes: dict[
            int, tuple[Tensor, Node]
        ] = {}  # by ids of tensors, which are kept: an id is used once

    def tensor(self, op: str, place: int = 0) -> Tensor:
        """A new argument."""
        number = torch.full(
            (1, 1), 0.5, dtype=torch.float32, device="cpu"
        )  # what emitted kernels compute in
        return self._kept(number, self.graph.node(op, value=place))

    def numbers(self, *counts: int) -> Iterator[tuple[Tensor, ...]]:
        """So many arguments each of rows, columns and heads."""
        return (
            tuple(self.tensor(op, i) for i in range(n))
            for op, n in zip(LEAVES[1:4], counts, strict=True)
        )

    def _kept(self, tensor: Tensor, node: Node) -> Tensor:
        self.nodes[id(tensor)] = tensor, node
        return tensor

    def node(self, x):
        """A tensor's node; what is no tensor stays as it is."""
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self.nodes:
            raise Untraceable(OWN_TENSOR)
        return self.nodes[id(x)][1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name.removesuffix("_") in OPERATORS and name not in OPERATORS:
            name = name.removesuffix("_")
            self.check_changed(args[0])
        if name not in OPERATORS:
            why = next((why for why, names in REFUSED.items() if name in names.split()), ALLOWED)
            raise Untraceable(f"operator {name} ({why})")
        arguments = [self.node(a) for a in args], {key: self.node(a) for key, a in kwargs.items()}
        try:
            node = OPERATORS[name](self.graph, *arguments[0], **arguments[1])
        except TypeError as error:
            raise Untraceable(
                f"operator {name} with arguments that are not known ({error})"
            ) from error
        return self._kept(func(*args, **kwargs), node)

    def check_changed(self, x: Tensor) -> None:
        """Refuse work in place on an argument, or on memory that another tensor shares."""
        shared = any(t.data_ptr() == x.data_ptr() and t is not x for t, _ in self.nodes.values())
        if shared or self.node(x).op in LEAVES:
            raise Untraceable("it changes an argument, or a tensor that shares memory, in place")


class Distance(NamedTuple):
    """What the methods of a `DistanceTerm` return."""

    by_product: Node
    is_inexact: Node
    factors: tuple[Node, ...]
    left_out: int


@dataclass(frozen=True)
class Traced:
    """A term's graph: its logit, and the squared distance that a `DistanceTerm` reads."""

    graph: Graph
    logit: Node
    distance: Distance | None = None

    @cached_property
    def by_grad(self) -> tuple[dict[Node, Node], Node]:
        """Gradients of the leaves and of the squared distance, from that of the logit."""
        return self.through_logit(self.graph.node("local", value=GRAD))

    def through_logit(self, seed: Node, masked: bool = True) -> tuple[dict[Node, Node], Node]:
        """The same from a node; those of the leaves through the product form of the distance, where it is from that,
        or unless `masked`, everywhere.
        """
        leaves = gradients((self.logit, None, seed))
        distance = leaves.pop(self.graph.node("squared_distance"), self.graph.number(0))
        if self.distance is not None:
            by_product = ~self.graph.node("near", value=NEAR) if masked else None
            for leaf, more in gradients((self.distance.by_product, by_product, distance)).items():
                leaves[leaf] = leaves[leaf] + more if leaf in leaves else more
        return leaves, distance


def trace(term) -> Traced:
    """The graph of a `Term` (score.py, which builds on this).

    Raises:
        Untraceable: it calls what is not in OPERATORS, branches on values, or reads tensors that are no arguments.
    """
    try:
        return alone(_trace, term)
    except Exception as error:
        text = str(error) if isinstance(error, Untraceable) else f"{type(error).__name__}: {error}"
        raise Untraceable(
            f"score term {term.name!r} cannot be compiled: {' '.join(text.split())}"
        ) from error


def alone(function: Callable, *arguments) -> Any:
    """Call a function in a thread of its own: modes and contexts of the caller belong to the caller's."""
    with ThreadPoolExecutor(1) as clean:
        return clean.submit(function, *arguments).result()


def trace_reader(reader) -> tuple[Node, list[Node]]:
    """What a `Reader` (score.py) reads: the factor, and statistics. Of rows d, of columns what it reads of vectors."""
    tracer = Tracer()
    row, column, head = tracer.numbers(1, reader.columns, reader.parameters)
    with tracer:
        factor, statistics = reader.read(row, column, head)
    return tracer.node(factor), [tracer.node(x) for x in statistics]


def _trace(term) -> Traced:
    tracer = Tracer()
    dot, squared = tracer.tensor("dot"), tracer.tensor("squared_distance")
    row, column, head = tracer.numbers(term.rows, term.columns, term.heads)
    with tracer:
        of = lambda x, to_mask=False: tracer.graph.cast(tracer.node(x), to_mask)
        if hasattr(term, "by_product"):
            distance = Distance(
                of(term.by_product(dot, row, column, head)),
                of(term.is_inexact(squared, row, column, head), True),
                tuple(of(x) for x in term.factors(row, column, head)),
                term.left_out,
            )
            return Traced(tracer.graph, of(term.score(dot, row, column, head, squared)), distance)
        logit = of(term.logits(dot, row, column, head))
        term.logits(dot, row, column, head, _refuse_distances)
        return Traced(tracer.graph, logit)


def _refuse_distances(_) -> Tensor:
    raise Untraceable("it reads squared distances and is no DistanceTerm (engines/score.py)")


def _max(v: Node, a: Node, b: Node) -> tuple:
    shared = where(v.graph.node("eq", a, b), v * 0.5, v)
    return (~(a < b), shared), (~(b < a), shared)


#: From an adjoint v, the node n and its arguments, to what each argument gets: nothing, an adjoint, or (mask, adjoint).
#: A mask holds where a number is NaN, so that its gradient is too.
DERIVATIVES: dict[str, Callable[..., tuple]] = {
    "add": lambda v, n, a, b: (v, v),
    "sub": lambda v, n, a, b: (v, -v),
    "mul": lambda v, n, a, b: (v * b, v * a),
    "div": lambda v, n, a, b: (v * inverse(b), -(v * inverse(b)) * n),
    "neg": lambda v, n, a: (-v,),
    "abs": lambda v, n, a: (v * sign(a),),
    "sqrt": lambda v, n, a: ((~(a <= 0.0), v * (inverse(n) * 0.5)),),
    "exp": lambda v, n, a: (v * n,),
    "log": lambda v, n, a: (v / a,),
    "log1p": lambda v, n, a: (v / (a + 1.0),),
    "expm1": lambda v, n, a: (v * (n + 1.0),),
    "sinh": lambda v, n, a: (v * n.graph.node("cosh_of_sinh", n),),
    "cosh": lambda v, n, a: (v * n.graph.node("sinh", a),),
    "cosh_of_sinh": lambda v, n, a: (v * a / n,),
    "tanh": lambda v, n, a: (v * (n.graph.number(1) - n * n),),
    "sigmoid": lambda v, n, a: (v * (n * (n.graph.number(1) - n)),),
    "acosh1p": lambda v, n, y, root: ((~(y <= 0.0), v * inverse(root)), None),
    "max": lambda v, n, a, b: _max(v, a, b),
    "min": lambda v, n, a, b: _max(v, a, b)[::-1],
    "where": lambda v, n, c, a, b: (None, (c, v), (~c, v)),
}


def gradients(*adjoints: tuple[Node, Node | None, Node]) -> dict[Node, Node]:
    """Of all leaves; from nodes, each with a mask that says where it counts, or None for everywhere, and an adjoint."""
    waiting: dict[Node, list[tuple[Node | None, Node]]] = {}
    leaves: dict[Node, Node] = {}
    for node, mask, value in adjoints:
        waiting.setdefault(node, []).append((mask, value))
    for node in ancestors(waiting):
        if node not in waiting or not node.varies:
            continue
        mask, value = _joined(waiting[node])
        if node.op in LEAVES:
            leaves[node] = value if mask is None else where(mask, value, 0.0)
            continue
        for argument, part in zip(
            node.args, DERIVATIVES[node.op](value, node, *node.args), strict=True
        ):
            if part is not None and argument.varies:
                extra, part = part if isinstance(part, tuple) else (None, part)
                both = mask if extra is None else extra if mask is None else mask & extra
                waiting.setdefault(argument, []).append((both, part))
    return leaves


def ancestors(nodes) -> Sequence[Node]:
    """The nodes and all that they are computed from, users before what they use."""
    seen, todo = set(), list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.args
    return sorted(seen, key=lambda node: -node.order)


def _joined(adjoints: list[tuple[Node | None, Node]]) -> tuple[Node | None, Node]:
    """The sum of adjoints, where one of their masks holds."""
    by_mask: dict[Node | None, Node] = {}
    for mask, value in adjoints:
        by_mask[mask] = by_mask[mask] + value if mask in by_mask else value
    (mask, value), *others = by_mask.items()
    if others and mask is not None:
        value = where(mask, value, 0.0)
    for other, more in others:
        value = value + (more if other is None else where(other, more, 0.0))
        mask = None if mask is None or other is None else mask | other
    return mask, value
