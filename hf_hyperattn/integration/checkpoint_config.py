"""What the configs of a patched model say, so that config.json brings it back: the record and two names.

`config.hyperattn` is the record: what was done, and to which hosts. `attn_implementation`, which Transformers reads on
the next load, is written from what runs (config_hooks.py); `config.hyperattn_stock` is the implementation that runs
beneath the mechanism: the one from before, unless another was set. The modules are the truth, and the
records are written from them: into the model's config, and into that of every part that has one of its own (the text
model of a vision-language model), so that a part can be saved, or loaded out of the whole, by itself.
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

from .hyper import Hyper
from .stock import OURS, PATCHED, RUNNING, STOCK, marked, stock_name

RECORD = "hyperattn"
#: Where a config keeps the name that it runs.
INTERNAL = "_attn_implementation_internal"
#: Whether a model is being built or loaded: what its loader asks for is checked then, and resolved by `resolve_stock`.
LOADING: ContextVar[bool] = ContextVar("hyperattn_loading", default=False)

#: Every model, by which a config finds those that run on it: those whose config is that very object, and no others. It
#: holds nothing of their calls.
MODELS: Any = WeakSet()


def running_on(config: Any) -> list[PreTrainedModel]:
    """The models with this very config, the outermost first."""
    models = [
        reference() for reference in tuple(MODELS.data)
    ]  # at once: other threads may build models
    on_it = [
        model for model in models if model is not None and getattr(model, "config", None) is config
    ]
    return sorted(on_it, key=lambda model: -len(list(model.modules())))


def patched_hosts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of every host that has a `hyper`."""
    hosts = []
    for name, module in model.named_modules():
        hyper = module._modules.get("hyper")
        if isinstance(getattr(hyper, "original_module", hyper), Hyper):
            hosts.append((name, module))
    return iter(hosts)


def inner(module: Any) -> Any:
    """The `Hyper` inside PEFT's wrapper, where there is one."""
    return getattr(module, "original_module", module)


def recorded_hosts(config: Any) -> list[str] | None:
    """The hosts that the config's record lists; None where it lists none (or holds parameters used by name)."""
    record = getattr(config, RECORD, None)
    return record.get("hosts") if isinstance(record, dict) else None


def is_recorded(config: Any) -> bool:
    """Whether a config, or one below it, says of hosts that they are patched."""
    return any(recorded_hosts(part) is not None for part in tree(config))


def write_records(model: PreTrainedModel) -> None:
    """Write the configs of a model and of its parts from what is patched now.

    Raises:
        ValueError: hosts that share a config are patched in different ways, which one record cannot say.
    """
    hosts = dict(patched_hosts(model))
    if not hosts:
        return erase_records(all_configs(model))
    configs = {id(host.config): host.config for host in hosts.values()}
    if not configs.keys() <= set(map(id, tree(model.config))):
        configs[id(model.config)] = (
            model.config
        )  # T5's encoder and decoder run on copies, made anew at every load
    for config in configs.values():
        _mark_patched(config)
    recorded: set[int] = set()
    for part in parts(model):
        recorded |= _write_record(part)
    missing = [name for name, host in hosts.items() if id(host) not in recorded]
    if missing:
        raise ValueError(
            f"{missing[0]} is patched otherwise than other parts of {type(model).__name__} that share its config, "
            "which config.json cannot say; patch the whole model with one call"
        )


def _write_record(part: PreTrainedModel) -> set[int]:
    """The record of one part; returns the ids of the hosts that it speaks of."""
    hosts = dict(patched_hosts(part))
    hypers = map(attrgetter("hyper"), hosts.values())
    record = make_record(
        {name: getattr(hyper, "original_module", hyper) for name, hyper in zip(hosts, hypers)}
    )
    if record is None:
        if recorded_hosts(part.config) is not None:
            delattr(part.config, "hyperattn")
        return set()
    part.config.hyperattn = record
    return set(map(id, hosts.values()))


