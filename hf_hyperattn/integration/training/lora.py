"""Make the PEFT config that trains LoRA matrices and the added parameters of a patched model."""

from __future__ import annotations

from torch import nn
from transformers.models.auto import modeling_auto

from ..adapters.hyper_lora import HyperLoraConfig, find_linear_targets
from ..patching.checkpoint_config import RECORD, write_records
from ..patching.patch import base_model
from .parameters import hosts_of_patched

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


def find_task(base: nn.Module) -> str | None:
    """Return PEFT's task type for a model class, or None if there is none."""
    name = type(base).__name__
    for task, mapping in TASKS.items():
        for known in mapping.values():
            # Some model types have several classes for a task.
            if name in ((known,) if isinstance(known, str) else known):
                return task
    return None
