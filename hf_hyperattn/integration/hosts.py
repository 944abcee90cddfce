"""Attention hosts: the modules that call Transformers' attention interface, and what is known of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from ..mechanisms.base import Host
from .module_dims import methods_of, module_dims, names_in, rotary_reason, settings_of

CROSS = re.compile(r"cross_?att|encoder_att|encdec|enc_dec|multihead_attn|encoder_decoder_att", re.IGNORECASE)
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@cache
def interface_callers(cls: type) -> tuple[FunctionType, ...]:
    """The methods of the class and its parents that ask `ALL_ATTENTION_FUNCTIONS` for their attention function; the
    modules of a class that has some are hosts.
    """
    calls = {"ALL_ATTENTION_FUNCTIONS", "get_interface"}
    return tuple(method for method in methods_of(cls) if calls <= set(names_in(method.__code__)))


def find_hosts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Qualified name and module of every host, in the model's order."""
    modules: Any = model.named_modules()
    return iter([(name, module) for name, module in modules if interface_callers(type(module))])


def has_hosts(model: nn.Module) -> bool:
    """Whether there is a host in a model."""
    return any(map(interface_callers, map(type, model.modules())))


def is_cross_attention(name: str, module: nn.Module) -> bool:
    """Whether keys come from another sequence; a call does not tell, so names and classes must."""
    return bool(CROSS.search(name.rsplit(".", 1)[-1]) or CROSS.search(type(module).__name__)) or bool(
        getattr(module, "is_cross_attention", False)
    )


def host_facts(name: str, module: nn.Module, layer_index: int, known: dict[int, dict] | None = None) -> Host:
    """What the module and its config say of a host.

    Args:
        known: by the id of a config, its settings, for hosts that share one; added to.

    Raises:
        ValueError: neither says how many heads there are.
    """
    config, known = getattr(module, "config", None), {} if known is None else known
    if id(config) not in known:
        known[id(config)] = settings_of(config)
    settings = known[id(config)]
    return Host(
        name=name,
        is_causal=bool(getattr(module, "is_causal", getattr(config, "is_decoder", False))),
        is_cross=is_cross_attention(name, module),
        layer_index=layer_index,
        config=config,
        rotary=rotary_reason(module, settings),
        **module_dims(name, module, settings),  # type: ignore[arg-type]
    )


def layer_indices(names: list[str]) -> list[tuple[str, int]]:
    """For each host name, its stack and its number in it.

    The stack is the name with its varying number left out: "model.layers.#.self_attn". The number is the one in the
    name, so that in hybrid models layer 4 stays layer 4; hosts without a number count from 0.
    """
    places: list[tuple[str, tuple[int, ...]]] = []
    stacks: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(map(int, NUMBER.findall("." + name)))
        places.append((NUMBER.sub("#", "." + name)[1:], numbers))
        stacks.setdefault(places[-1][0], []).append(numbers)
    varying = {}  # by stack, which of the numbers in a name differs between its hosts
    for stack, lists in stacks.items():
        varying[stack] = 0
        for i, column in enumerate(zip(*lists, strict=True)):
            if len(set(column)) > 1:
                varying[stack] = i
                break
    return [(stack, numbers[varying[stack]] if numbers else 0) for stack, numbers in places]
