"""One check, at every load: the record in the config and the added tensors of the checkpoint belong together.

A checkpoint that lost one of the two would load as another model than was saved. So a record without its tensors,
tensors without their record, and tensors of another shape are errors, except inside `fresh_patch()`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..config import HyperAttnConfig
from ..registry import MECHANISMS, get_mechanism
from .adapter_saving import base_difference
from .hosts import find_hosts
from .records import RECORD, patched_hosts, recorded_hosts, tree
from .stock import OURS, STOCK

logger = logging.getLogger("hf_hyperattn")

FRESH: ContextVar[bool] = ContextVar("hyperattn_fresh_patch", default=False)
#: Names of the tensors that were read so far, while a checkpoint of several files is loaded file by file.
READ: ContextVar[set[str] | None] = ContextVar("hyperattn_tensors_read", default=None)
#: In the metadata that torch keeps with a state dict: which attention of ours its model ran.
NOTED = "hf_hyperattn"
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
    """Compare a model's record with the tensors that were loaded into it.

    Args:
        model: a model that was built from its config, with a `hyper` in every recorded host.
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
        mechanisms = sorted(
            {name for _, host in patched_hosts(model) for name, _ in host.hyper.named_children()}
        )
        raise ValueError(
            f"{where} lacks {len(missing)} of the {len(added)} added tensors that its record (config.hyperattn: "
            f"{', '.join(mechanisms)}) asks for, such as {missing[0]!r}; export or merge it again with all tensors, "
            f"{WAY_OUT} start them at their initial values"
        )
    for name, found, expected in sorted(loading_info.mismatched_keys):
        if name in added:
            raise ValueError(
                f"{where} holds {name!r} with shape {tuple(found)}, and its config asks for {tuple(expected)}; use the "
                f"config that it was saved with, {WAY_OUT} start it anew (ignore_mismatched_sizes=True)"
            )
    strange = tensors_of_hosts(model, loading_info.unexpected_keys)
    if strange:
        raise ValueError(
            f"{where} holds {len(strange)} added tensors, such as {strange[0]!r}, that no record in its config "
            "(config.hyperattn) asks for; put back the keys hyperattn, hyperattn_stock and attn_implementation of the "
            f"config.json that it was saved with, {WAY_OUT} leave them out"
        )
    configs = list(tree(model.config))
    marked = any(STOCK in config.__dict__ for config in configs)
    if marked and not added and all(recorded_hosts(config) is None for config in configs):
        if next(patched_hosts(model), None) is None:
            raise ValueError(
                f"the config of {where} says that it was patched (hyperattn_stock) and has no record of how "
                "(config.hyperattn); put back the key hyperattn of the config.json that it was saved with, or take "
                "hyperattn_stock and attn_implementation out to load the model without the patch"
            )


def warn_of_unused_parameters(model: PreTrainedModel, where: str) -> None:
    """Warn where a config holds parameters of a mechanism by name and runs another: early versions lost the name."""
    for config in tree(model.config):
        record = getattr(config, RECORD, None)
        if isinstance(record, dict) and recorded_hosts(config) is None:
            names = {
                n
                for m in HyperAttnConfig.from_dict(record).mechanisms
                for n in get_mechanism(m.mechanism).names
            }
            if names and not names & {part._attn_implementation for part in tree(config)}:
                logger.warning(
                    f"config.hyperattn of {where} holds parameters of {min(names)!r}, and the model runs "
                    f"{config._attn_implementation!r}; load it with attn_implementation={min(names)!r}, or take "
                    "config.hyperattn out"
                )


@contextmanager
def checked_as_one(model: nn.Module, source: str | os.PathLike) -> Iterator[None]:
    """While files of a checkpoint are loaded one by one into a model that is there already; one check at the end.

    Args:
        source: the checkpoint's folder, or a file in it; the config.json there is compared with the model too.
    """
    if READ.get() is not None:  # inside another such load
        yield
        return
    token = READ.set(set())
    try:
        yield
        read = READ.get()
    finally:
        READ.reset(token)
    there = set(model.state_dict())
    if not warn_of_state_dict(model, there - read, read - there, f"the checkpoint {source}"):
        warn_of_config(model, source)


