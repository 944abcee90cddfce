"""What a mechanism's own name runs ("cone", ...): the published operator, without anything to learn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ..config import MechanismConfig, read_record
from ..registry import get_mechanism, named_configs
from .attention import Layers, attention_function
from .hosts import is_cross_attention

logger: Any = logging.getLogger("hf_hyperattn")  # `warning_once` is Transformers'


class NamedMechanism:
    """What a mechanism's name runs: its layer in replace mode, without parameters.

    Args:
        default: its config where a model's config says nothing of the mechanism.

    Attributes:
        layers: for all modules that say nothing of it; None where they are not known yet, or differ.
    """

    def __init__(self, default: MechanismConfig):
        self.default = default
        self.number = number_of(default)
        self.layers: Layers | None = None

    def find_layers(self, module: nn.Module) -> Layers:
        """The layers for this module."""
        cross_attention = get_mechanism(self.default.mechanism).cross_attention
        if (
            not cross_attention
        ):  # whether it reads another sequence: its name in the model is not known here
            says_decoder = (
                getattr(module, "is_decoder", False) is True
                and getattr(module, "is_causal", True) is False
            )
            if says_decoder or is_cross_attention("", module):
                return build_named_layers(None)
        config = by_name_config(module, self.number).for_model(getattr(module, "config", None))
        layers = build_named_layers(config)
        if cross_attention and config is self.default and not torch.compiler.is_compiling():
            self.layers = layers
        return layers


def by_name_config(module: nn.Module, default: int) -> MechanismConfig:
    """The mechanism's parameters from `config.hyperattn`, where it names the mechanism; else the defaults.

    Args:
        default: where in `BY_NAME` these are. A number, since the compiler of torch 2.11 cannot pass configs on.
    """
    data = getattr(getattr(module, "config", None), "hyperattn", None)
    if data is None:
        return BY_NAME[default]
    if not isinstance(data, dict):
        raise ValueError(
            f"config.hyperattn is a {type(data).__name__}; allowed: a dict, as HyperAttnConfig([...]).to_dict() is"
        )
    return BY_NAME[
        find_number(as_constants(data) if torch.compiler.is_compiling() else data, default)
    ]


def as_constants(data):
    """A copy of JSON data whose numbers the compiler takes as they are, where it would make variables of them.

    It does so with a float that differs from that of an earlier call or model; what stands in a set is a constant.
    """
    if isinstance(data, dict):
        return {key: as_constants(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [as_constants(value) for value in data]
    return next(iter({data}))


#: Configs of mechanisms that run by name: the default of each name, and those from `config.hyperattn`.
BY_NAME: list[MechanismConfig] = []


def number_of(config: MechanismConfig) -> int:
    """Where in `BY_NAME` a config is; it is added if it is not there."""
    if config not in BY_NAME:
        BY_NAME.append(config)
    return BY_NAME.index(config)


@torch.compiler.assume_constant_result  # the compiler cannot follow it, but guards the dict, and takes a number
def find_number(data: dict, default: int) -> int:
    """Where in `BY_NAME` the mechanism's parameters are."""
    mechanism = BY_NAME[default].mechanism
    record = read_record(data)
    for name in ("layers", "heads", "overrides"):
        if getattr(record, name) is not None:
            raise ValueError(
                f"config.hyperattn has {name}, which {mechanism} used by name cannot honour, as it runs everywhere; "
                f"allowed: patch_model with this config, or a config without {name}"
            )
    others = [m.mechanism for m in record.mechanisms if m.mechanism != mechanism]
    if others:
        logger.warning_once(
            f"config.hyperattn holds parameters of {' and '.join(others)}, which {mechanism} used by name does not "
            "run; to run several mechanisms call patch_model with this config"
        )
    return number_of(
        next((m for m in record.mechanisms if m.mechanism == mechanism), BY_NAME[default])
    )


@lru_cache(maxsize=64)
def build_named_layers(config: MechanismConfig | None) -> Layers:
    """The mechanism's layer in replace mode, without parameters; none for None."""
    layers = Layers()
    if config is not None:
        layers.add_module(
            config.mechanism, get_mechanism(config.mechanism).layer(config, None, "replace")
        )
    return layers


def kernel(names: Iterable[str]) -> Callable:
    """The attention function of a kernel repository, whose name ends in what to run: "org/repo:cone".

    Args:
        names: what may stand there; it may be left out where there is but one.
    """
    named = named_configs()
    functions = {name: attention_function(NamedMechanism(named[name])) for name in names}

    def forward(module, query, key, value, attention_mask=None, **keywords):
        repo, _, name = module.config._attn_implementation.partition(":")
        function = (
            functions.get(name) if name or len(functions) > 1 else next(iter(functions.values()))
        )
        if function is None:
            raise ValueError(
                f"{repo} has no attention {name!r}; allowed: {repo}:{{{', '.join(functions)}}}"
            )
        return function(module, query, key, value, attention_mask, **keywords)

    return forward
