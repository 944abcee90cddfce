"""Training patched models: a PEFT config, optimizer groups, no decay of what was added, a freeze of all else."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, trainer_pt_utils
from transformers.models.auto import modeling_auto

from ..readable import can_read
from .checkpoint_config import RECORD, inner, patched_hosts, write_records
from .hyper import Hyper
from .hyper_adapter import HyperAdapter, active_hyper
from .hyper_lora import HyperLoraConfig, projections
from .patching import base_model
from .wrapping import wrap

#: What the Trainer, too, keeps weight decay from: parameters with one of these (regular expressions) in their names.
UNDECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]

#: PEFT's task types, by the mapping that lists the model classes of the task.
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
    """A PEFT config that trains LoRA matrices, and beside them all that a patch added, whole.

    Use it with `peft.get_peft_model(model, config)` or `model.add_adapter(config)`. The adapter that is saved then
    holds both, and patches a stock base as this model is patched, by whichever loader.

    Args:
        model: a patched model.
        r: rank of the LoRA matrices; 0 for none.
        target_modules: where they go, as PEFT has it; None: the linear layers inside the patched attention layers.
        modules_to_save: further modules that are trained and saved whole, such as a new head.
        task_type: as PEFT has it; None: told from the model's class, where it is one of PEFT's tasks.
        options: all else that `peft.LoraConfig` takes: `lora_alpha`, `lora_dropout`, `bias`, `use_dora`, ...

    Raises:
        ValueError: the model is not patched, or its attention holds no linear layers and `target_modules` is not given.
    """
    base = base_model(model)
    hosts = hosts_of_patched(base)
    write_records(base)  # a part of it may have been patched by itself
    return HyperLoraConfig(
        r=r,
        hyperattn=getattr(base.config, RECORD),
        target_modules=projections(base, hosts) if target_modules is None and r else target_modules,
        modules_to_save=modules_to_save,
        task_type=task_of(base) if task_type is None else task_type,
        **options,
    )


def parameter_groups(
    model: nn.Module, lr: float, hyper_lr: float, weight_decay: float = 0.0
) -> list[dict]:
    """Groups of the trainable parameters for a torch optimizer; what a patch added has a group of its own.

    Zero is where added parameters change nothing, so they are not decayed; and they are few and start at zero, so they
    want a larger learning rate than the weights: 1e-2 is a good first one for gates.

    Args:
        model: a patched model, or any module that holds one: a wrapper of PEFT, DDP or FSDP, or of your own.
        lr: learning rate of all that is not ours.
        hyper_lr: learning rate of the added parameters.
        weight_decay: for weights; biases, norms and added parameters have none.

    Returns:
        At most three dicts, each with params, lr, weight_decay and name ("weights", "undecayed", "hyper"). A group
        without a trainable parameter is left out.

    Raises:
        ValueError: the model is not patched, nothing in it is trainable, or a rate is not a number from 0.
    """
    for name, value in (("lr", lr), ("hyper_lr", hyper_lr), ("weight_decay", weight_decay)):
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < float("inf")
        ):
            raise ValueError(f"{name}={value!r} is not allowed; allowed: finite numbers from 0")
    added = hyper_parameters(model)
    decayed = set(trainer_pt_utils.get_parameter_names(model, [nn.LayerNorm], UNDECAYED))
    groups: dict[str, dict] = {
        "weights": dict(params=[], lr=lr, weight_decay=weight_decay),
        "undecayed": dict(params=[], lr=lr, weight_decay=0.0),
        "hyper": dict(params=[], lr=hyper_lr, weight_decay=0.0),
    }
    for name, parameter in model.named_parameters():
        kind = "hyper" if id(parameter) in added else "weights" if name in decayed else "undecayed"
        if parameter.requires_grad:
            groups[kind]["params"].append(parameter)
    trainable = [{**group, "name": name} for name, group in groups.items() if group["params"]]
    if not trainable:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter; set requires_grad on some"
        )
    return trainable


def without_hyper(original, model, *args, **kwargs):
    """Keep the Trainer's weight decay, and that of trainers made from it, off added parameters.

    All of them choose what to decay by `get_parameter_names`, which goes through a model from child to child. The
    Trainer takes it from its module when it is imported, which takes a second and is therefore not done here.
    """
    return [] if isinstance(model, Hyper) else original(model, *args, **kwargs)


wrap("get_parameter_names", trainer_pt_utils)(without_hyper)
if "transformers.trainer" in sys.modules:
    wrap("get_parameter_names", sys.modules["transformers.trainer"])(without_hyper)


def freeze_base(model: nn.Module) -> nn.Module:
    """Freeze all that was in a model before it was patched, so that only what was added is trained.

    Raises:
        ValueError: the model is not patched.
    """
    added = hyper_parameters(model)
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in added)
    return model


def hyper_parameters(model: nn.Module) -> set[int]:
    """The ids of all parameters that a patch added, in every adapter's copy of them; ValueError where none did.

    Of adapters that each bring their own patch, those of the active one.
    """
    modules = [host.hyper for _, host in hosts_of_patched(model)]
    modules = [inner(module) if isinstance(module, HyperAdapter) else module for module in modules]
    return {id(parameter) for module in modules for parameter in module.parameters()}


def hosts_of_patched(base: nn.Module) -> list[tuple[str, Any]]:
    """`patched_hosts`; ValueError where there is none."""
    hosts = list(patched_hosts(base))
    if not hosts:
        raise ValueError(
            f"{type(base).__name__} is not patched; call patch_model(model, ConeConfig()) first, or another mechanism"
        )
    return hosts


def task_of(base: nn.Module) -> str | None:
    """PEFT's task type for a model class, None where it has none."""
    name = type(base).__name__
    for task, mapping in TASKS.items():
        if any(
            name in ((known,) if isinstance(known, str) else known) for known in mapping.values()
        ):
            return task
    return None


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
                gates |= {
                    f"gates/{host}/{label}/head_{head}": value for head, value in enumerate(values)
                }
    return gates
