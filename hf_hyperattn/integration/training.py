"""Training patched models: a PEFT config, optimizer groups, no decay of what was added, a freeze of all else."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder

from torch import nn
from transformers import trainer_pt_utils
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

from .hyper import Hyper
from .patching import base_model, patched_hosts
from .record_check import checked_as_one
from .wrapping import WRAPPED, wrap

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
):
    """A PEFT config that trains LoRA matrices, and beside them all that a patch added, whole.

    Use it with `peft.get_peft_model(model, config)` or `model.add_adapter(config)`. The adapter that is saved then
    holds both. To load it, the base must be patched as it was here.

    Args:
        model: a patched model.
        r: rank of the LoRA matrices.
        target_modules: where they go, as PEFT has it; None: the linear layers inside the patched hosts.
        modules_to_save: further modules that are trained and saved whole, such as a new head.
        task_type: as PEFT has it; None: told from the model's class, where it is one of PEFT's tasks.
        options: all else that `peft.LoraConfig` takes: `lora_alpha`, `lora_dropout`, `bias`, `use_dora`, ...

    Returns:
        A `peft.LoraConfig`.

    Raises:
        ValueError: the model is not patched, or its hosts hold no linear layers and `target_modules` is not given.
    """
    from peft import LoraConfig  # takes a third of a second, which only those who train should wait

    base = base_model(model)
    check_patched(base)
    return LoraConfig(
        r=r,
        target_modules=projections(base) if target_modules is None else target_modules,
        modules_to_save=["hyper", *(name for name in modules_to_save or () if name != "hyper")],
        task_type=task_of(base) if task_type is None else task_type,
        **options,
    )


def parameter_groups(model: nn.Module, lr: float, hyper_lr: float, weight_decay: float = 0.0) -> list[dict]:
    """Groups of the trainable parameters for a torch optimizer; what a patch added has a group of its own.

    Zero is where added parameters change nothing, so they are not decayed; and they are few and start at zero, so they
    want a larger learning rate than the weights: 1e-2 is a good first one for gates.

    Args:
        model: a patched model, also inside PEFT's, a data-parallel or FSDP's wrapper.
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
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value!r} is not allowed; allowed: finite numbers from 0")
    added = hyper_parameters(model)
    decayed = set(trainer_pt_utils.get_parameter_names(model, [nn.LayerNorm], UNDECAYED))
    groups = {
        "weights": dict(params=[], lr=lr, weight_decay=weight_decay),
        "undecayed": dict(params=[], lr=lr, weight_decay=0.0),
        "hyper": dict(params=[], lr=hyper_lr, weight_decay=0.0),
    }
    for name, parameter in model.named_parameters():
        kind = "hyper" if id(parameter) in added else "weights" if name in decayed else "undecayed"
        if parameter.requires_grad:
            groups[kind]["params"].append(parameter)
    found = [{**group, "name": name} for name, group in groups.items() if group["params"]]
    if not found:
        raise ValueError(f"{type(model).__name__} has no trainable parameter; set requires_grad on some")
    return found


def exempt_from_decay() -> None:
    """Keep the Trainer's weight decay, and that of trainers made from it, off added parameters.

    All of them choose what to decay by `get_parameter_names`, which goes through a model from child to child. The
    Trainer takes it from its module when it is imported, which takes a second and is therefore not done here.
    """
    original = trainer_pt_utils.get_parameter_names
    if hasattr(original, WRAPPED):
        return

    @functools.wraps(original)
    def get_parameter_names(model, *args, **kwargs):
        return [] if isinstance(model, Hyper) else original(model, *args, **kwargs)

    setattr(get_parameter_names, WRAPPED, True)
    for module in (trainer_pt_utils, sys.modules.get("transformers.trainer")):
        if module is not None:
            module.get_parameter_names = get_parameter_names


exempt_from_decay()


class TrainerImport(MetaPathFinder):
    """Wraps the Trainer's resuming when its module is imported, which takes a second and is therefore not done here."""

    MODULE = "transformers.trainer"

    def find_spec(self, name, path=None, target=None):
        if name != self.MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            wrap_trainer(module)

        spec.loader.exec_module = exec_module
        return spec


def wrap_trainer(module) -> None:
    """Let what the Trainer resumes from, and its shards, be compared with the model as a whole."""

    @wrap("_load_from_checkpoint", module.Trainer)
    def _resume(original, self, resume_from_checkpoint, model=None):
        with checked_as_one(self.model if model is None else model, resume_from_checkpoint):
            return original(self, resume_from_checkpoint, model)

    @wrap("load_sharded_checkpoint", module)
    def _load_shards(original, model, folder, *args, **kwargs):
        with checked_as_one(model, folder):
            return original(model, folder, *args, **kwargs)


if TrainerImport.MODULE in sys.modules:
    wrap_trainer(sys.modules[TrainerImport.MODULE])
else:
    sys.meta_path.insert(0, TrainerImport())


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
    """The ids of all parameters that a patch added, in every adapter's copy of them.

    Raises:
        ValueError: the model is not patched.
    """
    base = base_model(model)
    check_patched(base)
    return {id(p) for _, host in patched_hosts(base) for p in host.hyper.parameters()}


def check_patched(base: nn.Module) -> None:
    """Raise if there is nothing of ours in a model."""
    if not any(patched_hosts(base)):
        raise ValueError(
            f"{type(base).__name__} is not patched; call patch_model(model, ConeConfig()) first, or another mechanism"
        )


def task_of(base: nn.Module) -> str | None:
    """PEFT's task type for a model class, None where it has none."""
    name = type(base).__name__
    for task, mapping in TASKS.items():
        if any(name in ((known,) if isinstance(known, str) else known) for known in mapping.values()):
            return task
    return None


def projections(base: nn.Module) -> list[str]:
    """Names of the linear layers inside the patched hosts, in the short form that PEFT matches with name endings.

    "self_attn.q_proj" where that means patched hosts alone, else a name for each, "layers.20.self_attn.q_proj".
    """
    wanted = [f"{host}.{name}" for host, module in patched_hosts(base) for name in linear_layers(module)]
    if not wanted:
        raise ValueError(
            f"the patched hosts of {type(base).__name__} hold no linear layers; pass target_modules=[...]"
        )
    chosen, names = set(wanted), [name for name, _ in base.named_modules()]
    found = []
    for name in wanted:
        short = ".".join(name.split(".")[-2:])
        alone = all(n in chosen for n in names if n == short or n.endswith("." + short))
        found.append(short if alone else name.removeprefix(base.base_model_prefix + "."))
    return sorted(set(found))


def linear_layers(module: nn.Module, path: str = "") -> Iterator[str]:
    """Names of the linear layers in a module, those that carry an adapter already included, and ours not."""
    for name, child in module.named_children():
        inner = child.get_base_layer() if hasattr(child, "get_base_layer") else child
        if isinstance(inner, nn.Linear | Conv1D):
            yield path + name
        elif inner is child and not isinstance(getattr(child, "original_module", child), Hyper):
            yield from linear_layers(child, f"{path}{name}.")
