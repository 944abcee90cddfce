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
from dataclasses import replace

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .hyper import Hyper
from .stock import OURS, PATCHED, RUNNING, STOCK, marked, stock_name

RECORD = "hyperattn"


def patched_hosts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every host that has a `hyper`."""
    return ((n, m) for n, m in model.named_modules() if isinstance(inner(m._modules.get("hyper")), Hyper))


def inner(module: nn.Module | None) -> nn.Module | None:
    """The `Hyper` inside PEFT's wrapper, where there is one."""
    return getattr(module, "original_module", module)


def recorded_hosts(config) -> list[str] | None:
    """The hosts that the config's record lists; None where it lists none (or holds parameters used by name)."""
    record = getattr(config, RECORD, None)
    return record.get("hosts") if isinstance(record, dict) else None


def write_records(model: PreTrainedModel) -> None:
    """Write the configs of a model and of its parts from what is patched now.

    Raises:
        ValueError: hosts that share a config are patched in different ways, which one record cannot say.
    """
    hosts = dict(patched_hosts(model))
    if not hosts:
        return erase_records(model)
    own = {id(config) for config in tree(model.config)}
    for host in hosts.values():
        _mark(host.config)
    if any(id(host.config) not in own for host in hosts.values()):
        _mark(model.config)  # T5's encoder and decoder run on copies of it, made anew at every load
    said: set[int] = set()
    for part in parts(model):
        said |= _write(part)
    silent = [name for name, host in hosts.items() if id(host) not in said]
    if silent:
        raise ValueError(
            f"{silent[0]} is patched otherwise than other parts of {type(model).__name__} that share its config, "
            "which config.json cannot say; patch the whole model with one call"
        )


def _write(part: PreTrainedModel) -> set[int]:
    """The record of one part; returns the hosts that it speaks of."""
    hosts = dict(patched_hosts(part))
    done = [inner(host.hyper).config for host in hosts.values()]
    alike = bool(done) and all(config == done[0] for config in done)
    if alike:
        own = {name: configs for name, host in hosts.items() if (configs := inner(host.hyper).own)}
        part.config.hyperattn = replace(done[0], hosts=tuple(hosts), overrides=own).to_dict()
    elif recorded_hosts(part.config) is not None:
        del part.config.hyperattn
    return {id(host) for host in hosts.values()} if alike else set()


def erase_records(model: PreTrainedModel) -> None:
    """Take out of every config what `write_records` put there."""
    _erase(all_configs(model))


@contextmanager
def without_records(model: PreTrainedModel) -> Iterator[None]:
    """For a while the model has a copy of its config that says nothing of patches."""
    config = model.config
    model.config = copy.deepcopy(config)
    try:
        _erase(tree(model.config))
        yield
    finally:
        model.config = config


def _erase(configs: Iterable[PreTrainedConfig]) -> None:
    for config in configs:
        if config.__dict__.get("_attn_implementation_internal") == RUNNING and STOCK in config.__dict__:
            config._attn_implementation_internal = name_before(config)
        if recorded_hosts(config) is not None:
            del config.hyperattn
        config.__dict__.pop(STOCK, None)


def name_before(config) -> str | None:
    """The implementation from before the patch; None where the config had none."""
    return None if config.__dict__.get(STOCK, "") is None else stock_name(config)


def _mark(config) -> None:
    """Set our implementation and note the one from before; on a reload the note is there already."""
    if not marked(config):
        setattr(config, STOCK, config._attn_implementation)
        config._attn_implementation_internal = RUNNING


def saved_name(config) -> str | dict | None:
    """What `attn_implementation` must say in config.json for the next load to run the names of ours that run now."""
    name = config._attn_implementation
    name = PATCHED if marked(config) or name == RUNNING else name if name in OURS else None
    below = {key: saved_name(part) for key, part in sub_configs(config)}
    if all(other == name for other in below.values()):
        return name
    return {key: name for key, name in {"": name, **below}.items() if name}


def sub_configs(config) -> Iterator[tuple[str, object]]:
    """The configs that Transformers passes an implementation on to."""
    found = ((key, getattr(config, key, None)) for key in getattr(config, "sub_configs", ()))
    return ((key, part) for key, part in found if part is not None)


def tree(config) -> Iterator[object]:
    """A config and all configs below it."""
    yield config
    for _, part in sub_configs(config):
        yield from tree(part)


def all_configs(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config that a part of the model, or a module in it, runs on, and those below them."""
    lent = (getattr(module, "config", None) for module in model.modules())
    found = {id(c): c for top in lent if isinstance(top, PreTrainedConfig) for c in tree(top)}
    return list(found.values())


def parts(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model and every model inside it that has a config of its own, the outermost of each first."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module.config) not in seen:
            seen.add(id(module.config))
            yield module
