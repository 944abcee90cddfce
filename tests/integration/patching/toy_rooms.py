"""Two mechanisms as somebody else would write them, in a package of their own: nothing of ours is touched.

`toy_cosine` is a score with learnable temperature whose term has no derivative of its own, and changes all heads;
`toy_slope` is a positional bias that needs no term at all, and honours `heads=`.
"""

from dataclasses import dataclass, replace

import torch

from hf_hyperattn.config import MechanismConfig, option
from hf_hyperattn.engines import ScoreTerm, Term, dot_score, register_term, working_dtype
from hf_hyperattn.engines.score import repeat_heads
from hf_hyperattn.mechanisms.base import MechanismLayer
from hf_hyperattn.registry import Mechanism, register


@dataclass(frozen=True)
class ToyCosineConfig(MechanismConfig):
    """The cosine of query and key, times a temperature."""

    mechanism = "toy_cosine"
    temperature: float = option(2.0, "what the cosine is multiplied with", symbol="t", above=0)


class Cosine(Term):
    name, rows, columns, heads = "toy_cosine", 1, 1, 1

    def logits(self, dot, row, column, head, squared_distance=None):
        return dot * row[0] * column[0] * head[0]


COSINE = register_term(Cosine())


class ToyCosineLayer(MechanismLayer):
    def __init__(self, config, host, mode="replace", heads=None):
        super().__init__(config, host, mode, heads)
        self.gate = self.per_head(host) if mode == "blend" else None
        self.log_temperature = self.per_head(host)

    def change(self, plan):
        call, dtype = plan.call, working_dtype(plan.call.query, plan.call.key)
        q, k = call.query.to(dtype), call.key.to(dtype)
        t = torch.full((q.shape[1],), self.config.temperature, dtype=dtype, device=q.device)
        t = t if self.log_temperature is None else t * self.log_temperature.to(dtype).exp()
        scale = call.scale if self.mode == "blend" else 1.0
        term = ScoreTerm(
            COSINE,
            lambda: cosine(q, k) * t[:, None, None],
            row=(1 / (q.norm(dim=-1) * scale),),
            column=(1 / k.norm(dim=-1),),
            head=(t,),
            gate=None if self.gate is None else self.gate.to(dtype),
        )
        if self.mode == "blend":
            return plan.change(score=plan.score.plus(term))
        return plan.change(score=replace(dot_score(q, k, 1.0), terms=(term,)))

    def identical(self):
        return self.mode == "blend" and not bool(self.gate.any())


def cosine(q, k):
    """[B, H, N, M] from differences of unit vectors: cos = 1 - |a - b|²/2, no product."""
    a, b = (x / x.norm(dim=-1, keepdim=True) for x in (q, repeat_heads(k, q.shape[1])))
    return 1 - torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square() / 2


@dataclass(frozen=True)
class ToySlopeConfig(MechanismConfig):
    """A bias that falls with the distance to the last key that there is."""

    mechanism = "toy_slope"
    slope: float = option(0.1, "how fast it falls", least=0)


class ToySlopeLayer(MechanismLayer):
    honours_heads = True

    def __init__(self, config, host, mode="replace", heads=None):
        super().__init__(config, host, mode, heads)
        self.gate = self.per_head(host) if mode == "blend" else None

    def change(self, plan):
        keys = torch.arange(plan.call.key.shape[2], device=plan.call.query.device)
        bias = self.config.slope * (keys - keys[-1]).to(plan.score.query.dtype)
        bias = bias.expand(1, plan.call.query.shape[1], 1, -1)
        for factor in (self.gate, self.head_mask(plan.call)):
            bias = bias if factor is None else bias * factor.to(bias.dtype)[:, None, None]
        old = plan.options.bias
        return plan.change(options=replace(plan.options, bias=bias if old is None else old + bias))

    def identical(self):
        return self.mode == "blend" and not bool(self.gate.any())


def register_toys() -> None:
    """What the last line of a room's `__init__` does."""
    register(
        Mechanism(
            name="toy_cosine",
            stage="score",
            paper="none",
            config=ToyCosineConfig,
            layer=ToyCosineLayer,
            functions={"toy_cosine_of": cosine},
            names={"toy_cosine": ToyCosineConfig()},
        )
    )
    register(
        Mechanism(
            "toy_slope", "bias", "none", ToySlopeConfig, ToySlopeLayer, cross_attention=False
        ),
    )
