"""Trace a score term into a small graph, simplify and differentiate it.

Compiled engines write their code from this graph (emit_cpp.py, emit_triton.py); blocks evaluate it
in torch (graph_torch.py).

A term is arithmetic on one pair, so it is traced on tensors [1, 1]. Every torch operator that it
calls becomes one node or a few, or raises `Untraceable` with its name. Equal nodes are shared.

The derivative is taken on the graph, because torch's automatic differentiation returns NaN if a
branch that is not taken has an infinite slope. Masks are kept apart from adjoints and applied last,
so that nothing infinite is multiplied by 0. Conventions at special points:

- Ties: `maximum` and `minimum` share the gradient evenly, as torch does.
- At 0: the slopes of `sqrt`, `abs` and `acosh(1 + y)` are 0.
- At its bounds: `clamp` passes the gradient on, as torch does up to 2.13. From 2.14 on, torch
  returns 0 there.
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

#: Leaves that exist several times: statistics of rows and of columns, parameters of heads. Their
#: value is their place.
INDEXED = ("row", "column", "head")
LEAVES = ("dot", *INDEXED, "squared_distance")
MASKS = ("lt", "le", "eq", "and", "or", "not", "near")
#: Variable of the emitted code that holds the gradient of the logit.
GRAD = "grad"
#: Variable of the emitted code that marks the pairs whose distances were computed from differences.
NEAR = "s.near"
ARITHMETIC = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
}


class Untraceable(ValueError):
    """A term does something that compiled engines do not support.

    The message is one line.
    """


def _make_operator(op: str) -> Callable[..., Node]:
    return lambda self, *others: self.graph.add_node(op, self, *others)


@dataclass(eq=False)
class Node:
    """One operation of a graph.

    Nodes compare by identity. Arguments always have a lower `order` than their users.

    Args:
        graph: Graph that the node belongs to.
        op: A key of DERIVATIVES, a member of MASKS or LEAVES, "number", "detach", or "local" (a
            variable of the emitted code).
        args: Arguments of the operation.
        value: Value of a number, place of a statistic or parameter, or name of a variable.
        order: Number of nodes that existed before it.

    Attributes:
        is_mask: Whether the result is a mask.
        varies: Whether a gradient can flow through it.
        of_row: Whether it is plain arithmetic on numbers that all pairs of a row share.
    """

    graph: Graph
    op: str
    args: tuple[Node, ...]
    value: Any
    order: int
    is_mask: bool = field(init=False)
    varies: bool = field(init=False)
    of_row: bool = field(init=False)

    def __post_init__(self):
        self.is_mask = self.op in MASKS
        differentiable = self.op in DERIVATIVES and any(a.varies for a in self.args)
        self.varies = self.op in LEAVES or differentiable
        plain = self.op in (*ARITHMETIC, "neg", "detach") and all(a.of_row for a in self.args)
        self.of_row = plain or self.op in ("number", "row", "head")

    __add__ = _make_operator("add")
    __sub__ = _make_operator("sub")
    __mul__ = _make_operator("mul")
    __truediv__ = _make_operator("div")
    __neg__ = _make_operator("neg")
    __lt__ = _make_operator("lt")
    __le__ = _make_operator("le")
    __and__ = _make_operator("and")
    __or__ = _make_operator("or")
    __invert__ = _make_operator("not")


class Graph:
    """All nodes of a term. Equal operations are one node."""

    def __init__(self):
        self.nodes: dict[tuple, Node] = {}

    def add_node(self, op: str, *args: Node | float, value: Any = 0.0) -> Node:
        """Return the node of an operation; add it if it is new.

        The operation is simplified if possible.
        """
        # Masks and numbers are different types in the emitted code, so each operator gets what it
        # takes.
        logical = op in ("and", "or", "not")
        # `where` takes a mask first, and numbers after it.
        nodes = tuple(
            self.cast_argument(a, logical or (op == "where" and i == 0)) for i, a in enumerate(args)
        )
        simpler = self.simplify_node(op, *nodes) if nodes else None
        if simpler is not None:
            return simpler
        key = op, nodes, value
        if key not in self.nodes:
            order = len(self.nodes)
            self.nodes[key] = Node(graph=self, op=op, args=nodes, value=value, order=order)
        return self.nodes[key]

    def add_number(self, value: float) -> Node:
        return self.add_node("number", value=float(value))

    def cast_argument(self, x: Node | float, to_mask: bool) -> Node:
        """Return an argument as a node.

        Masks become numbers and numbers become masks, as the operator needs it.
        """
        x = x if isinstance(x, Node) else self.add_number(x)
        if to_mask and not x.is_mask:
            return ~self.add_node("eq", x, 0.0)
        return x if to_mask or not x.is_mask else self.add_node("where", x, 1.0, 0.0)

    def simplify_node(
        self, op: str, a: Node, b: Node | None = None, c: Node | None = None
    ) -> Node | None:
        """Return a simpler node with the same value, or None if there is none."""
        x = a.value if a.op == "number" else None
        if b is None:
            if op == "neg" and x is not None:
                return self.add_number(-x)
            # Double negation.
            return a.args[0] if op in ("neg", "not") and a.op == op else None
        y = b.value if b.op == "number" else None
        # Numbers are folded, except a division by 0: Python would raise an error.
        if op in ARITHMETIC and x is not None and y is not None and (op != "div" or y):
            return self.add_number(ARITHMETIC[op](x, y))
        if op in ("and", "or") and a is b:
            return a
        if op == "where" and b is c:
            return b
        return self.drop_neutral(op, a, b, x, y)

    def drop_neutral(
        self, op: str, a: Node, b: Node, x: float | None, y: float | None
    ) -> Node | None:
        """Return an operation without its neutral or absorbing number, or None.

        Args:
            op: The operation.
            a, b: Its arguments.
            x, y: Values of the arguments that are numbers, else None.
        """
        if op == "add":
            if x == 0:
                return b
            return a if y == 0 else None
        if op == "sub":
            if y == 0:
                return a
            return -b if x == 0 else None
        if op == "mul":
            if x == 1 or y == 0:
                return b
            if x == 0 or y == 1:
                return a
            if x == -1:
                return -b
            return -a if y == -1 else None
        if op == "div" and (x == 0 or y == 1):
            return a
        return None


def add_where(mask: Node, a: Node | float, b: Node | float) -> Node:
    """Return the node of `torch.where`."""
    return mask.graph.add_node("where", mask, a, b)


def add_sign(x: Node) -> Node:
    """Return the node of the sign: -1, 0 or 1."""
    return add_where(x.graph.add_number(0) < x, 1.0, add_where(x < 0.0, -1.0, 0.0))


def add_inverse(x: Node) -> Node:
    """Return the node of 1 / x.

    Derivatives multiply by it instead of dividing by x: the division is then shared by gradients
    and slopes.
    """
    return x.graph.add_number(1) / x


def _add_operation(op: str, g: Graph, *args) -> Node:
    return g.add_node(op, *args)


def _add_sum(op: str, g: Graph, a, b, alpha=1) -> Node:
    return g.add_node(op, a, g.add_node("mul", b, alpha))


def _add_clamp(g: Graph, x, low=None, high=None) -> Node:
    # Written as `where`, so that the gradient passes through at the bounds.
    x = x if low is None else add_where(x < low, low, x)
    return x if high is None else add_where(g.add_node("lt", high, x), high, x)


def _add_power(g: Graph, x, exponent) -> Node:
    if isinstance(exponent, Node) or 2 * exponent % 1 or abs(exponent) > 8:
        raise Untraceable("pow, but for whole and half numbers up to 8 as exponents")
    # x^(k + 1/2) is sqrt(x) times k factors x.
    power = g.add_node("sqrt", x) if exponent % 1 else g.add_number(1)
    for _ in range(int(abs(exponent))):
        power = power * x
    return power if exponent >= 0 else g.add_number(1) / power


def _add_acosh(g: Graph, x) -> Node:
    """Add acosh(1 + y) = log1p(y + sqrt(y (y + 2))).

    This form is exact for small y = x - 1.
    """
    # Terms mostly call it with 1 + y. Reading y from there avoids the cancellation of x - 1.
    ones = [i for i, a in enumerate(x.args) if x.op == "add" and a is g.add_number(1)]
    y = x.args[1 - ones[0]] if ones else x - 1.0
    return g.add_node("acosh1p", y, g.add_node("sqrt", y * (y + 2.0)))


def _add_log1p(g: Graph, x) -> Node:
    """Add log1p, or acosh if the term has written it out.

    Written out, acosh(1 + y) is log1p(y + sqrt(y (y + 2))).
    """
    for y, root in (x.args, x.args[::-1]) if x.op == "add" else ():
        if root is g.add_node("sqrt", y * (y + 2.0)) or root is g.add_node("sqrt", (y + 2.0) * y):
            return g.add_node("acosh1p", y, root)
    return g.add_node("log1p", x)


def _add_softplus(g: Graph, x, beta=1, threshold=20) -> Node:
    if beta != 1:
        raise Untraceable("softplus with another beta than 1")
    # max(x, 0) + log1p(exp(-|x|)) overflows for no x, so `threshold` is not needed.
    tail = g.add_node("log1p", g.add_node("exp", -g.add_node("abs", x)))
    return g.add_node("max", x, 0.0) + tail


#: Operators that terms may call, by ATen's names. Each function takes nodes or Python numbers and
#: returns a node.
OPERATORS: dict[str, Callable[..., Node]] = {
    **{
        op: partial(_add_operation, op)
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
    "maximum": partial(_add_operation, "max"),
    "minimum": partial(_add_operation, "min"),
    "add": partial(_add_sum, "add"),
    "sub": partial(_add_sum, "sub"),
    "rsub": lambda g, a, b, alpha=1: _add_sum("sub", g, b, a, alpha),
    "addcmul": lambda g, a, b, c, value=1: a + b * c * value,
    "reciprocal": lambda g, x: g.add_number(1) / x,
    "rsqrt": lambda g, x: g.add_number(1) / g.add_node("sqrt", x),
    "log1p": _add_log1p,
    "pow": _add_power,
    "acosh": _add_acosh,
    "softplus": _add_softplus,
    "relu": lambda g, x: add_where(x <= 0.0, 0.0, x),
    "clamp": _add_clamp,
    "clamp_min": _add_clamp,
    "clamp_max": lambda g, x, high: _add_clamp(g, x, None, high),
    "sign": lambda g, x: add_sign(x),
    "masked_fill": lambda g, x, mask, value: g.add_node("where", mask, value, x),
    "gt": lambda g, a, b: g.add_node("lt", b, a),
    "ge": lambda g, a, b: g.add_node("le", b, a),
    "ne": lambda g, a, b: ~g.add_node("eq", a, b),
    **{
        f"{kind}_{op}": partial(_add_operation, op)
        for kind in ("logical", "bitwise")
        for op in ("and", "or", "not")
    },
    "scalar_tensor": lambda g, value, **_: g.add_number(value),
    "full_like": lambda g, x, value, **_: g.add_number(value),
    "zeros_like": lambda g, x, **_: g.add_number(0),
    "ones_like": lambda g, x, **_: g.add_number(1),
    "_to_copy": lambda g, x, **_: x,
    "clone": lambda g, x, **_: x,
}
#: Reasons in the error for an operator that is not in OPERATORS. The default lists the allowed
#: ones.
ALLOWED = "allowed are " + ", ".join(sorted(name for name in OPERATORS if name[0] != "_"))
OWN_TENSOR = "a tensor of its own; use a statistic, a parameter, a number"
REFUSED = {
    "a branch on values; use torch.where": "_local_scalar_dense is_nonzero item equal",
    "a reduction or product; a term is arithmetic on one pair": "sum mean amax amin max min any all prod _softmax mm",
    OWN_TENSOR: "lift_fresh lift_fresh_copy zeros ones full arange empty rand randn",
}


class Tracer(TorchDispatchMode):
    """Record the operators that are called on its tensors as nodes of a graph."""

    def __init__(self):
        super().__init__()
        self.graph = Graph()
        # By id of the tensor. The tensors are kept alive, because Python may give a freed id to
        # another one.
        self.nodes: dict[int, tuple[Tensor, Node]] = {}

    def add_argument(self, op: str, place: int | str = 0) -> Tensor:
        """Return a new argument of the term.

        Args:
            op: One of LEAVES, or "local".
            place: Index of a statistic or parameter, or name of a local variable. Default: 0.
        """
        # Float32 on the CPU, whatever the default dtype and device: emitted kernels compute in
        # float32.
        number = torch.full((1, 1), 0.5, dtype=torch.float32, device="cpu")
        return self._record_node(number, self.graph.add_node(op, value=place))

    def add_arguments(self, rows: int, columns: int, heads: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield new row statistics, column statistics and head parameters."""
        for op, count in zip(INDEXED, (rows, columns, heads), strict=True):
            yield tuple(self.add_argument(op, i) for i in range(count))

    def _record_node(self, tensor: Tensor, node: Node) -> Tensor:
        self.nodes[id(tensor)] = tensor, node
        return tensor

    def find_node(self, x):
        """Return the node of a tensor, or an argument that is no tensor unchanged.

        Raises:
            Untraceable: The tensor was made outside the term, or without its arguments.
        """
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self.nodes:
            raise Untraceable(OWN_TENSOR)
        return self.nodes[id(x)][1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        # A trailing underscore means in place. On a fresh tensor that is the same as out of place.
        if name.removesuffix("_") in OPERATORS and name not in OPERATORS:
            name = name.removesuffix("_")
            # Otherwise the graph would miss the change of the other tensor.
            self.check_changed(args[0])
        if name not in OPERATORS:
            why = next((why for why, names in REFUSED.items() if name in names.split()), ALLOWED)
            raise Untraceable(f"operator {name} ({why})")
        arguments = [self.find_node(a) for a in args]
        named = {key: self.find_node(a) for key, a in kwargs.items()}
        try:
            node = OPERATORS[name](self.graph, *arguments, **named)
        except TypeError as error:
            raise Untraceable(
                f"operator {name} with arguments that are not known ({error})"
            ) from error
        return self._record_node(func(*args, **kwargs), node)

    def check_changed(self, x: Tensor) -> None:
        """Check that a tensor may be changed in place.

        Raises:
            Untraceable: It is an argument of the term, or shares memory with another tensor.
        """
        shared = any(t.data_ptr() == x.data_ptr() and t is not x for t, _ in self.nodes.values())
        if shared or self.find_node(x).op in LEAVES:
            raise Untraceable("it changes an argument, or a tensor that shares memory, in place")


class Distance(NamedTuple):
    """Nodes of the methods of a `DistanceTerm`."""

    by_product: Node
    is_inexact: Node
    factors: tuple[Node, ...]
    left_out: int


@dataclass(frozen=True)
class Traced:
    """The graph of a term.

    Args:
        graph: All nodes.
        logit: The term's logit.
        distance: Nodes of the squared distance, for a `DistanceTerm`; else None.
    """

    graph: Graph
    logit: Node
    distance: Distance | None = None

    @cached_property
    def by_grad(self) -> tuple[dict[Node, Node], Node]:
        """Gradients of the leaves and of the squared distance.

        They come from the gradient of the logit.
        """
        return self.through_logit(self.graph.add_node("local", value=GRAD))

    def through_logit(self, seed: Node, masked: bool = True) -> tuple[dict[Node, Node], Node]:
        """Return gradients of the leaves and of the squared distance.

        Args:
            seed: Gradient of the logit.
            masked: Exclude pairs whose distance came from differences from the gradients through
                the product form. Default: yes.
        """
        # First from the logit to its leaves. The squared distance is one of them.
        leaves = compute_gradients((self.logit, None, seed))
        distance = leaves.pop(self.graph.add_node("squared_distance"), self.graph.add_number(0))
        if self.distance is not None:
            # Then from the squared distance to the leaves of its product form.
            by_product = ~self.graph.add_node("near", value=NEAR) if masked else None
            further = compute_gradients((self.distance.by_product, by_product, distance))
            for leaf, more in further.items():
                leaves[leaf] = leaves[leaf] + more if leaf in leaves else more
        return leaves, distance


def trace_term(term) -> Traced:
    """Return the graph of a term.

    Args:
        term: A `Term` (score.py, which imports this module).

    Raises:
        Untraceable: The term calls an operator that is not in OPERATORS, branches on values, or
            reads tensors that are not its arguments.
    """
    try:
        return run_in_thread(_trace_formulas, term)
    except Exception as error:
        text = str(error) if isinstance(error, Untraceable) else f"{type(error).__name__}: {error}"
        raise Untraceable(
            f"score term {term.name!r} cannot be compiled: {' '.join(text.split())}"
        ) from error


def run_in_thread(function: Callable, *arguments) -> Any:
    """Call a function in its own thread.

    No mode or context of the caller is active there.
    """
    with ThreadPoolExecutor(1) as clean:
        return clean.submit(function, *arguments).result()


def trace_reader(reader) -> tuple[Node, list[Node]]:
    """Return the nodes of a reader.

    Its row argument is the width d. Its column arguments are the numbers that it reads of a vector.

    Args:
        reader: A `Reader` (score.py).

    Returns:
        The factor, and the statistics.
    """
    tracer = Tracer()
    row, column, head = tracer.add_arguments(1, reader.columns, reader.parameters)
    with tracer:
        factor, statistics = reader.read(row, column, head)
    return tracer.find_node(factor), [tracer.find_node(x) for x in statistics]


def _trace_formulas(term) -> Traced:
    tracer = Tracer()
    dot, squared = tracer.add_argument("dot"), tracer.add_argument("squared_distance")
    row, column, head = tracer.add_arguments(term.rows, term.columns, term.heads)

    def read_node(x, to_mask: bool = False) -> Node:
        return tracer.graph.cast_argument(tracer.find_node(x), to_mask)

    with tracer:
        if hasattr(term, "by_product"):
            distance = Distance(
                by_product=read_node(term.by_product(dot, row, column, head)),
                is_inexact=read_node(term.is_inexact(squared, row, column, head), to_mask=True),
                factors=tuple(read_node(x) for x in term.factors(row, column, head)),
                left_out=term.left_out,
            )
            logit = read_node(term.score(dot, row, column, head, squared))
            return Traced(tracer.graph, logit, distance)
        logit = read_node(term.logits(dot, row, column, head))
        # A second call with distances finds terms that read them without being a `DistanceTerm`.
        term.logits(dot, row, column, head, _refuse_distances)
        return Traced(tracer.graph, logit)


def _refuse_distances(_) -> Tensor:
    raise Untraceable("it reads squared distances and is no DistanceTerm (engines/score.py)")


def _split_at_ties(v: Node, a: Node, b: Node) -> tuple:
    """Return the parts of the adjoint for max(a, b).

    Each argument gets half of it where both are equal.
    """
    shared = add_where(v.graph.add_node("eq", a, b), v * 0.5, v)
    return (~(a < b), shared), (~(b < a), shared)


def _add_slope_of_sinh(n: Node, a: Node) -> Node:
    """Return cosh(a) for n = sinh(a): the term's own node if it has one, else from n."""
    known = n.graph.nodes.get(("cosh", (a,), 0.0))
    return n.graph.add_node("cosh_of_sinh", n) if known is None else known


#: Derivatives by operation: functions from an adjoint v, the node n and its arguments to one result
#: per argument. A result is None (no gradient), an adjoint, or (mask, adjoint). Masks are negated
#: comparisons, which are True for NaN: the gradient of NaN is then NaN too.
DERIVATIVES: dict[str, Callable[..., tuple]] = {
    "add": lambda v, n, a, b: (v, v),
    "sub": lambda v, n, a, b: (v, -v),
    "mul": lambda v, n, a, b: (v * b, v * a),
    "div": lambda v, n, a, b: (v * add_inverse(b), -(v * add_inverse(b)) * n),
    "neg": lambda v, n, a: (-v,),
    "abs": lambda v, n, a: (v * add_sign(a),),
    "sqrt": lambda v, n, a: ((~(a <= 0.0), v * (add_inverse(n) * 0.5)),),
    "exp": lambda v, n, a: (v * n,),
    "log": lambda v, n, a: (v / a,),
    "log1p": lambda v, n, a: (v / (a + 1.0),),
    "expm1": lambda v, n, a: (v * (n + 1.0),),
    "sinh": lambda v, n, a: (v * _add_slope_of_sinh(n, a),),
    "cosh": lambda v, n, a: (v * n.graph.add_node("sinh", a),),
    "cosh_of_sinh": lambda v, n, a: (v * a / n,),
    "tanh": lambda v, n, a: (v * (n.graph.add_number(1) - n * n),),
    "sigmoid": lambda v, n, a: (v * (n * (n.graph.add_number(1) - n)),),
    "acosh1p": lambda v, n, y, root: ((~(y <= 0.0), v * add_inverse(root)), None),
    "max": lambda v, n, a, b: _split_at_ties(v, a, b),
    "min": lambda v, n, a, b: _split_at_ties(v, a, b)[::-1],
    "where": lambda v, n, c, a, b: (None, (c, v), (~c, v)),
}


def compute_gradients(*adjoints: tuple[Node, Node | None, Node]) -> dict[Node, Node]:
    """Return the gradients of all leaves.

    Args:
        adjoints: Start nodes, each with the mask where its adjoint counts (None: everywhere) and
            the adjoint.
    """
    waiting: dict[Node, list[tuple[Node | None, Node]]] = {}
    leaves: dict[Node, Node] = {}
    for node, mask, value in adjoints:
        waiting.setdefault(node, []).append((mask, value))
    # Users come before their arguments, so all adjoints of a node are known when it is reached.
    for node in sort_ancestors(waiting):
        if node not in waiting or not node.varies:
            continue
        mask, value = _sum_adjoints(waiting[node])
        if node.op in LEAVES:
            leaves[node] = value if mask is None else add_where(mask, value, 0.0)
            continue
        parts = DERIVATIVES[node.op](value, node, *node.args)
        # A node that several others use collects an adjoint from each.
        for argument, part in zip(node.args, parts, strict=True):
            if part is not None and argument.varies:
                extra, part = part if isinstance(part, tuple) else (None, part)
                waiting.setdefault(argument, []).append((_intersect_masks(mask, extra), part))
    return leaves


def sort_ancestors(nodes) -> Sequence[Node]:
    """Return nodes and everything they are computed from, users first."""
    seen, todo = set(), list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.args
    # Arguments have a lower order than their users.
    return sorted(seen, key=lambda node: -node.order)


def _intersect_masks(a: Node | None, b: Node | None) -> Node | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _sum_adjoints(adjoints: list[tuple[Node | None, Node]]) -> tuple[Node | None, Node]:
    """Return the union of the masks and the sum of the adjoints.

    Each adjoint counts within its mask.
    """
    by_mask: dict[Node | None, Node] = {}
    for mask, value in adjoints:
        by_mask[mask] = by_mask[mask] + value if mask in by_mask else value
    (mask, value), *others = by_mask.items()
    # With one mask for all, it can stay outside the sum and be applied later.
    if others and mask is not None:
        value = add_where(mask, value, 0.0)
    for other, more in others:
        value = value + (more if other is None else add_where(other, more, 0.0))
        mask = None if mask is None or other is None else mask | other
    return mask, value
