"""Train patched models: a PEFT config, parameter groups for optimizers, freezing, and logs of gates.

Added parameters are never decayed, neither by these groups nor by the Trainer.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, trainer_pt_utils
from transformers.models.auto import modeling_auto

from ..readable import can_read
from .checkpoint_config import (
    RECORD,
    active_hyper,
    patched_hosts,
    unwrap_hyper,
    write_records,
)
from .hyper import Hyper
from .hyper_adapter import HyperAdapter
from .hyper_lora import HyperLoraConfig, find_linear_targets
from .patching import base_model
from .wrapping import wrap

#: Parameters without weight decay: regular expressions for their names, the same as the Trainer's.
UNDECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]

#: PEFT's task types, each with Transformers' mapping of the model classes for that task.
TASKS = {
    "CAUSAL_LM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "SEQ_2_SEQ_LM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "SEQ_CLS": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "TOKEN_CLS": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "QUESTION_ANS": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
}


def lora_config(
    model: nn.Module,
    r: int = 8,
    *,
    target_modules: str | list[str] | None = None,
    modules_to_save: list[str] | None = None,
    task_type: str | None = None,
    **options,
) -> HyperLoraConfig:
    """Return a PEFT config that trains LoRA matrices and all added parameters.

    Use it with `peft.get_peft_model(model, config)` or `model.add_adapter(config)`. The saved
    adapter contains both. Any loader can put it on an unpatched base model, which it then patches
    like this model.

    Args:
        model: A patched model.
        r: Rank of the LoRA matrices. 0 for none.
        target_modules: Where they go, as in PEFT. Default: the linear layers inside the patched
            attention layers.
        modules_to_save: Further modules that are trained and saved whole, such as a new head.
        task_type: As in PEFT. Default: derived from the model's class, if PEFT knows its task.
        options: Further arguments of `peft.LoraConfig`: `lora_alpha`, `lora_dropout`, `bias`,
            `use_dora`, ...

    Raises:
        ValueError: The model is not patched, or its attention has no linear layers and
            `target_modules` is None.

    Example:
        model = peft.get_peft_model(model, ha.lora_config(model, r=16))
    """
    base = base_model(model)
    hosts = hosts_of_patched(base)
    # Written again, because a part of the model may have been patched by itself.
    write_records(base)
    if target_modules is None and r:
        target_modules = find_linear_targets(base, hosts)
    return HyperLoraConfig(
        r=r,
        hyperattn=getattr(base.config, RECORD),
        target_modules=target_modules,
        modules_to_save=modules_to_save,
        task_type=find_task(base) if task_type is None else task_type,
        **options,
    )


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


def find_task(base: nn.Module) -> str | None:
    """Return PEFT's task type for a model class, or None if there is none."""
    name = type(base).__name__
    for task, mapping in TASKS.items():
        for known in mapping.values():
            # Some model types have several classes for a task.
            if name in ((known,) if isinstance(known, str) else known):
                return task
    return None


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