def warn_of_state_dict(
    model: nn.Module,
    missing: Iterable[str],
    unexpected: Iterable[str],
    what: str = "load_state_dict(strict=False): the state dict",
) -> bool:
    """Warn where a load that is not strict passed over added tensors: torch tells only who reads its result.

    A layer that lacks other tensors too is left alone: an adapter was loaded, or a part of a model.

    Args:
        missing, unexpected: the result.
        what: what was loaded, for the message.

    Returns:
        Whether there was something to warn of.
    """
    added, missing, name = set(added_tensors(model)), set(missing), type(model).__name__
    hosts = [f"{host}." for host, _ in patched_hosts(model)]
    others = [key for key in missing - added if key.startswith(tuple(hosts))]
    whole = tuple(host for host in hosts if not any(key.startswith(host) for key in others))
    lost = sorted(key for key in added & missing if key.startswith(whole))
    if lost:
        logger.warning(
            f"{what} lacks {len(lost)} added tensors of the patched {name}, such as {lost[0]!r}; they stay as they are"
        )
    strange = tensors_of_hosts(model, unexpected)
    if strange:
        logger.warning(
            f"{what} holds {len(strange)} added tensors, such as {strange[0]!r}, that have no place in this {name} and "
            "are left out; patch it first as their model was"
        )
    return bool(lost or strange)


def warn_of_config(model: nn.Module, source: str | os.PathLike, **hub) -> None:
    """Warn where the config.json of a checkpoint says another attention of ours than the model that took its weights.

    Args:
        source: folder, file in it, or Hub id.
        hub: where on the Hub, as `PreTrainedConfig.get_config_dict` has it.
    """
    folder = os.path.dirname(source) or "." if os.path.isfile(source) else source
    try:
        config, _ = PreTrainedConfig.get_config_dict(folder, **hub)
    except (OSError, ValueError):  # none there; or damaged, which is for those to say who load it
        return
    name = json.dumps(config.get("attn_implementation"))
    if any(json.dumps(known) in name for known in OURS):
        kept = ("attn_implementation", RECORD, "model_type")
        saved = {key: config.get(key) for key in kept}
        warn_of_saved(model, saved, f"the model saved in {folder}", "load that one with from_pretrained")


def warn_of_noted(model: nn.Module, state_dict: dict | None) -> None:
    """Warn where a state dict's model ran another attention of ours than the model that took the tensors."""
    saved = getattr(state_dict, "_metadata", {}).get("", {}).get(NOTED)
    if saved is not None:
        warn_of_saved(model, saved, "the model of this state dict", "patch it as that one was")


def warn_of_saved(model: nn.Module, saved: dict, what: str, remedy: str) -> None:
    """Warn where a model took the weights of another one, of the same type, that ran another attention of ours.

    Args:
        saved: what `describe_base` said of the other.
        what, remedy: as `base_difference` has them.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if FRESH.get() or not isinstance(model, PreTrainedModel) or not saved.get("attn_implementation"):
        return
    if saved.get("model_type") in (None, model.config.model_type):
        difference = base_difference(model, {**saved, "model_type": None}, what, remedy)
        if difference:
            logger.warning(difference)


def check_saved_state_dict(model: PreTrainedModel, state_dict: dict | None) -> None:
    """Check the tensors that a caller gives to `save_pretrained`; an empty dict means that no weights are written.

    Raises:
        ValueError: no load would take the checkpoint, as added tensors are missing, or there are some without a record.
    """
    if not state_dict:
        return
    names = {plain_name(name) for name in state_dict}
    added = {plain_name(name) for name in added_tensors(model)}
    tied = {plain_name(n): plain_name(s) for n, s in getattr(model, "all_tied_weights_keys", {}).items()}
    missing = sorted(name for name in added - names if tied.get(name) not in names)
    strange = tensors_of_hosts(model, names - added)
    if missing or strange:
        fault = f"lacks {missing[0]!r}" if missing else f"holds {strange[0]!r}"
        raise ValueError(
            f"save_pretrained(state_dict=...) got a state dict that {fault}, unlike {type(model).__name__} as it is "
            f"patched now ({len(missing or strange)} such tensors): no load would take the checkpoint; pass all of "
            "model.state_dict(), or save a model that is patched as the state dict's was"
        )


def plain_name(name: str) -> str:
    """The name of a tensor without the parts that wrappers put into it."""
    return re.sub(
        r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|original_module)\.", "", name
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


def tensors_of_hosts(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of `names` that are added tensors of this model's hosts, with or without the base model's prefix."""
    mechanism = "|".join(map(re.escape, MECHANISMS))
    copies = r"(?:original_module\.|modules_to_save\.[^.]+\.)?"  # as PEFT has them
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
