"""Attention hosts: the modules that call Transformers' attention interface, and what is known of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType

from torch import nn
from transformers import PreTrainedModel

from ..mechanisms.base import Host
from .rotary import rotary_reason
from .widths import first_int, head_dim, input_width, value_dim

#: Where families keep the number of query heads, on the module or on its config, in order of preference.
HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "encoder_attention_heads",
    "attention_heads",
    "decoder_self_attention_heads",
    "groups",
)
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
CROSS = re.compile(r"cross_?att|encoder_att|encdec|enc_dec|multihead_attn|encoder_decoder_att", re.IGNORECASE)


@cache
def interface_callers(cls: type) -> tuple[FunctionType, ...]:
    """The methods of the class and its parents that ask `ALL_ATTENTION_FUNCTIONS` for their attention function."""
    bases = (
        base
        for base in cls.__mro__
        if base.__module__ != PreTrainedModel.__module__ and base is not nn.Module
    )
    found = (_plain(f) for base in bases for f in vars(base).values())
    return tuple(f for f in found if isinstance(f, FunctionType) and _names_interface(f.__code__))


def calls_interface(cls: type) -> bool:
    """Whether modules of this class are hosts."""
    return bool(interface_callers(cls))


def _plain(function):
    function = getattr(function, "__func__", function)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _names_interface(code: CodeType) -> bool:
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return {"ALL_ATTENTION_FUNCTIONS", "get_interface"} <= set(code.co_names) or any(
        map(_names_interface, inner)
    )


def find_hosts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Qualified name and module of every host, in the model's order."""
    return ((name, module) for name, module in model.named_modules() if calls_interface(type(module)))


def is_cross_attention(name: str, module: nn.Module) -> bool:
    """Whether keys come from another sequence; a call does not tell, so names and classes must."""
    return bool(CROSS.search(name.rsplit(".", 1)[-1]) or CROSS.search(type(module).__name__)) or bool(
        getattr(module, "is_cross_attention", False)
    )


def host_facts(name: str, module: nn.Module, layer_index: int) -> Host:
    """What the module and its config say of a host.

    Raises:
        ValueError: neither says how many heads there are.
    """
    places = (module, getattr(module, "config", None))
    heads = first_int(places, HEADS)
    if heads is None:
        raise ValueError(
            f"cannot tell the number of heads of {name} ({type(module).__name__}); looked for "
            f"{', '.join(HEADS)} on the module and its config"
        )
    kv_heads = first_int(places, KV_HEADS) or heads
    causal = bool(getattr(module, "is_causal", getattr(places[1], "is_decoder", False)))
    return Host(
        name,
        heads,
        kv_heads,
        causal,
        is_cross_attention(name, module),
        layer_index,
        places[1],
        width=input_width(module),
        head_dim=head_dim(module, heads),
        value_dim=value_dim(module, heads, kv_heads),
        rotary=rotary_reason(module),
    )


def layer_indices(names: list[str]) -> list[tuple[str, int]]:
    """For each host name, its stack and its number in it.

    The stack is the name with its varying number left out: "model.layers.#.self_attn". The number is the one in the
    name, so that in hybrid models layer 4 stays layer 4; hosts without a number count from 0.
    """
    stacks: dict[str, list[list[int]]] = {}
    for name in names:
        stacks.setdefault(_shape(name), []).append(
            [int(n) for n in re.findall(r"(?<=\.)\d+(?=\.|$)", "." + name)]
        )
    column = {shape: _varying(numbers) for shape, numbers in stacks.items()}
    found = []
    for name in names:
        shape, numbers = _shape(name), [int(n) for n in re.findall(r"(?<=\.)\d+(?=\.|$)", "." + name)]
        found.append((shape, numbers[column[shape]] if numbers else 0))
    return found


def _shape(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", "." + name)[1:]


def _varying(numbers: list[list[int]]) -> int:
    """The first position at which the lists differ, 0 if they do not."""
    return next((i for i, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1), 0)
