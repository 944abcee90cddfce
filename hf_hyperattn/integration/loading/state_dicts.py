"""Warn if weights that are loaded into an existing model leave out a patch.

torch reports missing tensors only in the result of `load_state_dict`. Accelerate and the Trainer
load a checkpoint file by file. A model that ran a mechanism by name has no added tensor at all.
Wrapped once, on import:

- `state_dict`: records which attention of ours the model runs, in torch's own metadata;
- `load_state_dict` (also PEFT's), Accelerate's `load_checkpoint_in_model`, and the Trainer's
  functions for resuming: warn if added tensors, or the name that the checkpoint ran under, are
  lost.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from typing import Any

import accelerate
import accelerate.big_modeling
import accelerate.utils.modeling
from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...config import HyperAttnConfig
from ..adapters.adapter_config import (
    base_difference,
    describe_adapters,
    describe_base,
    normalize_record,
)
from ..attention.hyper import patched_hosts
from ..attention.stock import OURS
from ..patching.checkpoint_config import LOADING, RECORD
from ..patching.wrapping import wrap
from .record_check import FRESH, added_tensors, tensors_of_hosts

logger = logging.getLogger("hf_hyperattn")

#: Names of the tensors read so far, while a checkpoint is loaded file by file. None otherwise.
READ: ContextVar[set[str] | None] = ContextVar("hyperattn_tensors_read", default=None)
#: Key in torch's metadata of a state dict: the attention of ours that its model ran.
NOTED = "hf_hyperattn"


# Missing upstream: a hook for the state dict of every model. torch has hooks for single instances.
@wrap("state_dict")
def _state_dict(original, self, *args, **kwargs):
    """Note in the metadata which attention of ours the model runs."""
    result = original(self, *args, **kwargs)
    description = None if LOADING.get() else describe_base(self)
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    adapters = {} if LOADING.get() else describe_adapters(self)
    # A mechanism used by name has no tensor, so only this note tells of it.
    if (adapters or description is not None) and hasattr(result, "_metadata"):
        noted = {
            **copy.deepcopy(description or {}),
            "adapters": {name: config.to_dict() for name, config in adapters.items()},
        }
        result._metadata.setdefault(prefix[:-1], {})[NOTED] = noted
    return result


# Missing upstream: a callback with the result of a load that is not strict, for all models.
@wrap("load_state_dict", PeftModel)
@wrap("load_state_dict")
def _load_state_dict(original, self, state_dict, *args, **kwargs):
    """Warn of added tensors that the load left out."""
    result = original(self, state_dict, *args, **kwargs)
    read = READ.get()
    # One of several files: `checked_as_one` compares them together at the end.
    if read is not None:
        read.update(state_dict)
    elif not warn_of_state_dict(self, result.missing_keys, result.unexpected_keys):
        warn_of_noted(self, state_dict)
    return result


# Missing upstream in Accelerate: a report of the tensors that a load took from its files.
@wrap("load_state_dict", accelerate.utils.modeling)
def _read_file(original, checkpoint_file, *args, **kwargs):
    """Note the tensors of one file."""
    tensors = original(checkpoint_file, *args, **kwargs)
    read = READ.get()
    if read is not None:
        read.update(tensors)
    return tensors


def _load_files(original, model, checkpoint, *args, **kwargs):
    with checked_as_one(model, checkpoint):
        return original(model, checkpoint, *args, **kwargs)


def _load_shards(original, model, folder, *args, **kwargs):
    with checked_as_one(model, folder):
        return original(model, folder, *args, **kwargs)


# Missing upstream in Accelerate: callbacks before and after a load of several files.
# Accelerate binds the function in each of these modules, and callers import it from any of them.
for _module in (accelerate, accelerate.utils, accelerate.utils.modeling, accelerate.big_modeling):
    wrap("load_checkpoint_in_model", _module)(_load_files)


# Missing upstream: a callback of the Trainer before it resumes. `on_train_begin` comes after it.
class TrainerImport(MetaPathFinder):
    """Wrap the Trainer's functions for resuming when its module is imported.

    Importing it takes a second, so this module does not do it.
    """

    MODULE = "transformers.trainer"

    def find_spec(self, name, path=None, target=None):
        if name != self.MODULE:
            return None
        # Before the search below, which would ask this finder again.
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            wrap_trainer(module)

        spec.loader.exec_module = exec_module
        return spec


def wrap_trainer(module: Any) -> None:
    """Check a checkpoint that the Trainer resumes from, all files together."""

    @wrap("_load_from_checkpoint", module.Trainer)
    def _resume_training(original, self, resume_from_checkpoint, model=None):
        with checked_as_one(self.model if model is None else model, resume_from_checkpoint):
            return original(self, resume_from_checkpoint, model)

    wrap("load_sharded_checkpoint", module)(_load_shards)


if TrainerImport.MODULE in sys.modules:
    wrap_trainer(sys.modules[TrainerImport.MODULE])
else:
    sys.meta_path.insert(0, TrainerImport())


@contextmanager
def checked_as_one(model: nn.Module, source: str | os.PathLike) -> Iterator[None]:
    """Check a checkpoint once, after all its files were loaded into an existing model.

    Args:
        model: The model.
        source: The checkpoint's folder, or a file in it. Its config.json is compared with the model
            too.
    """
    # Inside another such load, which checks at its own end.
    if READ.get() is not None:
        yield
        return
    read: set[str] = set()
    token = READ.set(read)
    try:
        yield
    finally:
        READ.reset(token)
    there = set(model.state_dict())
    if not warn_of_state_dict(model, there - read, read - there, f"the checkpoint {source}"):
        warn_of_config(model, source)


def warn_of_state_dict(
    model: nn.Module,
    missing: Collection[str],
    unexpected: Collection[str],
    what: str = "load_state_dict(strict=False): the state dict",
) -> bool:
    """Warn if a load that was not strict left out added tensors.

    Args:
        model: The model that the tensors were loaded into.
        missing: Names in the model that were not loaded.
        unexpected: Loaded names that the model does not have.
        what: Name of the load, for the message.

    Returns:
        Whether there was a warning.
    """
    added = set(added_tensors(model))
    name = type(model).__name__
    # A layer that also lacks other tensors is no mistake: an adapter, or a part of a model, was
    # loaded.
    hosts = [f"{host}." for host, _ in patched_hosts(model)]
    others = [key for key in set(missing) - added if key.startswith(tuple(hosts))]
    whole = tuple(host for host in hosts if not any(key.startswith(host) for key in others))
    lost = sorted(key for key in added & set(missing) if key.startswith(whole))
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
    """Warn if the config.json of a checkpoint records another attention.

    Args:
        model: The model that took the weights.
        source: Folder of the checkpoint, a file in it, or a Hub id.
        hub: Further arguments of `PreTrainedConfig.get_config_dict`.
    """
    folder = os.path.dirname(source) or "." if os.path.isfile(source) else source
    try:
        config, _ = PreTrainedConfig.get_config_dict(folder, **hub)
    except (OSError, ValueError):
        # There is none, or it is damaged. Whoever loads the config itself reports that.
        return
    name = json.dumps(config.get("attn_implementation"))
    if any(json.dumps(known) in name for known in OURS):
        saved = {key: config.get(key) for key in ("attn_implementation", RECORD, "model_type")}
        warn_of_saved(
            model, saved, f"the model saved in {folder}", "load that one with from_pretrained"
        )


def warn_of_noted(model: nn.Module, state_dict: dict | None) -> None:
    """Warn if a state dict came from a model with another attention of ours.

    Args:
        model: The model that took the tensors.
        state_dict: The state dict, with torch's metadata if that was kept. None if there is none.
    """
    metadata = getattr(state_dict, "_metadata", {})
    # The first note is the one of the outermost model.
    saved = next((facts[NOTED] for facts in metadata.values() if NOTED in facts), None)
    if saved is None:
        return
    warn_of_saved(model, saved, "the model of this state dict", "patch it as that one was")
    base: Any = model
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    there, prefix = saved.get("adapters", {}), getattr(base, "base_model_prefix", "")
    for name, config in describe_adapters(base).items():
        if name not in there:
            continue
        other = HyperAttnConfig.from_dict(there[name])
        if normalize_record(other, prefix) != normalize_record(config, prefix):
            logger.warning(
                f"adapter {name!r} of {type(base).__name__} took the parameters of one with another patch: it computes "
                "something else; make it with the HyperLoraConfig that the state dict's model has"
            )


def warn_of_saved(model: nn.Module, saved: dict, what: str, remedy: str) -> None:
    """Warn if weights came from a model that ran another attention of ours.

    Args:
        model: The model that took the weights.
        saved: The result of `describe_base` for the other model.
        what: The other model, for the message.
        remedy: Advice, for the message.
    """
    base: Any = model
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    if FRESH.get() or not isinstance(base, PreTrainedModel) or not saved.get("attn_implementation"):
        return
    # Weights of another type (a part of a composite model) were taken on purpose.
    if saved.get("model_type") in (None, base.config.model_type):
        difference = base_difference(base, {**saved, "model_type": None}, what, remedy)
        if difference:
            logger.warning(difference)


def check_saved_state_dict(model: PreTrainedModel, state_dict: dict | None) -> None:
    """Check the tensors that a caller passes to `save_pretrained`.

    Args:
        model: The model that is saved.
        state_dict: The tensors. None for the model's own.

    Raises:
        ValueError: Added tensors are missing, or have no record. No load would accept the
            checkpoint.
    """
    # An empty dict is a request to write no weights.
    if not state_dict:
        return
    names = {plain_name(name) for name in state_dict}
    added = {plain_name(name) for name in added_tensors(model)}
    # Of two tied tensors, one is enough.
    tied_names = getattr(model, "all_tied_weights_keys", {})
    tied = {plain_name(name): plain_name(source) for name, source in tied_names.items()}
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
    """Return the name of a tensor without the parts that wrappers add to it."""
    return re.sub(
        r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|original_module)\.", "", name
    )
