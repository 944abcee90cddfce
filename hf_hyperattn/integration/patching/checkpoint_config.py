"""The record of a patch in the configs of a model, which config.json stores and a reload reads.

Three keys belong to it:

- `config.hyperattn` is the record: the mechanisms, and the attention layers that have them.
- `attn_implementation` is the name that the next load runs. Transformers reads it; config_hooks.py
  writes it.
- `config.hyperattn_stock` is the base implementation, which runs below the mechanisms.

The modules are the truth, and the records are written from them. Every part with a config of its
own (the text model of a vision-language model) gets a record, so that it can be saved and loaded by
itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import Any
from weakref import WeakSet

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..attention.hyper import Hyper, patched_hosts
from ..attention.stock import OURS, PATCHED, RUNNING, STOCK, marked, stock_name

RECORD = "hyperattn"
#: Attribute in which Transformers' configs keep the name of the running implementation.
INTERNAL = "_attn_implementation_internal"
#: Whether a model is being built or loaded. `resolve_stock` then checks the implementation that the
#: loader asked for.
LOADING: ContextVar[bool] = ContextVar("hyperattn_loading", default=False)
#: Arguments of loaders that select files on the Hub.
WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")

#: Every living model. `running_on` finds here the models that run on a config object, when a user
#: sets its name.
MODELS: Any = WeakSet()


def running_on(config: Any) -> list[PreTrainedModel]:
    """Return the models whose config is this very object, the outermost first."""
    # Copy first: other threads may build models, and change the set, during the loop.
    models = [reference() for reference in tuple(MODELS.data)]
    on_it = [
        model for model in models if model is not None and getattr(model, "config", None) is config
    ]
    return sorted(on_it, key=lambda model: -len(list(model.modules())))


def recorded_hosts(config: Any) -> list[str] | None:
    """Return the attention layers that the config's record lists, or None if it has no list.

    A record without a list holds parameters of a mechanism that runs by name.
    """
    record = getattr(config, RECORD, None)
    return record.get("hosts") if isinstance(record, dict) else None


def is_recorded(config: Any) -> bool:
    """Return whether a config, or one below it, records patched attention layers."""
    return any(recorded_hosts(part) is not None for part in list_configs(config))


def write_records(model: PreTrainedModel) -> None:
    """Write what is patched now into the configs of a model and of its parts.

    Raises:
        ValueError: Attention layers that share a config are patched differently, which one record
            cannot express.
    """
    hosts = dict(patched_hosts(model))
    if not hosts:
        return erase_records(all_configs(model))
    configs = {id(host.config): host.config for host in hosts.values()}
    if not configs.keys() <= set(map(id, list_configs(model.config))):
        # T5's encoder and decoder run on copies of the config, which every load makes again.
        configs[id(model.config)] = model.config
    for config in configs.values():
        _mark_patched(config)
    # A part writes no record if its layers differ. Another part must then have recorded each of
    # them.
    recorded: set[int] = set()
    for part in list_models(model):
        recorded |= _write_record(part)
    missing = [name for name, host in hosts.items() if id(host) not in recorded]
    if missing:
        raise ValueError(
            f"{missing[0]} is patched otherwise than other parts of {type(model).__name__} that share its config, "
            "which config.json cannot say; patch the whole model with one call"
        )


def _write_record(part: PreTrainedModel) -> set[int]:
    """Write the record of one part, and return the ids of its recorded attention layers."""
    hosts = dict(patched_hosts(part))
    # As `unwrap_hyper` does, but without a function call for every layer on every load.
    hypers = {
        name: getattr(host.hyper, "original_module", host.hyper) for name, host in hosts.items()
    }
    record = make_record(hypers)
    if record is None:
        if recorded_hosts(part.config) is not None:
            delattr(part.config, "hyperattn")
        return set()
    part.config.hyperattn = record
    return set(map(id, hosts.values()))


def make_record(hypers: dict[str, Hyper]) -> dict | None:
    """Return the record of patched attention layers; None if no record can express it.

    Args:
        hypers: The `Hyper` of every patched layer, by the layer's name. {} gives None.
    """
    configs = list(map(attrgetter("config"), hypers.values()))
    if not configs or configs.count(configs[0]) < len(configs):
        return None
    overrides = {}
    for name, hyper in hypers.items():
        if hyper.overrides:
            overrides[name] = [mechanism.to_dict() for mechanism in hyper.overrides]
    record = configs[0].to_dict() | {"hosts": list(hypers)}
    return record | ({"overrides": overrides} if overrides else {})


@contextmanager
def without_records(model: PreTrainedModel) -> Iterator[None]:
    """Give the model a copy of its config without records, for the duration of a block."""
    # The model goes on to run: only the copy loses its records.
    config = model.config
    model.config = copy.deepcopy(config)
    try:
        erase_records(list_configs(model.config))
        yield
    finally:
        model.config = config


def erase_records(configs: Iterable[PreTrainedConfig]) -> None:
    """Remove from these configs what `write_records` wrote."""
    for config in configs:
        if config.__dict__.get(INTERNAL) == RUNNING and STOCK in config.__dict__:
            setattr(config, INTERNAL, name_before(config))
        if recorded_hosts(config) is not None:
            delattr(config, "hyperattn")
        config.__dict__.pop(STOCK, None)


def name_before(config: PreTrainedConfig) -> str | None:
    """Return the implementation from before the patch; None if the config had none."""
    return None if config.__dict__.get(STOCK, "") is None else stock_name(config)


def _mark_patched(config: PreTrainedConfig) -> None:
    """Set our implementation in a config, and note the previous one.

    On a reload the note is already there.
    """
    if not marked(config):
        setattr(config, STOCK, config._attn_implementation)
        setattr(config, INTERNAL, RUNNING)


def saved_name(config: PreTrainedConfig) -> str | dict | None:
    """Return the `attn_implementation` for config.json; None if no name of ours runs.

    The next load then runs the same names. If parts of a model run different names, it is a dict.
    """
    running: str | None = config._attn_implementation
    name: str | None = None
    if STOCK in config.__dict__ or running == RUNNING:
        # `RUNNING` may be the private name of an exported copy. On disk the public name stands for
        # it.
        name = PATCHED
    elif running in OURS:
        name = running
    if not getattr(config, "sub_configs", None):
        return name
    below = {key: saved_name(part) for key, part in sub_configs(config)}
    if all(other == name for other in below.values()):
        return name
    return {key: name for key, name in {"": name, **below}.items() if name}


def check_keys(config: Any, implementation: dict) -> None:
    """Raise if a dict gives a name of ours to a part that the config does not have.

    Transformers would ignore such a key.

    Args:
        implementation: As for `attn_implementation=`: a name by key of a part, "" for the config
            itself.
    """
    keys = ["", *getattr(config, "sub_configs", ())]
    for key, name in implementation.items():
        if key not in keys and OURS.intersection(names_in(name)):
            raise ValueError(
                f"attn_implementation names the part {key!r}, which {type(config).__name__} does not have; allowed "
                f"keys: {', '.join(map(repr, keys))}"
            )


def names_in(implementation: Any) -> set[str]:
    """Return all names in a value of `attn_implementation=`, which may be a nested dict."""
    if isinstance(implementation, dict):
        return set().union(*map(names_in, implementation.values()))
    return {str(implementation)}


def sub_configs(config: Any) -> list[tuple[str, PreTrainedConfig]]:
    """Return the configs that inherit an implementation in Transformers, with their keys."""
    parts = []
    for key in getattr(config, "sub_configs", ()):
        if (part := getattr(config, key, None)) is not None:
            parts.append((key, part))
    return parts


def list_configs(config: Any) -> list[PreTrainedConfig]:
    """Return a config and all configs below it."""
    configs = [config]
    # The list grows during the loop, which so reaches all levels.
    for part in configs:
        for key in getattr(part, "sub_configs", ()):
            if (below := getattr(part, key, None)) is not None:
                configs.append(below)
    return configs


def all_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Return every config that a module of the model uses, and all configs below them."""
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and id(config) not in configs:
            configs |= {id(part): part for part in list_configs(config)}
    return list(configs.values())


def list_models(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the model and every model inside it with a config of its own.

    Of several models on one config, the outermost is returned.
    """
    models: dict[int, PreTrainedModel] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            models.setdefault(id(module.config), module)
    return list(models.values())


def inner_models_of(wrapper: nn.Module) -> str:
    """Return advice that names the Transformers models inside another module, or ""."""
    inside: list[tuple[str, str]] = []
    for name, module in wrapper.named_modules():
        within_one = any(name.startswith(f"{outer}.") for outer, _ in inside)
        if isinstance(module, PreTrainedModel) and not within_one:
            inside.append((name, f"{type(module).__name__} as {name!r}"))
    if not inside:
        return ""
    places = " and ".join(place for _, place in inside[:2])
    return f"it holds {places}, so pass that instead: model.get_submodule({inside[0][0]!r})"


def ranks_of(model: PreTrainedModel) -> int:
    """Return the number of ranks that share the heads of a model, now or once it is loaded."""
    ranks = getattr(getattr(model.config, "distributed_config", None), "tp_size", None)
    return ranks or getattr(model, "_tp_size", None) or 1
