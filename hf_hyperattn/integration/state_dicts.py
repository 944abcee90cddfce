"""Weights that go into a model that is there already, by whichever library: what they pass over is told.

torch tells what a state dict lacked only to who reads the result of `load_state_dict`, Accelerate and the Trainer load
a checkpoint file by file, and a name that a model ran under has no tensor at all. Wrapped, once, at import:

- `state_dict`: notes which attention of ours the model runs, where torch keeps its own metadata;
- `load_state_dict`, also PEFT's, Accelerate's `load_checkpoint_in_model`, and what the Trainer resumes by: warn where
  added tensors, or a name that the checkpoint ran under, are passed over.
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

from ..config import HyperAttnConfig
from .adapter_config import base_difference, describe_adapters, describe_base, normalize_record
from .checkpoint_config import LOADING, RECORD, patched_hosts
from .record_check import FRESH, added_tensors, tensors_of_hosts
from .stock import OURS
from .wrapping import wrap

logger = logging.getLogger("hf_hyperattn")

#: Names of the tensors that were read so far, while a checkpoint of several files is loaded file by file.
READ: ContextVar[set[str] | None] = ContextVar("hyperattn_tensors_read", default=None)
#: Arguments of loaders that say which files of the Hub are meant.
WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
#: In the metadata that torch keeps with a state dict: which attention of ours its model ran.
NOTED = "hf_hyperattn"


@wrap("state_dict")
def _state_dict(original, self, *args, **kwargs):
    result = original(self, *args, **kwargs)
    description = None if LOADING.get() else describe_base(self)
    prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
    adapters = {} if LOADING.get() else describe_adapters(self)
    if (adapters or description is not None) and hasattr(
        result, "_metadata"
    ):  # a name has no tensor to tell of it
        noted = {
            **copy.deepcopy(description or {}),
            "adapters": {n: c.to_dict() for n, c in adapters.items()},
        }
        result._metadata.setdefault(prefix[:-1], {})[NOTED] = noted
    return result


@wrap("load_state_dict", PeftModel)
@wrap("load_state_dict")
def _load_state_dict(original, self, state_dict, *args, **kwargs):
    result, read = original(self, state_dict, *args, **kwargs), READ.get()
    if read is not None:
        read.update(state_dict)
    elif not warn_of_state_dict(self, result.missing_keys, result.unexpected_keys):
        warn_of_noted(self, state_dict)
    return result


@wrap("load_state_dict", accelerate.utils.modeling)
def _read_file(original, checkpoint_file, *args, **kwargs):
    tensors, read = original(checkpoint_file, *args, **kwargs), READ.get()
    if read is not None:
        read.update(tensors)
    return tensors


def _load_files(original, model, checkpoint, *args, **kwargs):
    with checked_as_one(model, checkpoint):
        return original(model, checkpoint, *args, **kwargs)


def _load_shards(original, model, folder, *args, **kwargs):
    with checked_as_one(model, folder):
        return original(model, folder, *args, **kwargs)


for _module in (accelerate, accelerate.utils, accelerate.utils.modeling, accelerate.big_modeling):
    wrap("load_checkpoint_in_model", _module)(_load_files)


class TrainerImport(MetaPathFinder):
    """Wraps the Trainer's resuming when its module is imported, which takes a second and is therefore not done here."""

    MODULE = "transformers.trainer"

    def find_spec(self, name, path=None, target=None):
        if name != self.MODULE:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            wrap_trainer(module)

        spec.loader.exec_module = exec_module
        return spec


def wrap_trainer(module: Any) -> None:
    """Let what the Trainer resumes from, and its shards, be compared with the model as a whole."""

    @wrap("_load_from_checkpoint", module.Trainer)
    def _resume(original, self, resume_from_checkpoint, model=None):
        with checked_as_one(self.model if model is None else model, resume_from_checkpoint):
            return original(self, resume_from_checkpoint, model)

    wrap("load_sharded_checkpoint", module)(_load_shards)


if TrainerImport.MODULE in sys.modules:
    wrap_trainer(sys.modules[TrainerImport.MODULE])
else:
    sys.meta_path.insert(0, TrainerImport())


@contextmanager
def checked_as_one(model: nn.Module, source: str | os.PathLike) -> Iterator[None]:
    """While files of a checkpoint are loaded one by one into a model that is there already; one check at the end.

    Args:
        source: the checkpoint's folder, or a file in it; the config.json there is compared with the model too.
    """
    if READ.get() is not None:  # inside another such load
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
    """Warn where a load that is not strict passed over added tensors: torch tells only who reads its result.

    A layer that lacks other tensors too is left alone: an adapter was loaded, or a part of a model.

    Args:
        missing, unexpected: the result.
        what: what was loaded, for the message.

    Returns:
        Whether there was something to warn of.
    """
    added, name = set(added_tensors(model)), type(model).__name__
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
        saved = {key: config.get(key) for key in ("attn_implementation", RECORD, "model_type")}
        warn_of_saved(
            model, saved, f"the model saved in {folder}", "load that one with from_pretrained"
        )


def warn_of_noted(model: nn.Module, state_dict: dict | None) -> None:
    """Warn where a state dict's model ran another attention of ours than the model that took the tensors."""
    metadata = getattr(state_dict, "_metadata", {})
    saved = next(
        (facts[NOTED] for facts in metadata.values() if NOTED in facts), None
    )  # the outermost model's
    if saved is None:
        return
    warn_of_saved(model, saved, "the model of this state dict", "patch it as that one was")
    base: Any = model
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    there, prefix = saved.get("adapters", {}), getattr(base, "base_model_prefix", "")
    for name, config in describe_adapters(base).items():
        if name in there and normalize_record(
            HyperAttnConfig.from_dict(there[name]), prefix
        ) != normalize_record(config, prefix):
            logger.warning(
                f"adapter {name!r} of {type(base).__name__} took the parameters of one with another patch: it computes "
                "something else; make it with the HyperLoraConfig that the state dict's model has"
            )


def warn_of_saved(model: nn.Module, saved: dict, what: str, remedy: str) -> None:
    """Warn where a model took the weights of another one, of the same type, that ran another attention of ours.

    Args:
        saved: what `describe_base` said of the other.
        what, remedy: as `base_difference` has them.
    """
    base: Any = model
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    if FRESH.get() or not isinstance(base, PreTrainedModel) or not saved.get("attn_implementation"):
        return
    if saved.get("model_type") in (None, base.config.model_type):
        difference = base_difference(base, {**saved, "model_type": None}, what, remedy)
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
    tied = {
        plain_name(n): plain_name(s) for n, s in getattr(model, "all_tied_weights_keys", {}).items()
    }
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
