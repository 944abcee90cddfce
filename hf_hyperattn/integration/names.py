"""The names that `attn_implementation=` accepts, each registered as an attention function and a mask function together.

A mechanism's own names ("cone", ...) are the published operators, without anything to learn. `hf_hyperattn` is the
name of patched models: its function looks for `host.hyper`; a host without one runs what the model ran before.
`hyper_dot` is the plain dot product on the engine that is the fastest for it, whose last digits are not SDPA's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

import model_patches

from .. import mechanisms  # noqa: F401  fills the registry
from ..config import MechanismConfig, read_record
from ..engines import attention, dot_score
from ..mechanisms.base import HostCall
from ..registry import Mechanism, get_mechanism, on_register
from .call import UNROUTED
from .hosts import is_cross_attention
from .hyper import Layers, attention_function, family_mask, patched_forward
from .stock import HYPER_DOT, OURS, PATCHED
from .unsupported import refuse_unrouted

logger = logging.getLogger("hf_hyperattn")


def register_names() -> None:
    """Register every name with Transformers, those of mechanisms that are registered later too."""
    UNROUTED.update(dict.fromkeys(model_patches.REFUSED, refuse_unrouted))
    _register(PATCHED, patched_forward)
    AttentionInterface.register(HYPER_DOT, attention_function(PlainDot))
    AttentionMaskInterface.register(HYPER_DOT, family_mask)
    on_register(register_names_of)


def register_names_of(mechanism: Mechanism) -> None:
    """Register the names of one mechanism."""
    for name, config in mechanism.names.items():
        forward = attention_function(NamedMechanism(config))
        forward.__name__ = forward.__qualname__ = f"{name}_attention_forward"
        _register(name, forward)


def _register(name: str, function) -> None:
    OURS.add(name)
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, family_mask)


class PlainDot:
    """What `hyper_dot` runs: no layer, with the same for all modules."""

    @staticmethod
    def layers(call: HostCall, weights: bool = False, stock: Callable | None = None) -> tuple[Tensor, Tensor | None]:
        """The host's own attention; arguments and result as in `Layers.forward`."""
        score, options = dot_score(call.query, call.key, call.scale), replace(call.options, any_rounding=True)
        out, attention_weights = attention(score, call.value, options, backend=call.backend, weights=weights)
        return out.to(call.query.dtype), attention_weights

    @staticmethod
    def of(_: nn.Module) -> Callable:
        """See `attention_function`."""
        return PlainDot.layers


class NamedMechanism:
    """What a mechanism's name runs: its layer in replace mode, without parameters.

    Args:
        default: its config where a model's config says nothing of the mechanism.

    Attributes:
        layers: for all modules that say nothing of it; None where they are not known yet, or differ.
    """

    def __init__(self, default: MechanismConfig):
        self.default = default
        self.layers: Layers | None = None

    def of(self, module: nn.Module) -> Layers:
        """The layers for this module."""
        cross_attention = get_mechanism(self.default.mechanism).cross_attention
        if not cross_attention and is_cross_module(module):
            return _layers(None)
        config = by_name_config(module, self.default).for_model(getattr(module, "config", None))
        layers = _layers(config)
        if cross_attention and config is self.default and not torch.compiler.is_compiling():
            self.layers = layers
        return layers


def is_cross_module(module: nn.Module) -> bool:
    """Whether the module reads another sequence, as far as it tells: its name in the model is not known here."""
    says_decoder = getattr(module, "is_decoder", False) is True and getattr(module, "is_causal", True) is False
    return says_decoder or is_cross_attention("", module)


def by_name_config(module: nn.Module, default: MechanismConfig) -> MechanismConfig:
    """The mechanism's parameters from `config.hyperattn`, where it names the mechanism; else the defaults."""
    data = getattr(getattr(module, "config", None), "hyperattn", None)
    if data is None:
        return default
    if not isinstance(data, dict):
        raise ValueError(
            f"config.hyperattn is a {type(data).__name__}; allowed: a dict, as HyperAttnConfig([...]).to_dict() is"
        )
    return BY_NAME[_number(as_constants(data) if torch.compiler.is_compiling() else data, default)]


def as_constants(data):
    """A copy of JSON data whose numbers the compiler takes as they are, where it would make variables of them.

    It does so with a float that differs from that of an earlier call or model; what stands in a set is a constant.
    """
    if isinstance(data, dict):
        return {key: as_constants(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [as_constants(value) for value in data]
    return next(iter({data}))


#: The configs that `config.hyperattn` brought for use by name.
BY_NAME: list[MechanismConfig] = []


@torch.compiler.assume_constant_result  # the compiler cannot follow it, but guards the dict, and takes a number
def _number(data: dict, default: MechanismConfig) -> int:
    """Where in `BY_NAME` the mechanism's parameters are."""
    mechanism = default.mechanism
    record = read_record(data)
    for name in ("layers", "heads", "overrides"):
        if getattr(record, name) is not None:
            raise ValueError(
                f"config.hyperattn has {name}, which {mechanism} used by name cannot honour, as it runs everywhere; "
                f"allowed: patch_model with this config, or a config without {name}"
            )
    others = [m.mechanism for m in record.mechanisms if m.mechanism != mechanism]
    if others:
        _warn_of_others(mechanism, " and ".join(others))
    config = next((m for m in record.mechanisms if m.mechanism == mechanism), default)
    if config not in BY_NAME:
        BY_NAME.append(config)
    return BY_NAME.index(config)


@lru_cache(maxsize=64)
def _warn_of_others(mechanism: str, others: str) -> None:
    logger.warning(
        f"config.hyperattn holds parameters of {others}, which {mechanism} used by name does not run; to run several "
        "mechanisms call patch_model with this config"
    )


@lru_cache(maxsize=64)
def _layers(config: MechanismConfig | None) -> Layers:
    """The mechanism's layer in replace mode, without parameters; none for None."""
    layers = Layers()
    if config is not None:
        layers.add_module(config.mechanism, get_mechanism(config.mechanism).layer(config, None, "replace"))
    return layers
