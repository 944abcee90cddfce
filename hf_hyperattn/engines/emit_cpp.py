"""Write a score term's C++ functor from its graph (trace.py).

The result is the struct that cpu/score.h expects. A node becomes one of three C++ types:

- `float`: plain arithmetic on numbers that a row shares (its statistics, parameters, constants).
- `Ints`: a mask.
- `Vec`: anything else; one register of pairs.

Forward values that the derivative reads are members of `State`.
"""

from __future__ import annotations

from functools import lru_cache

from .score import Reader, Term
from .trace import (
    ARITHMETIC,
    INDEXED,
    LEAVES,
    Distance,
    Graph,
    Node,
    Traced,
    Untraceable,
    compute_gradients,
    run_in_thread,
    sort_ancestors,
    trace_reader,
    trace_term,
)

#: C++ of each operation. The functions are defined in cpu/vectors.h and cpu/score.h.
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
#: Operations on `float` as well as on `Vec`.
MIXED = (*ARITHMETIC, "neg")

#: Texts of the functor. Unnamed namespaces, because every library has functors of the same names.
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
#: Forward pass of a term that reads no distance.
OPEN = """  static State open(const Pair& p) {{
    State s = {{}};
{logit}
    return s;
  }}
"""
#: Derivative of a term.
PULL = """
  static Slopes<rows, columns, heads> pull(const Pair& p, const State& s, Vec grad) {{
    Slopes<rows, columns, heads> to;
{pull}{from_differences}
    return to;
  }}
"""
#: Forward pass with a distance: once with the distance from the product, and again if some pairs
#: need differences. `gap` is a distance that the caller knows already.
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
#: A reader. Its graph has rows, columns and heads like a term's, so `p` has members of these names.
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
#: Part of the derivative for pairs whose distances came from differences. It is rare, so it stays
#: out of the common path.
FROM_DIFFERENCES = """
    if (s.some_near) [[unlikely]] {{
      const Ints some = s.near & (grad != Vec{{}});  // but for lanes that are no pairs
      const Vec d_near = some ? {gradient} : Vec{{}}, slope_near = some ? {slope} : Vec{{}};
{factors}
      const auto [by_query, by_key] = add_differences(p, query_factor, key_factor, p.dim - {left_out}, d_near);
{pull_differences}
    }}"""


class CppWriter:
    """Write the statements that compute nodes, each node once.

    Args:
        kept: Nodes that may be read from `State`.
        read: Collects the nodes that were read from `State`; shared by all writers of a functor.
        indent: Spaces before each statement. Default: 4.
    """

    def __init__(self, kept: set[Node], read: set[Node], indent: int = 4):
        self.kept = kept
        self.read = read
        self.indent = " " * indent
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []

    def add_line(self, line: str) -> None:
        self.lines.append(self.indent + line)

    def write_node(self, node: Node) -> str:
        """Return an expression for a node, after adding the statements that it needs."""
        if node.op == "number":
            # C++ has no literal for infinity.
            number = f"{node.value!r}f".replace("inff", "kInf")
            return f"({number})" if node.value < 0 else number
        if node.op in LEAVES:
            place = f"[{node.value}]" if node.op in INDEXED else ""
            return f"s.{node.op}" if node.op == "squared_distance" else f"p.{node.op}{place}"
        if node.op in ("local", "near"):
            return str(node.value)
        if node.op == "detach":
            return self.write_node(node.args[0])
        # A `float` is cheaper to compute again than to keep.
        if node in self.kept and cpp_type(node) != "float":
            self.read.add(node)
            return state_name(node)
        if node not in self.names:
            write = self.write_node if node.op in MIXED else self.write_vector
            arguments = [write(a) for a in node.args]
            # The graph folds equal branches, but a `detach` makes them different nodes with the
            # same text.
            if node.op == "where" and arguments[1] == arguments[2]:
                return arguments[1]
            expression = EXPRESSIONS[node.op].format(*arguments)
            self.names[node] = f"v{node.order}"
            self.add_line(f"const {cpp_type(node)} v{node.order} = {expression};")
        return self.names[node]

    def write_vector(self, node: Node) -> str:
        """Return an expression for a node as a register of pairs."""
        text = self.write_node(node)
        return f"splat({text})" if cpp_type(node) == "float" else text

    def join_lines(self) -> str:
        return "\n".join(self.lines)


def cpp_type(node: Node) -> str:
    """Return the C++ type of a node."""
    if node.is_mask:
        return "Ints"
    return "float" if node.of_row else "Vec"


def state_name(node: Node) -> str:
    """Return the name of a node in `State`."""
    return f"s.v{node.order}"


@lru_cache(maxsize=256)
def emit_functor(term: Term) -> tuple[str, str | None]:
    """Return the text of a term's functor, and the reason why there is none or None."""
    try:
        # Returned, not raised: the cache keeps results, but not exceptions.
        return write_functor(term), None
    except Untraceable as error:
        return "", str(error)


