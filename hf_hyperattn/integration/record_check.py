"""One check, at every load: the record in the config and the added tensors of the checkpoint belong together.

A checkpoint that lost one of the two would load as another model than was saved. So a record without its tensors,
tensors without their record, and tensors of another shape are errors, except inside `fresh_patch()`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn
from transformers import PreTrainedModel

from ..config import read_record
from ..registry import MECHANISMS, get_mechanism
from .checkpoint_config import RECORD, is_recorded, patched_hosts, recorded_hosts, tree
from .hosts import find_hosts
from .stock import marked

logger = logging.getLogger("hf_hyperattn")

FRESH: ContextVar[bool] = ContextVar("hyperattn_fresh_patch", default=False)
WAY_OUT = "or load inside `with hf_hyperattn.fresh_patch():` to"


@contextmanager
def fresh_patch() -> Iterator[None]:
    """Inside this context `from_pretrained` takes what a checkpoint has of its patch, and starts the rest anew.

    Added tensors that are missing get their starting values, as after `patch_model`, and added tensors that the config
    has no record for are left out. Outside of it both are errors. Models made by `from_config`, or by calling the
    class, are always fresh and need no context.

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
    """Compare the record of a model that was built from its config with the tensors that were loaded into it.

    Args:
        loading_info: Transformers' `LoadStateDictInfo` of the load.
        source: what was loaded, for the message; None for a state dict.

    Raises:
        ValueError: added tensors are missing or have another shape, or there are some without a record.
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
    unexpected = loading_info.unexpected_keys
    if unexpected and (strange := tensors_of_hosts(model, unexpected)):
        raise ValueError(
            f"{where} holds {len(strange)} added tensors, such as {strange[0]!r}, that no record in its config "
            f"(config.hyperattn) asks for; {suggest_class(model)}put back the keys hyperattn, "
            f"hyperattn_stock and attn_implementation of the config.json that it was saved with, "
            f"{WAY_OUT} leave them out"
        )
    if not added and any(map(marked, tree(model.config))) and not is_recorded(model.config):
        if not any(patched_hosts(model)):
            raise ValueError(
                f"the config of {where} says that it was patched (hyperattn_stock) and has no record of how "
                "(config.hyperattn); put back the key hyperattn of the config.json that it was saved with, or take "
                "hyperattn_stock and attn_implementation out to load the model without the patch"
            )


def suggest_class(model: PreTrainedModel) -> str:
    """Return a way out, for errors, if a model was loaded as another class than the one it was saved as; else "".

    Whether a prefix LM generates decides what `HsaConfig(tying=None)` means for its layers.
    """
    saved = getattr(model.config, "architectures", None) or [type(model).__name__]
    return (
        ""
        if type(model).__name__ in saved
        else f"load it as {saved[0]}, the class that was saved, or "
    )


def warn_of_unused_parameters(model: PreTrainedModel, where: str) -> None:
    """Warn where a config holds parameters of a mechanism by name and runs another: early versions lost the name."""
    for config in tree(model.config):
        record = getattr(config, RECORD, None)
        if isinstance(record, dict) and recorded_hosts(config) is None:
            names = {
                n for m in read_record(record).mechanisms for n in get_mechanism(m.mechanism).names
            }
            if names and not names & {part._attn_implementation for part in tree(config)}:
                logger.warning(
                    f"config.hyperattn of {where} holds parameters of {min(names)!r}, and the model runs "
                    f"{config._attn_implementation!r}; load it with attn_implementation={min(names)!r}, or take "
                    "config.hyperattn out"
                )


def added_tensors(model: nn.Module) -> list[str]:
    """Names in the model's state dict of all that its patch, or its conversion in place, added."""
    return [
        f"{host_name}.{name}.{key}"
        for host_name, host in patched_hosts(model)
        for name, module in host.named_modules()
        if name == "hyper" or getattr(module, "added_by_conversion", False)
        for key in module.state_dict()
    ]


def tensors_of_hosts(model: nn.Module, names: Collection[str]) -> list[str]:
    """Those of `names` that are added tensors of this model's hosts, with or without the base model's prefix."""
    if not names:
        return []
    mechanism = "|".join(map(re.escape, MECHANISMS))
    # PEFT keeps copies of a layer under these names.
    copies = (
        r"(?:original_module\.|base_layer\.|modules_to_save\.[^.]+\.|lora_hyper\.(?:[^.]+\.)?)?"
    )
    added = re.compile(rf"(?:(.*)\.)?hyper\.{copies}(?:{mechanism})\..*")
    matches = [match for name in sorted(names) if (match := added.fullmatch(name))]
    if not matches:
        return []
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    hosts = {form for n, _ in find_hosts(model) for form in (n, prefix + n, n.removeprefix(prefix))}
    return [match.string for match in matches if (match[1] or "") in hosts]


def _is_loaded(model: PreTrainedModel, name: str, missing: set[str]) -> bool:
    """Whether a tensor came under another name: that of the tensor it is tied to, or of a module that is shared."""
    source = model.all_tied_weights_keys.get(name)
    if source is not None:
        return source not in missing
    return bool(getattr(model.get_parameter_or_buffer(name), "_is_hf_initialized", False))