def make_record(hypers: dict[str, Hyper]) -> dict | None:
    """The record of what hosts, by their names, are patched with; None for none, or where it cannot be said."""
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
    """For a while the model has a copy of its config that says nothing of patches."""
    config = model.config
    model.config = copy.deepcopy(config)
    try:
        erase_records(tree(model.config))
        yield
    finally:
        model.config = config


def erase_records(configs: Iterable[PreTrainedConfig]) -> None:
    """Take out of these configs what `write_records` put there."""
    for config in configs:
        if config.__dict__.get(INTERNAL) == RUNNING and STOCK in config.__dict__:
            setattr(config, INTERNAL, name_before(config))
        if recorded_hosts(config) is not None:
            delattr(config, "hyperattn")
        config.__dict__.pop(STOCK, None)


def name_before(config: PreTrainedConfig) -> str | None:
    """The implementation from before the patch; None where the config had none."""
    return None if config.__dict__.get(STOCK, "") is None else stock_name(config)


def _mark_patched(config: PreTrainedConfig) -> None:
    """Set our implementation and note the one from before; on a reload the note is there already."""
    if not marked(config):
        setattr(config, STOCK, config._attn_implementation)
        setattr(config, INTERNAL, RUNNING)


def saved_name(config: PreTrainedConfig) -> str | dict | None:
    """What `attn_implementation` must say in config.json for the next load to run the names of ours that run now."""
    name: str | None = config._attn_implementation
    name = (
        PATCHED if STOCK in config.__dict__ or name == RUNNING else name if name in OURS else None
    )
    if not getattr(config, "sub_configs", None):
        return name
    below = {key: saved_name(part) for key, part in sub_configs(config)}
    if all(other == name for other in below.values()):
        return name
    return {key: name for key, name in {"": name, **below}.items() if name}


def check_keys(config: Any, implementation: dict) -> None:
    """Raise if a dict gives a name of ours to a part that a config does not have, which Transformers would ignore.

    Args:
        implementation: As for `attn_implementation=`: a name for every key of a part, "" for the config itself.
    """
    keys = ["", *getattr(config, "sub_configs", ())]
    for key, name in implementation.items():
        if key not in keys and OURS.intersection(names_in(name)):
            raise ValueError(
                f"attn_implementation names the part {key!r}, which {type(config).__name__} does not have; allowed "
                f"keys: {', '.join(map(repr, keys))}"
            )


def names_in(implementation: Any) -> set[str]:
    """Return all names in a value of `attn_implementation=`, which may be a dict of dicts."""
    if isinstance(implementation, dict):
        return set().union(*map(names_in, implementation.values()))
    return {str(implementation)}


def sub_configs(config: Any) -> list[tuple[str, PreTrainedConfig]]:
    """The configs that Transformers passes an implementation on to, by their keys."""
    parts = []
    for key in getattr(config, "sub_configs", ()):
        if (part := getattr(config, key, None)) is not None:
            parts.append((key, part))
    return parts


def tree(config: Any) -> list[PreTrainedConfig]:
    """A config and all configs below it."""
    configs = [config]
    for part in configs:  # it grows
        for key in getattr(part, "sub_configs", ()):
            if (below := getattr(part, key, None)) is not None:
                configs.append(below)
    return configs


def all_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config that a part of the model, or a module in it, runs on, and those below them."""
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and id(config) not in configs:
            configs |= {id(part): part for part in tree(config)}
    return list(configs.values())


def parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model and every model inside it that has a config of its own, the outermost of each first."""
    models: dict[int, PreTrainedModel] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            models.setdefault(id(module.config), module)
    return list(models.values())


def inner_models_of(wrapper: nn.Module) -> str:
    """Advice that names the Transformers models inside a module that is none; "" where there are none."""
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
    """How many ranks share the heads of a model, or will when it is loaded; 1 where none do."""
    ranks = getattr(getattr(model.config, "distributed_config", None), "tp_size", None)
    return ranks or getattr(model, "_tp_size", None) or 1
