"""A mechanism of the stage "structure" that notes the hierarchies it is called with, and whose output depends on them.

Pairs of tokens in one finest group get a learnable bias.
"""

from dataclasses import dataclass, replace

import torch

from hf_hyperattn.config import MechanismConfig
from hf_hyperattn.hierarchy import as_hierarchy
from hf_hyperattn.mechanisms.base import MechanismLayer
from hf_hyperattn.registry import MECHANISMS, Mechanism, register

#: (hierarchy, keys, layer) of every call.
CALLS: list[tuple] = []
NAME = "toy_listener"


@dataclass(frozen=True)
class ToyListenerConfig(MechanismConfig):
    """Nothing to set."""

    mechanism = NAME


class ToyListener(MechanismLayer):
    def __init__(self, config, host, mode="replace", heads=None):
        super().__init__(config, host, mode, heads)
        self.weight = self.per_head(host)

    def change(self, plan):
        call = plan.call
        heard = call.keywords.get("hierarchy")
        CALLS.append((heard, call.key.shape[2], self))
        if heard is None:
            return plan
        batch, keys, queries = call.key.shape[0], call.key.shape[2], call.query.shape[2]
        groups = (
            as_hierarchy(heard)
            .fitted(batch, keys, growing=call.is_causal)
            .to_ids()[..., -1]
            .expand(batch, -1)
        )
        own = groups.gather(1, own_slots(plan).expand(batch, queries))
        same = (own[:, :, None] == groups[:, None]).to(call.query.dtype)[:, None]
        weight = torch.ones(call.query.shape[1]) if self.weight is None else self.weight
        bias = same * weight[:, None, None]
        old = plan.options.bias
        return plan.change(options=replace(plan.options, bias=bias if old is None else old + bias))

    def idle(self):
        return False


def own_slots(plan):
    """[B or 1, N]: where among the keys every query's own key is."""
    call, mask = plan.call, plan.options.mask
    keys, queries = call.key.shape[2], call.query.shape[2]
    if mask is None or not call.is_causal:
        return torch.arange(queries)[None] if queries > 1 else torch.full((1, 1), keys - 1)
    seen = mask if mask.dtype == torch.bool else mask >= 0
    return (seen * torch.arange(keys)).amax((1, -1))


def register_listener() -> None:
    """Make it known, until `forget_listener`."""
    register(
        Mechanism(
            NAME,
            "structure",
            "none",
            ToyListenerConfig,
            ToyListener,
            names={NAME: ToyListenerConfig()},
            cross_attention=False,
        )
    )


def forget_listener() -> None:
    """The registry as it was."""
    MECHANISMS.pop(NAME, None)
    CALLS.clear()
