"""A score term's C++ functor, forward and derivative, written from its graph (trace.py): what cpu/score.h expects.

A node is a `float` where it is made from what a row shares (its statistics, parameters, numbers) by plain arithmetic, a
mask `Ints`, and else a `Vec`: one register of pairs. What the derivative reads of the forward pass is kept in `State`.
"""

from __future__ import annotations

from functools import lru_cache

from .score import Reader, Term
from .trace import (
    ARITHMETIC,
    LEAVES,
    Distance,
    Graph,
    Node,
    Traced,
    Untraceable,
    alone,
    ancestors,
    gradients,
    trace,
    trace_reader,
)

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
    "where": "{} ? {} : {}",
    "max": "larger_or_nan({}, {})",
    "min": "smaller_or_nan({}, {})",
    "abs": "magnitude({})",
    "sqrt": "root({})",
    "exp": "exponential({})",
    "expm1": "exponential_less_one({})",
    "log": "logarithm({})",
    "log1p": "log_of_one_plus({})",
    "acosh1p": "log_of_one_plus({} + {})",
    "sinh": "hyperbolic_sine({})",
    "cosh": "hyperbolic_cosine({})",
    "cosh_of_sinh": "cosine_of_sine({})",
    "tanh": "hyperbolic_tangent({})",
    "sigmoid": "sigmoid({})",
}
#: Taken by float and Vec alike.
MIXED = (*ARITHMETIC, "neg")

STRUCT = """
namespace hyper {{
namespace {{  // of this library alone: others have functors of the same name
struct Emitted {{
  static constexpr int rows = {rows}, columns = {columns}, heads = {heads};
  struct State {{
    Vec logit;
{state}
  }};

{functions}
}};
}}  // namespace
}}  // namespace hyper
"""
OPEN = """  static State open(const Pair& p) {{
    State s = {{}};
{logit}
    return s;
  }}
"""
PULL = """
  static Slopes<rows, columns, heads> pull(const Pair& p, const State& s, Vec grad) {{
    Slopes<rows, columns, heads> to;
{pull}{from_differences}
    return to;
  }}
"""
OPEN_WITH_DISTANCE = """  static State open(const Pair& p) {{
    State s = {{}};
    if (p.gap) {{
      s.squared_distance = *p.gap;
    }} else {{
{by_product}
    }}
    for (bool again = !p.gap;; again = false) {{
{logit}
      if (!again) return s;
      {{
{is_inexact}
      }}
      if (!p.exact) return s;
      s.some_near = any(s.near);
      if (!s.some_near) [[likely]] return s;
{factors}
      const Vec exact = exact_squared_distance(p, query_factor, key_factor, p.dim - {left_out});
      s.squared_distance = s.near ? exact : s.squared_distance;
    }}
  }}

  static Ints inexact(const State& s) {{ return s.near; }}
"""
READER = """
namespace hyper {{
namespace {{
struct {name} {{
  static constexpr int inputs = {inputs}, statistics = {statistics}, left_out = {left_out};
  static constexpr bool reads_norms = {norms};
  static Vec read(const Vec* column, float dim, const float* head, Vec* statistic) {{
    const struct {{
      float row[1];
      const Vec* column;
      const float* head;
    }} p = {{{{dim}}, column, head}};
{body}
  }}
}};
}}  // namespace
}}  // namespace hyper
"""
FROM_DIFFERENCES = """
    if (s.some_near) [[unlikely]] {{
      const Ints some = s.near & (grad != Vec{{}});  // but for lanes that are no pairs
      const Vec d_near = some ? {gradient} : Vec{{}}, slope_near = some ? {slope} : Vec{{}};
{factors}
      const auto [by_query, by_key] = add_differences(p, query_factor, key_factor, p.dim - {left_out}, d_near);
{pull_differences}
    }}"""


class CppWriter:
    """Statements that compute nodes, each once.

    Args:
        kept: nodes that stand in `State`; those that are read from there are added to `read`.
        read: the same set for all writers of a functor.
    """

    def __init__(self, kept: set[Node], read: set[Node], indent: int = 4):
        self.kept, self.read, self.indent = kept, read, " " * indent
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(self.indent + line)

    def text(self, node: Node) -> str:
        """A node's name, after the statements that it needs."""
        if node.op == "number":
            number = f"{node.value!r}f".replace("inff", "kInf")
            return f"({number})" if node.value < 0 else number
        if node.op in LEAVES:
            place = f"[{node.value}]" if node.op in ("row", "column", "head") else ""
            return f"s.{node.op}" if node.op == "squared_distance" else f"p.{node.op}{place}"
        if node.op in ("local", "near"):
            return str(node.value)
        if node.op == "detach":
            return self.text(node.args[0])
        if node in self.kept and kind(node) != "float":
            self.read.add(node)
            return state_name(node)
        if node not in self.names:
            arguments = [self.text(a) if node.op in MIXED else self.vector(a) for a in node.args]
            if node.op == "where" and arguments[1] == arguments[2]:  # but for `detach`
                return arguments[1]
            self.names[node] = f"v{node.order}"
            self.add(
                f"const {kind(node)} v{node.order} = {EXPRESSIONS[node.op].format(*arguments)};"
            )
        return self.names[node]

    def vector(self, node: Node) -> str:
        return f"splat({self.text(node)})" if kind(node) == "float" else self.text(node)

    def result(self) -> str:
        return "\n".join(self.lines)


