"""Warn once if an optimizer applies weight decay to added parameters.

Added parameters start at zero, so weight decay undoes what they learn. The Trainer and
`parameter_groups` exclude them; a script's own optimizer may not. Torch calls a hook before the
step of any optimizer. The hook looks at optimizers until one of them has added parameters, and does
nothing afterwards.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from ..attention.hyper import patched_hosts
from .checkpoint_config import MODELS

logger = logging.getLogger("hf_hyperattn")


class DecayWatch:
    """Hook before the first step of optimizers.

    Attributes:
        handle: Handle of the hook while it is registered.
        done: Whether an optimizer with added parameters was checked.
        warned: Whether this process has been warned.
        seen: Optimizers without added parameters.
    """

    def __init__(self) -> None:
        self.handle: Any = None
        self.done = False
        self.warned = False
        self.seen: WeakSet[Optimizer] = WeakSet()

    def watch_model(self, model: PreTrainedModel) -> None:
        """Check the optimizers that will train a model, which is being patched now."""
        MODELS.add(model)
        # A finished hook could not remove itself, so a new one replaces it here.
        if self.handle is not None and self.done:
            self.handle.remove()
            self.handle = None
        if self.handle is None and not self.warned:
            self.done = False
            self.handle = register_optimizer_step_pre_hook(self.check_optimizer)

    def check_optimizer(self, optimizer: Optimizer, args: tuple, keywords: dict) -> None:
        """Warn if an optimizer decays added parameters. This is the hook."""
        # Torch iterates over its hooks now, so this one cannot be removed when it is done. It
        # returns instead.
        if self.done or torch.compiler.is_compiling() or optimizer in self.seen:
            return
        names = added_names()
        ours = [
            (parameter, group)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and id(parameter) in names
        ]
        if not ours:
            self.seen.add(optimizer)
            return
        self.done = True
        decayed = [(parameter, group) for parameter, group in ours if group.get("weight_decay")]
        if decayed and not self.warned:
            self.warned = True
            parameter, group = decayed[0]
            decay = float(group["weight_decay"])
            optimizer_name = type(optimizer).__name__
            # Adafactor may choose the rate by itself, and then has none here.
            rate = group.get("lr")
            learning_rate = "LR" if rate is None else f"{float(rate):g}"
            rates = f"lr={learning_rate}, hyper_lr=1e-2, weight_decay={decay:g}"
            logger.warning(
                f"hf_hyperattn: {optimizer_name} decays {len(decayed)} tensors that a patch added, such as "
                f"{names[id(parameter)]}, by weight_decay={decay:g}. That pulls them back to zero, their start, and "
                "undoes what they learn. Give them a group with weight_decay=0: "
                f"{optimizer_name}(hf_hyperattn.parameter_groups(model, {rates}))"
            )


def added_names() -> dict[int, str]:
    """Return the names of all parameters that patches added to living models, by id."""
    names: dict[int, str] = {}
    # Copy first: other threads may build models, and change the set, during the loop.
    for reference in tuple(MODELS.data):
        model = reference()
        for host, module in patched_hosts(model) if model is not None else ():
            for name, parameter in module.hyper.named_parameters():
                in_this_model = f"{host}.hyper.{name}"
                # Parts of a model are models too. The longest name is the one in the whole model.
                names[id(parameter)] = max(names.get(id(parameter), ""), in_this_model, key=len)
    return names


#: The watch of this process.
WATCH = DecayWatch()
