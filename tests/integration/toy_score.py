"""A score as somebody else would write it: the dot product plus a learned constant times the cosine."""

from dataclasses import dataclass
from functools import partial

import torch

from hf_hyperattn.config import MechanismConfig, option
from hf_hyperattn.engines import PairScore, ScoreTerm, Term, repeat_heads
from hf_hyperattn.mechanisms.score_layer import ScoreLayer
from hf_hyperattn.registry import Mechanism


@dataclass(frozen=True)
class ToyConfig(MechanismConfig):
    """q·k + c · cos(q, k)."""

    mechanism = "toy_score"
    weight: float = option(0.5, "what the cosine is multiplied with", symbol="c", above=0)


class DotAndCosine(Term):
    name, rows, columns, heads = "toy_dot_and_cosine", 1, 1, 1

    def logits(self, dot, row, column, head, squared_distance=None):
        return dot + head[0] * dot * row[0] * column[0]


TERM = DotAndCosine()


class ToyScore:
    def __init__(self, weight):
        self.weight = weight

    def score(self, query, key, scale=None, gate=None, capped=False):
        scale, heads = query.shape[-1] ** -0.5 if scale is None else scale, query.shape[1]
        q, k = query.double(), key.double()
        weight = torch.as_tensor(self.weight, dtype=torch.float64).expand(heads)
        inverse = [1 / x.norm(dim=-1).clamp_min(1e-12) for x in (q, k)]
        dtype = torch.promote_types(query.dtype, torch.float32)
        numbers = dict(row=inverse[0] / scale, column=inverse[1], head=weight)
        numbers = {name: (t.to(dtype),) for name, t in numbers.items()}
        logits = partial(definition, q, repeat_heads(k, heads), weight[:, None, None], scale)
        term = ScoreTerm(TERM, lambda: logits().to(dtype), gate=gate, capped=capped, **numbers)
        return PairScore(query, key, (term,), scale)


def definition(q, k, weight, scale):
    cosine = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).mT
    return scale * q @ k.mT + weight * cosine


class ToyLayer(ScoreLayer):
    learned = ("weight",)
    space = staticmethod(ToyScore)


TOY = Mechanism("toy_score", "score", "a toy", ToyConfig, ToyLayer, names={"toy_score": ToyConfig()})
