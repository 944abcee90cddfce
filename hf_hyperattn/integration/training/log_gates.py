"""Log the gates of a patched model while a Trainer trains it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ...utils.readable import can_read
from ..attention.hyper import active_hyper, patched_hosts
from ..patching.patch import base_model


class LogGates(TrainerCallback):
    """Log the value of every gate whenever the Trainer logs its loss.

    The values go to the log history and to all trackers, under names like
    "gates/model.layers.20.self_attn/cone/head_3". With an adapter they are the adapter's gates.

    Args:
        trainer: The Trainer, or a trainer derived from it.

    Example:
        trainer.add_callback(ha.LogGates(trainer))
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        # `trainer.log` calls this method again, then without a loss.
        if logs and "loss" in logs and model is not None:
            gates = read_gates(model)
            if gates:
                self.trainer.log(gates)


def read_gates(model: nn.Module) -> dict[str, float]:
    """Return the value of every gate of a patched model, except offloaded ones.

    Returns:
        One entry per head, by the names that `LogGates` logs.
    """
    gates: dict[str, float] = {}
    for host, module in patched_hosts(base_model(model)):
        hyper = active_hyper(module.hyper)
        if hyper is None:
            continue
        for name, parameter in hyper.named_parameters():
            if name.endswith("gate") and can_read(parameter):
                # FSDP shards parameters over the processes, and all processes run this together.
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                label = name.removesuffix(".gate")
                values = whole.detach().flatten().tolist()
                gates |= {
                    f"gates/{host}/{label}/head_{head}": value for head, value in enumerate(values)
                }
    return gates
