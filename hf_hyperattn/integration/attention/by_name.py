"""Attention under a mechanism's own name ("cone", ...): the published operator, without learned
parameters.

A name runs the mechanism in replace mode in every attention layer that can use it. Its parameters
come from `config.hyperattn`, or are the defaults.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ...config import MechanismConfig, read_record
from ...config.registry import get_mechanism, named_configs
from .call_path import Layers, attention_function
from .hosts import is_cross_attention

logger: Any = logging.getLogger("hf_hyperattn")  # `warning_once` is Transformers'


class NamedMechanism:
    """The layers that a mechanism's name runs: replace mode, without learned parameters.

    Args:
        default: Config of the mechanism if the model's config has none.

    Attributes:
        layers: Layers for all modules whose config has none. None: not known yet, or not the same
            for all modules.
    """

    def __init__(self, default: MechanismConfig):
        self.default = default
        self.number = number_of(default)
        self.layers: Layers | None = None

    def find_layers(self, module: nn.Module) -> Layers:
        """Return the layers of this mechanism for one attention layer.

        A mechanism that cannot do cross-attention gets no layers there.
        """
        cross_attention = get_mechanism(self.default.mechanism).cross_attention
        if not cross_attention:
            # The module's name in the model is not known here. Cross-attention shows by its class,
            # or by being part of a decoder without being causal.
            is_decoder = getattr(module, "is_decoder", False) is True
            is_causal = getattr(module, "is_causal", True) is not False
            if (is_decoder and not is_causal) or is_cross_attention("", module):
                return build_named_layers(None)
        config = by_name_config(module, self.number).for_model(getattr(module, "config", None))
        layers = build_named_layers(config)
        # Remember layers that serve every module: `attention_function` then skips this method.
        if cross_attention and config is self.default and not torch.compiler.is_compiling():
            self.layers = layers
        return layers


def by_name_config(module: nn.Module, default: int) -> MechanismConfig:
    """Return the mechanism's config from `config.hyperattn`, or the default.

    Args:
        default: Index of the default in `BY_NAME`. An index, because the compiler of torch 2.11
            cannot pass config objects on.

    Raises:
        ValueError: `config.hyperattn` is no dict.
    """
    data = getattr(getattr(module, "config", None), "hyperattn", None)
    if data is None:
        return BY_NAME[default]
    if not isinstance(data, dict):
        raise ValueError(
            f"config.hyperattn is a {type(data).__name__}; allowed: a dict, as HyperAttnConfig([...]).to_dict() is"
        )
    if torch.compiler.is_compiling():
        data = as_constants(data)
    return BY_NAME[find_number(data, default)]


def as_constants(data):
    """Return a copy of JSON data whose numbers are constants for the compiler.

    The compiler turns a float into a variable if it differs from the float of an earlier call or
    model. Members of a set stay constants, so every value passes through one.
    """
    if isinstance(data, dict):
        return {key: as_constants(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [as_constants(value) for value in data]
    return next(iter({data}))


#: Configs of mechanisms that run by name: the default of each name, and configs from
#: `config.hyperattn`.
BY_NAME: list[MechanismConfig] = []


def number_of(config: MechanismConfig) -> int:
    """Return the index of a config in `BY_NAME`, and add the config if it is new."""
    if config not in BY_NAME:
        BY_NAME.append(config)
    return BY_NAME.index(config)


# The compiler cannot trace this function. It guards the dict, and takes the number as a constant.
@torch.compiler.assume_constant_result
def find_number(data: dict, default: int) -> int:
    """Return the index in `BY_NAME` of the mechanism's parameters in a record.

    Args:
        data: The record, `config.hyperattn`.
        default: Index to return if the record does not hold the mechanism.

    Raises:
        ValueError: The record chooses layers or heads. By name, a mechanism runs everywhere.
    """
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
    """Return the mechanism's layer in replace mode, without parameters. None: no layer."""
    layers = Layers()
    if config is not None:
        layers.add_module(
            config.mechanism, get_mechanism(config.mechanism).layer(config, None, "replace")
        )
    return layers


def kernel(names: Iterable[str]) -> Callable:
    """Return the attention function of a kernel repository.

    Transformers names it "org/repo:cone", with the mechanism after the colon.

    Args:
        names: Mechanisms of the repository. If there is only one, the part after the colon may be
            missing.
    """
    named = named_configs()
    functions = {name: attention_function(NamedMechanism(named[name])) for name in names}

    def forward(module, query, key, value, attention_mask=None, **keywords):
        repo, _, name = module.config._attn_implementation.partition(":")
        only_one = len(functions) == 1
        function = next(iter(functions.values())) if only_one and not name else functions.get(name)
        if function is None:
            raise ValueError(
                f"{repo} has no attention {name!r}; allowed: {repo}:{{{', '.join(functions)}}}"
            )
        return function(module, query, key, value, attention_mask, **keywords)

    return forward
