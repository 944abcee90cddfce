"""Check at every load that the record in the config matches the added tensors of the checkpoint.

A checkpoint that lost one of the two would load as a different model. So a record without its
tensors, tensors without their record, and tensors of another shape are errors, except inside
`fresh_patch()`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn
from transformers import PreTrainedModel

from ...config import read_record
from ...config.registry import MECHANISMS, get_mechanism
from ..attention.hosts import find_hosts
from ..attention.hyper import patched_hosts
from ..attention.stock import marked
from ..patching.checkpoint_config import RECORD, is_recorded, list_configs, recorded_hosts

logger = logging.getLogger("hf_hyperattn")

#: Whether `fresh_patch` is active.
FRESH: ContextVar[bool] = ContextVar("hyperattn_fresh_patch", default=False)
#: End of every error message here.
WAY_OUT = "or load inside `with hf_hyperattn.fresh_patch():` to"


@contextmanager
def fresh_patch() -> Iterator[None]:
    """Let `from_pretrained` load incomplete patches inside this context.

    Missing added tensors get their starting values, as after `patch_model`. Added tensors without a
    record in the config are left out. Outside of the context both are errors. Models made by
    `from_config`, or by calling the class, have no tensors to load and need no context.

    Example:
        with hf_hyperattn.fresh_patch():
            model = AutoModelForCausalLM.from_pretrained(base, config=config_of_a_patched_model)
    """
    token = FRESH.set(True)
    try:
        yield
    finally:
        FRESH.reset(token)


def check_loaded(model: PreTrainedModel, loading_info, source: object) -> None:
    """Compare the record in a model's config with the tensors that were loaded.

    Args:
        model: The model, built from its config and loaded.
        loading_info: Transformers' `LoadStateDictInfo` of the load.
        source: Name of the checkpoint, for the error. None for a state dict.

    Raises:
        ValueError: Added tensors are missing, have another shape, or have no record.
    """
    where = "the state dict" if source is None else str(source)
    warn_of_unused_parameters(model, where)
    if FRESH.get():
        return
    added = added_tensors(model)
    absent = loading_info.missing_keys
    missing = [name for name in added if name in absent and not _is_loaded(model, name, absent)]
    if missing:
        children = {
            name for _, host in patched_hosts(model) for name, _ in host.hyper.named_children()
        }
        mechanisms = ", ".join(sorted(children))
        raise ValueError(
            f"{where} lacks {len(missing)} of the {len(added)} added tensors that its record (config.hyperattn: "
            f"{mechanisms}) asks for, such as {missing[0]!r}; {suggest_class(model)}export or merge "
            f"it again with all tensors, {WAY_OUT} start them at their initial values"
        )
    for name, shape, expected in sorted(loading_info.mismatched_keys):
        if name in added:
            raise ValueError(
                f"{where} holds {name!r} with shape {tuple(shape)}, and its config asks for {tuple(expected)}; use the "
                f"config that it was saved with, {WAY_OUT} start it anew (ignore_mismatched_sizes=True)"
            )
    # Finding tensors by name scans the whole model, so skip it in the usual case.
    unexpected = loading_info.unexpected_keys
    if unexpected and (strange := tensors_of_hosts(model, unexpected)):
        raise ValueError(
            f"{where} holds {len(strange)} added tensors, such as {strange[0]!r}, that no record in its config "
            f"(config.hyperattn) asks for; {suggest_class(model)}put back the keys hyperattn, "
            f"hyperattn_stock and attn_implementation of the config.json that it was saved with, "
            f"{WAY_OUT} leave them out"
        )
    # A config that only lost its record would otherwise load as an unpatched model.
    if not added and any(map(marked, list_configs(model.config))) and not is_recorded(model.config):
        if not any(patched_hosts(model)):
            raise ValueError(
                f"the config of {where} says that it was patched (hyperattn_stock) and has no record of how "
                "(config.hyperattn); put back the key hyperattn of the config.json that it was saved with, or take "
                "hyperattn_stock and attn_implementation out to load the model without the patch"
            )


def suggest_class(model: PreTrainedModel) -> str:
    """Return advice if a model was not loaded as the class that was saved, else "".

    The class matters: whether a prefix LM generates decides what `HsaConfig(tying=None)` means for
    its layers, and so which tensors they have.
    """
    saved = getattr(model.config, "architectures", None) or [type(model).__name__]
    if type(model).__name__ in saved:
        return ""
    return f"load it as {saved[0]}, the class that was saved, or "


def warn_of_unused_parameters(model: PreTrainedModel, where: str) -> None:
    """Warn if a config has parameters for a mechanism by name but runs another name.

    Early versions lost the name on saving.

    Args:
        model: The model that was loaded or is saved.
        where: Name of the checkpoint or model, for the message.
    """
    for config in list_configs(model.config):
        record = getattr(config, RECORD, None)
        if isinstance(record, dict) and recorded_hosts(config) is None:
            mechanisms = read_record(record).mechanisms
            names = {name for m in mechanisms for name in get_mechanism(m.mechanism).names}
            if names and not names & {part._attn_implementation for part in list_configs(config)}:
                logger.warning(
                    f"config.hyperattn of {where} holds parameters of {min(names)!r}, and the model runs "
                    f"{config._attn_implementation!r}; load it with attn_implementation={min(names)!r}, or take "
                    "config.hyperattn out"
                )


def added_tensors(model: nn.Module) -> list[str]:
    """Return the names of all tensors that a patch or in-place conversion added."""
    return [
        f"{host_name}.{name}.{key}"
        for host_name, host in patched_hosts(model)
        for name, module in host.named_modules()
        if name == "hyper" or getattr(module, "added_by_conversion", False)
        for key in module.state_dict()
    ]


def tensors_of_hosts(model: nn.Module, names: Collection[str]) -> list[str]:
    """Return the names that are added tensors of this model's attention layers.

    Args:
        model: The model, patched or not.
        names: Names of tensors, with or without the prefix of the base model.
    """
    if not names:
        return []
    mechanism = "|".join(map(re.escape, MECHANISMS))
    # PEFT keeps copies of a module under these names.
    copies = (
        r"(?:original_module\.|base_layer\.|modules_to_save\.[^.]+\.|lora_hyper\.(?:[^.]+\.)?)?"
    )
    added = re.compile(rf"(?:(.*)\.)?hyper\.{copies}(?:{mechanism})\..*")
    matches = [match for name in sorted(names) if (match := added.fullmatch(name))]
    if not matches:
        return []
    # Only names that would belong to an attention layer: "hyper" may also be a module of others.
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    hosts = {form for n, _ in find_hosts(model) for form in (n, prefix + n, n.removeprefix(prefix))}
    return [match.string for match in matches if (match[1] or "") in hosts]


def _is_loaded(model: PreTrainedModel, name: str, missing: set[str]) -> bool:
    """Return whether a tensor was loaded under another name.

    Args:
        model: The loaded model.
        name: The tensor's own name, which the checkpoint lacks.
        missing: All names that the checkpoint lacks.
    """
    # Tied tensors are saved once.
    source = model.all_tied_weights_keys.get(name)
    if source is not None:
        return source not in missing
    # A shared module appears under several names, and its tensors carry this flag once loaded.
    return bool(getattr(model.get_parameter_or_buffer(name), "_is_hf_initialized", False))
