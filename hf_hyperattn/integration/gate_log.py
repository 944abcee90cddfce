"""Gates by layer and head in the logs of a training run."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ..readable import can_read
from .checkpoint_config import patched_hosts
from .hyper_adapter import active_hyper
from .patching import base_model


class LogGates(TrainerCallback):
    """Logs where every gate stands whenever the Trainer logs its loss, to the history and all trackers.

    Names are "gates/model.layers.20.self_attn/cone/head_3". Under an adapter they are those of the adapter.

    Args:
        trainer: whose log they join, a Trainer or one made from it.

    Example:
        trainer.add_callback(ha.LogGates(trainer))
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        if logs and "loss" in logs and model is not None:
            gates = gates_of(model)
            if gates:
                self.trainer.log(gates)


def gates_of(model: nn.Module) -> dict[str, float]:
    """Every gate of a patched model as it stands; without those that cannot be read (offloaded)."""
    gates: dict[str, float] = {}
    for host, module in patched_hosts(base_model(model)):
        hyper = active_hyper(module.hyper)
        for name, parameter in hyper.named_parameters() if hyper is not None else ():
            if name.endswith("gate") and can_read(parameter):
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                label = name.removesuffix(".gate")
                values = whole.detach().flatten().tolist()
                gates |= {f"gates/{host}/{label}/head_{head}": value for head, value in enumerate(values)}
    return gates
