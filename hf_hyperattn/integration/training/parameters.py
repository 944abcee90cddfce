"""Select the parameters to train: groups for optimizers, and a frozen base.

Added parameters are never decayed, neither by these groups nor by the Trainer.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import trainer_pt_utils

from ..adapters.hyper_adapter import HyperAdapter
from ..attention.hyper import Hyper, patched_hosts, unwrap_hyper
from ..patching.wrapping import wrap

#: Parameters without weight decay: regular expressions for their names, the same as the Trainer's.
UNDECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def parameter_groups(
    model: nn.Module, lr: float, hyper_lr: float, weight_decay: float = 0.0
) -> list[dict]:
    """Return parameter groups for an optimizer, with a group for added parameters.

    Added parameters are not decayed: at zero they change nothing, so decay would undo the patch.
    They are few and start at zero, so they need a larger learning rate than the weights. For gates,
    start with 1e-2.

    Args:
        model: A patched model, or a module that contains one: a wrapper of PEFT, DDP or FSDP, or
            your own.
        lr: Learning rate of the model's own parameters.
        hyper_lr: Learning rate of the added parameters.
        weight_decay: Weight decay of weights. Biases, norms and added parameters have none.

    Returns:
        At most three dicts, each with params, lr, weight_decay and name ("weights", "undecayed",
        "hyper"). A group without trainable parameters is left out.

    Raises:
        ValueError: The model is not patched, nothing in it is trainable, or a rate is negative or
            not a finite number.

    Example:
        optimizer = torch.optim.AdamW(ha.parameter_groups(model, lr=1e-4, hyper_lr=1e-2))
    """
    for name, value in (("lr", lr), ("hyper_lr", hyper_lr), ("weight_decay", weight_decay)):
        # A bool is an int in Python.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value!r} is not allowed; allowed: finite numbers from 0")
    added = hyper_parameters(model)
    decayed = set(trainer_pt_utils.get_parameter_names(model, [nn.LayerNorm], UNDECAYED))
    groups: dict[str, dict] = {
        "weights": dict(params=[], lr=lr, weight_decay=weight_decay),
        "undecayed": dict(params=[], lr=lr, weight_decay=0.0),
        "hyper": dict(params=[], lr=hyper_lr, weight_decay=0.0),
    }
    for name, parameter in model.named_parameters():
        if id(parameter) in added:
            kind = "hyper"
        else:
            kind = "weights" if name in decayed else "undecayed"
        if parameter.requires_grad:
            groups[kind]["params"].append(parameter)
    trainable = [{**group, "name": name} for name, group in groups.items() if group["params"]]
    if not trainable:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter; set requires_grad on some"
        )
    return trainable


# Missing upstream: a way for a module to say that its parameters are not decayed.
def skip_hyper(original, model, *args, **kwargs):
    """Keep the Trainer's weight decay off added parameters.

    The Trainer, and trainers derived from it, select decayed parameters with
    `get_parameter_names`, which recurses into children.
    """
    return [] if isinstance(model, Hyper) else original(model, *args, **kwargs)


wrap("get_parameter_names", trainer_pt_utils)(skip_hyper)
# The Trainer's module binds the function when it is imported. That takes a second, so it is wrapped
# there only if something else has imported it already.
if "transformers.trainer" in sys.modules:
    wrap("get_parameter_names", sys.modules["transformers.trainer"])(skip_hyper)


def freeze_base(model: nn.Module) -> nn.Module:
    """Freeze all parameters of a model except the added ones.

    Args:
        model: A patched model.

    Returns:
        The model.

    Raises:
        ValueError: The model is not patched.

    Example:
        ha.freeze_base(model)  # the optimizer then trains the added parameters only
    """
    added = hyper_parameters(model)
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in added)
    return model


def hyper_parameters(model: nn.Module) -> set[int]:
    """Return the ids of all added parameters, also of every adapter's copies.

    If adapters each bring their own patch, only the active adapter's parameters count.

    Raises:
        ValueError: The model is not patched.
    """
    # By id: tensors compare element by element, so they cannot be looked up in a set.
    modules = [host.hyper for _, host in hosts_of_patched(model)]
    modules = [
        unwrap_hyper(module) if isinstance(module, HyperAdapter) else module for module in modules
    ]
    return {id(parameter) for module in modules for parameter in module.parameters()}


def hosts_of_patched(base: nn.Module) -> list[tuple[str, Any]]:
    """Return name and module of every patched attention layer.

    Raises:
        ValueError: There is none.
    """
    hosts = list(patched_hosts(base))
    if not hosts:
        raise ValueError(
            f"{type(base).__name__} is not patched; call patch_model(model, ConeConfig()) first, or another mechanism"
        )
    return hosts