@lru_cache(maxsize=256)
def emit_reader(reader: Reader, name: str) -> str:
    """Return the text of a reader as a struct.

    Args:
        reader: The reader.
        name: Name of the struct.
    """
    factor, statistics = run_in_thread(trace_reader, reader)
    w = CppWriter(set(), set())
    for i, node in enumerate(statistics):
        w.add_line(f"statistic[{i}] = {w.write_vector(node)};")
    w.add_line(f"return {w.write_vector(factor)};")
    # Column 1 of a reader is the sum of squares. Kernels skip it for readers that do not use it.
    used = sort_ancestors([factor, *statistics])
    norms = any(node.op == "column" and node.value == 1 for node in used)
    return READER.format(
        name=name,
        inputs=reader.columns,
        statistics=len(statistics),
        left_out=reader.left_out,
        norms=str(norms).lower(),
        body=w.join_lines(),
    )


def write_functor(term: Term) -> str:
    """Return the text of a term's functor, `struct Emitted`.

    Raises:
        Untraceable: The term cannot be compiled.
    """
    t = trace_term(term)
    distance = t.distance
    outputs = [t.logit] if distance is None else [t.logit, distance.by_product]
    forward = set(sort_ancestors(outputs))
    read: set[Node] = set()
    # The readers of the state are written first. They decide which forward values it has to hold.
    pull = CppWriter(forward, read)
    texts = write_pull(t, pull)
    if distance is not None:
        texts |= write_distance(t.graph, distance, forward, read)
    texts["pull"] = pull.join_lines()
    # With a distance, the statements stand two levels deeper, inside a loop.
    texts["logit"] = write_forward(t.logit, "s.logit", read, 4 if distance is None else 6)
    members = sorted(read, key=lambda node: node.order)
    state = [f"    {cpp_type(node)} v{node.order};" for node in members]
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
    """Return the statements that compute a node and store what the derivative reads.

    Args:
        node: Node to compute.
        target: Variable for its value.
        read: Nodes that `State` has to hold.
        indent: Spaces before each statement.
    """
    w = CppWriter(set(), set(), indent)
    w.add_line(f"{target} = {w.write_vector(node)};")
    for kept in sorted(read & set(sort_ancestors([node])), key=lambda node: node.order):
        w.add_line(f"{state_name(kept)} = {w.write_node(kept)};")
    return w.join_lines()


def add_local(g: Graph, name: str) -> Node:
    """Return the node of a variable of the emitted text."""
    return g.add_node("local", value=name)


def write_pull(t: Traced, w: CppWriter) -> dict[str, str]:
    """Write the derivative of a term.

    The product and the statistics get gradients, and the parameters get slopes.

    Args:
        t: Graph of the term.
        w: Writer for the statements.

    Returns:
        Expressions for the gradient and the slope of the squared distance.
    """
    by_grad, d_distance = t.by_grad
    by_one, slope = t.through_logit(t.graph.add_number(1))
    write_gradients(w, by_grad, by_one, "=")
    return {"gradient": w.write_vector(d_distance), "slope": w.write_vector(slope)}


def write_gradients(
    w: CppWriter, by_grad: dict[Node, Node], by_one: dict[Node, Node], assign: str
) -> None:
    """Write assignments to the result of `pull`.

    Args:
        w: Writer for the statements.
        by_grad: Gradients of the leaves.
        by_one: Slopes of the logit by the leaves.
        assign: "=" or "+=".
    """
    # Parameters get slopes: the kernel sums slope times gradient over all pairs of a head by
    # itself.
    slopes = {leaf: slope for leaf, slope in by_one.items() if leaf.op == "head"}
    for leaf, gradient in (by_grad | slopes).items():
        place = "" if leaf.op == "dot" else f"[{leaf.value}]"
        w.add_line(f"to.{leaf.op}{place} {assign} {w.write_vector(gradient)};")


def write_distance(
    g: Graph, distance: Distance, forward: set[Node], read: set[Node]
) -> dict[str, str]:
    """Write the code for pairs whose distance is computed from differences.

    Args:
        g: Graph of the term.
        distance: Its distance.
        forward: Nodes of the forward pass.
        read: Collects the nodes that were read from `State`.

    Returns:
        Texts by their names in the templates: which pairs these are, the factors, and the
        gradients.
    """
    inexact = CppWriter(forward, read, 8)
    factors = CppWriter(set(), set(), 6)
    pull = CppWriter(set(), set(), 6)
    inexact.add_line(f"s.near = {inexact.write_node(distance.is_inexact)};")
    for name, node in zip(("query_factor", "key_factor"), distance.factors, strict=True):
        factors.add_line(f"const Vec {name} = {factors.write_vector(node)};")
    slopes = [add_local(g, f"by_{side}") for side in ("query", "key")]

    def pull_factors(seed: Node) -> dict[Node, Node]:
        adjoints = [(f, None, seed * s) for f, s in zip(distance.factors, slopes, strict=True)]
        return compute_gradients(*adjoints)

    d_near = add_local(g, "d_near")
    slope_near = add_local(g, "slope_near")
    write_gradients(pull, pull_factors(d_near), pull_factors(slope_near), "+=")
    return {
        "left_out": str(distance.left_out),
        "is_inexact": inexact.join_lines(),
        "factors": factors.join_lines(),
        "pull_differences": pull.join_lines(),
    }
