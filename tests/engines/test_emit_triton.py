"""The text of a score's Triton functions gives what torch gives, NaN and infinity included."""

import types

import pytest
import torch

from hf_hyperattn.engines import Term
from hf_hyperattn.engines.emit_triton import TritonWriter
from hf_hyperattn.engines.trace import trace_term

INF, NAN = float("inf"), float("nan")
#: Triton's functions as PTX defines them: plain extremes return the number beside a NaN.
TRITON = types.SimpleNamespace(
    where=lambda *parts: torch.where(*map(torch.as_tensor, parts)),
    maximum=lambda a, b: torch.fmax(torch.as_tensor(a), torch.as_tensor(b)),
    minimum=lambda a, b: torch.fmin(torch.as_tensor(a), torch.as_tensor(b)),
    fma=lambda a, b, c: a * b + c,
)
NAMES = {
    "tl": TRITON,
    "larger": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    "smaller": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
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
