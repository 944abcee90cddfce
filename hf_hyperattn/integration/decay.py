"""One warning where a script's own optimizer decays what a patch added; the Trainer and `parameter_groups` do not.

Added parameters start at zero, so weight decay undoes what they learn. Torch calls a hook before the step of any
optimizer. It looks at optimizers until one of them has added parameters, and does nothing from then on.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from .checkpoint_config import MODELS, patched_hosts

logger = logging.getLogger("hf_hyperattn")


class DecayWatch:
    """The hook before the first step of optimizers.

    Attributes:
        handle: of the hook, while it is registered.
        done: whether an optimizer of added parameters was looked at.
        warned: whether this process has been warned.
        seen: optimizers that have no added parameters.
    """

    def __init__(self) -> None:
        self.handle: Any = None
        self.done = False
        self.warned = False
        self.seen: WeakSet[Optimizer] = WeakSet()

    def watch_model(self, model: PreTrainedModel) -> None:
        """Look at the optimizers that will train a model which is being patched."""
        MODELS.add(model)
        if self.handle is not None and self.done:
            self.handle.remove()
            self.handle = None
        if self.handle is None and not self.warned:
            self.done = False
            self.handle = register_optimizer_step_pre_hook(self.check_optimizer)

    def check_optimizer(self, optimizer: Optimizer, args: tuple, keywords: dict) -> None:
        """The hook: warn if an optimizer decays added parameters."""
        # Torch is reading its hooks right now, so that none can be removed: this one does nothing any more.
        if self.done or torch.compiler.is_compiling() or optimizer in self.seen:
            return
        names = added_names()
        ours = [
            (p, g)
            for g in optimizer.param_groups
            for p in g["params"]
            if p.requires_grad and id(p) in names
        ]
        if not ours:
            self.seen.add(optimizer)
            return
        self.done = True
        decayed = [(parameter, group) for parameter, group in ours if group.get("weight_decay")]
        if decayed and not self.warned:
            self.warned = True
            parameter, group = decayed[0]
            decay, optimizer_name = float(group["weight_decay"]), type(optimizer).__name__
            rate = group.get("lr")  # Adafactor may choose the rate by itself.
            learning_rate = "LR" if rate is None else f"{float(rate):g}"
            rates = f"lr={learning_rate}, hyper_lr=1e-2, weight_decay={decay:g}"
            logger.warning(
                f"hf_hyperattn: {optimizer_name} decays {len(decayed)} tensors that a patch added, such as "
                f"{names[id(parameter)]}, by weight_decay={decay:g}. That pulls them back to zero, their start, and "
                "undoes what they learn. Give them a group with weight_decay=0: "
                f"{optimizer_name}(hf_hyperattn.parameter_groups(model, {rates}))"
            )


def added_names() -> dict[int, str]:
    """The names of all parameters that patches added to living models, by their ids."""
    names: dict[int, str] = {}
    for reference in tuple(MODELS.data):  # at once: other threads may build models
        model = reference()
        for host, module in patched_hosts(model) if model is not None else ():
            for name, parameter in module.hyper.named_parameters():
                in_this_model = f"{host}.hyper.{name}"
                # Parts of a model are models too: the longest name is that in the whole.
                names[id(parameter)] = max(names.get(id(parameter), ""), in_this_model, key=len)
    return names


#: The watch of this process.
WATCH = DecayWatch()