def kind(node: Node) -> str:
    """The C++ type of a node."""
    return "Ints" if node.is_mask else "float" if node.of_row else "Vec"


def state_name(node: Node) -> str:
    """A node's name in `State`."""
    return f"s.v{node.order}"


@lru_cache(maxsize=256)
def emitted(term: Term) -> tuple[str, str | None]:
    """The text of a term's functor, and why there is none."""
    try:
        return functor(term), None
    except Untraceable as error:
        return "", str(error)


@lru_cache(maxsize=256)
def emitted_reader(reader: Reader, name: str) -> str:
    """The text of a reader, a struct of that name."""
    factor, statistics = alone(trace_reader, reader)
    w = CppWriter(set(), set())
    for i, node in enumerate(statistics):
        w.add(f"statistic[{i}] = {w.vector(node)};")
    w.add(f"return {w.vector(factor)};")
    norms = any(
        node.op == "column" and node.value == 1 for node in ancestors([factor, *statistics])
    )
    return READER.format(
        name=name,
        inputs=reader.columns,
        statistics=len(statistics),
        left_out=reader.left_out,
        norms=str(norms).lower(),
        body=w.result(),
    )


def functor(term: Term) -> str:
    """The text of a term's functor, `struct Emitted`.

    Raises:
        trace.Untraceable: the term is no arithmetic that can be compiled.
    """
    t = trace(term)
    distance = t.distance
    forward = set(ancestors([t.logit] if distance is None else [t.logit, distance.by_product]))
    read: set[Node] = set()
    # what reads the state is written first, so that it is known what that has to hold
    pull = CppWriter(forward, read)
    texts = write_pull(t, pull) | (
        {} if distance is None else write_distance(t.graph, distance, forward, read)
    )
    texts |= {
        "pull": pull.result(),
        "logit": write_forward(t.logit, "s.logit", read, 4 if distance is None else 6),
    }
    state = [f"    {kind(n)} v{n.order};" for n in sorted(read, key=lambda n: n.order)]
    texts["from_differences"] = ""
    if distance is not None:
        texts["by_product"] = write_forward(distance.by_product, "s.squared_distance", read, 6)
        texts["from_differences"] = FROM_DIFFERENCES.format(**texts)
        state += [
            "    Vec squared_distance;",
            "    Ints near;  // to be taken from differences",
            "    bool some_near;",
        ]
    functions = (OPEN if distance is None else OPEN_WITH_DISTANCE) + PULL
    return STRUCT.format(
        rows=term.rows,
        columns=term.columns,
        heads=term.heads,
        state="\n".join(state),
        functions=functions.format(**texts).rstrip(),
    )


def write_forward(node: Node, target: str, read: set[Node], indent: int) -> str:
    """The statements of the forward pass, and what of it goes into the state."""
    w = CppWriter(set(), set(), indent)
    w.add(f"{target} = {w.vector(node)};")
    for kept in sorted(read & set(ancestors([node])), key=lambda n: n.order):
        w.add(f"{state_name(kept)} = {w.text(kept)};")
    return w.result()


def local(g: Graph, name: str) -> Node:
    """A variable of the text as a node."""
    return g.node("local", value=name)


def write_pull(t: Traced, w: CppWriter) -> dict[str, str]:
    """Of the product and of statistics from the gradient of the logit; of parameters the slopes of the logit.

    Returns:
        The names of the squared distance's gradient and slope.
    """
    (by_grad, d), (by_one, slope) = t.by_grad, t.through_logit(t.graph.number(1))
    write_gradients(w, by_grad, by_one, "=")
    return {"gradient": w.vector(d), "slope": w.vector(slope)}


def write_gradients(
    w: CppWriter, by_grad: dict[Node, Node], by_one: dict[Node, Node], how: str
) -> None:
    """Assignments to what `pull` returns: slopes for parameters, gradients for all else."""
    others = {leaf: by_one[leaf] for leaf in by_one if leaf.op == "head"}
    for leaf, gradient in (by_grad | others).items():
        place = "" if leaf.op == "dot" else f"[{leaf.value}]"
        w.add(f"to.{leaf.op}{place} {how} {w.vector(gradient)};")


def write_distance(
    g: Graph, distance: Distance, forward: set[Node], read: set[Node]
) -> dict[str, str]:
    """Which pairs' distances are taken from differences, and the gradients of those."""
    inexact, factors, pull = (
        CppWriter(forward, read, 8),
        CppWriter(set(), set(), 6),
        CppWriter(set(), set(), 6),
    )
    inexact.add(f"s.near = {inexact.text(distance.is_inexact)};")
    for name, node in zip(("query_factor", "key_factor"), distance.factors, strict=True):
        factors.add(f"const Vec {name} = {factors.vector(node)};")
    slopes = [local(g, f"by_{side}") for side in ("query", "key")]
    by_grad, by_one = (
        gradients(*((f, None, seed * s) for f, s in zip(distance.factors, slopes, strict=True)))
        for seed in (local(g, "d_near"), local(g, "slope_near"))
    )
    write_gradients(pull, by_grad, by_one, "+=")
    return {
        "left_out": str(distance.left_out),
        "is_inexact": inexact.result(),
        "factors": factors.result(),
        "pull_differences": pull.result(),
    }
