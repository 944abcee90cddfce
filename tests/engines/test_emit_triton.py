"""The text of a score's Triton functions gives what torch gives, NaN and infinity included."""

import types

import pytest
import torch

import hf_hyperattn.mechanisms  # noqa: F401  registers the terms
from hf_hyperattn.engines import Term
from hf_hyperattn.engines.emit_triton import (
    CaseSorter,
    TritonWriter,
    emit_functions,
    trace_score,
    trace_split,
)
from hf_hyperattn.engines.score import TERMS
from hf_hyperattn.engines.trace import trace_term

INF, NAN = float("inf"), float("nan")
#: Triton's functions as PTX defines them: plain extremes return the number beside a NaN.
TRITON = types.SimpleNamespace(
    where=lambda *parts: torch.where(*map(torch.as_tensor, parts)),
    maximum=lambda a, b: torch.fmax(torch.as_tensor(a), torch.as_tensor(b)),
    minimum=lambda a, b: torch.fmin(torch.as_tensor(a), torch.as_tensor(b)),
    fma=lambda a, b, c: a * b + c,
    abs=torch.abs,
    sqrt=torch.sqrt,
    rsqrt=torch.rsqrt,
)
NAMES = {
    "tl": TRITON,
    "larger": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    "smaller": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    "divide": lambda a, b: a / b,
    "log1p": torch.log1p,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "cosh_of_sinh": lambda x: (1 + x * x).sqrt(),
}
FORMULAS = {
    "positive": lambda x, y: torch.where(x > 0, x, 0.0),
    "negative": lambda x, y: torch.where(x < 0, x, 0.0),
    "at least": lambda x, y: torch.where(x < 0.5, 0.5, x),
    "at most": lambda x, y: torch.where(x > 0.5, 0.5, x),
    "larger": lambda x, y: torch.where(x <= y, y, x),
    "smaller": lambda x, y: torch.where(x <= y, x, y),
    "clamped": lambda x, y: x.clamp(-0.5, 0.5),
    "fused": lambda x, y: y - x * 2.0,
    "fused, the other way round": lambda x, y: y - 2.0 * x,
    "fused, infinite": lambda x, y: y - x * INF,
}


class Formula(Term):
    """A formula of the product and a statistic of rows."""

    rows = 1

    def __init__(self, name):
        self.name, self.formula = name, FORMULAS[name]

    def logits(self, dot, row, column, head, squared_distance=None):
        return self.formula(dot, row[0])


@pytest.mark.parametrize("name", FORMULAS)
def test_the_text_computes_the_formula(name):
    values = torch.tensor([-INF, -2.0, -0.5, 0.0, 0.25, 0.5, 3.0, INF, NAN])
    x, y = torch.meshgrid(values, values, indexing="ij")
    writer = TritonWriter(None)
    returned = writer.write_node(trace_term(Formula(name)).logit)
    space = {**NAMES, "dot": x, "row": [y], "float": float}
    for line in writer.lines:
        exec(line, space)
    torch.testing.assert_close(eval(returned, space), FORMULAS[name](x, y), equal_nan=True)


def values_of(nodes, **leaves):
    """Nodes computed by the text that is written for them."""
    writer = TritonWriter(None)
    returned = [writer.write_node(node) for node in nodes]
    space = {**NAMES, **leaves, "float": float}
    for line in writer.lines:
        exec(line, space)
    return [torch.as_tensor(eval(text, space)) for text in returned]


#: Without the terms that other test files register, in whatever order files are imported.
OWN_TERMS = sorted(name for name in TERMS if "_for_test" not in name)


@pytest.mark.parametrize("name", OWN_TERMS)
def test_sorted_cases_are_the_derivative(name):
    """Also where heights tie, one cone lies in another, points coincide, and with NaN."""
    traced, reason = trace_score(name, False)
    if traced is None:
        pytest.skip(reason)
    slopes, _ = traced.through_logit(traced.graph.add_number(1), masked=False)
    sorter = CaseSorter(slopes.values())
    sorter.FEWEST = 0
    torch.manual_seed(0)
    count = 4000
    numbers = lambda: torch.rand(count, dtype=torch.float64) * 2 + 0.05
    term = TERMS[name]
    row, column = [numbers() for _ in range(term.rows)], [numbers() for _ in range(term.columns)]
    for ours, theirs in zip(row, column):
        theirs[::3] = ours[::3]
    square = numbers() ** 4
    square[::5], square[1::7], square[2::11] = 0, -1e-9, 1e-35
    square[3::97] = NAN
    leaves = {
        "dot": torch.randn(count, dtype=torch.float64),
        "squared_distance": square,
        "row": row,
        "column": column,
        "head": [numbers() for _ in range(term.heads)],
    }
    expected = values_of(slopes.values(), **leaves)
    found = values_of([sorter.sort(slope) for slope in slopes.values()], **leaves)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("name", ["hype_sinh", "hype_cosh"])
@pytest.mark.parametrize("gated", [False, True])
def test_products_are_the_term(name, gated):
    """The sum of products is the term's logit, near its anchor and far; sums give its gradients."""
    key = "dot+" + "*" * gated + name
    split, layout = trace_split(key, False), emit_functions(key, False).split
    torch.manual_seed(0)
    i, j = torch.rand(50, 1).double() * 60, torch.rand(1, 70).double() * 4000
    anchor = 0.5 * (i.min() + i.max())
    head = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (1e-3, 20.0, 0.7)]
    head = head[: len(split.heads)]
    left = values_of(split.left, offset=i - anchor, head=head)
    right = values_of(split.right, offset=j - anchor, head=head)
    total = sum(a * b for a, b in zip(left, right, strict=True))
    exact = TERMS[name].logits(None, [i], [j], head[:2]) * (head[2] if gated else 1)
    torch.testing.assert_close(total, exact)
    assert (layout.rows, layout.columns) == (len(left), len(right) - layout.constants)

    weight = torch.randn(50, 70, dtype=torch.float64)
    expected = torch.autograd.grad((exact * weight).sum(), head)
    texts = emit_functions(key, False).texts
    space = {**NAMES, "position": j, "anchor": anchor, "head": head}
    columns = run(texts["split_column"], space)[0]
    sums = [weight.sum(1, keepdim=True)] * layout.constants
    sums += [(weight * x).sum(1, keepdim=True) for x in columns]
    assert len(sums) == layout.constants + layout.sums
    found = run(texts["pull_split"], {**space, "position": i, "sums": sums})
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.sum(), theirs)


def run(text, space):
    """What an emitted function returns for arguments by name."""
    name, arguments = text.split("(")[0].removeprefix("def "), text.split("(")[1].split(")")[0]
    exec(text, space)
    return space[name](*(space[a.strip()] for a in arguments.split(",")))
