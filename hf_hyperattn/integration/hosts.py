"""Attention hosts, the modules that call Transformers' attention interface, and what they and their configs say of
each: heads, widths, and whether it rotates. Families use many words.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache, partial
from itertools import repeat
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..mechanisms.base import Host

CROSS = re.compile(
    r"cross_?att|encoder_att|encdec|enc_dec|multihead_attn|encoder_decoder_att|token_to_image|pooling_?head",
    re.IGNORECASE,
)
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

#: How modules and configs name each number, in order of preference.
NAMES = {
    "heads": (
        "num_heads",
        "num_attention_heads",
        "n_heads",
        "n_head",
        "encoder_attention_heads",
        "attention_heads",
        "decoder_self_attention_heads",
        "groups",
    ),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "width": ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "encoder_dim"),
    "head_dim": (
        "qk_head_dim",
        "head_dim",
        "attention_head_size",
        "head_size",
        "dim_per_head",
        "key_value_proj_dim",
        "d_kv",
        "d_head",
    ),
    "value_dim": ("v_head_dim", "value_head_dim"),
}
#: The projections that read the host's hidden states, by the last part of their names, the query's first.
READERS = (
    "q_proj",
    "query",
    "q",
    "q_lin",
    "wq",
    "to_q",
    "query_proj",
    "q_proj_with_mqa",
    "q_a_proj",
    "qkv",
    "qkv_proj",
    "c_attn",
    "query_key_value",
    "Wqkv",
    "W_pack",
    "in_proj",
    "fused_qkv",
    "c_q",
)
#: Those of queries alone, and of values.
QUERIES = ("q_proj", "query", "q", "q_lin", "wq", "to_q", "query_proj", "c_q")
VALUES = ("v_proj", "value", "v", "v_lin", "wv", "to_v", "value_proj", "c_v")

#: A word that rotating functions and modules carry in their names.
ROTARY = re.compile(r"rotary|(^|_)rope(_|$|[A-Z])|Rope|RoPE|apply_rot", re.ASCII)
#: What configs of rotary families hold, set.
ROTARY_SETTINGS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rotary_dim",
    "rotary_pct",
    "rotary_emb_base",
    "rotary_base",
)
#: Names of settings that say "rotary" for one of their values.
ROTARY_KINDS = (
    "position_embedding_type",
    "position_embeddings_type",
    "pos_emb_type",
    "position_encoding_type",
)


#: All names that `settings_of` reads.
READ = (
    *(name for names in NAMES.values() for name in names),
    *ROTARY_KINDS,
    "alibi",
    *ROTARY_SETTINGS,
)


#: The names in the code of a method that asks Transformers' attention interface for its function.
INTERFACE = frozenset({"ALL_ATTENTION_FUNCTIONS", "get_interface"})


def interface_callers(cls: type) -> tuple[FunctionType, ...]:
    """The methods of the class and its parents that ask `ALL_ATTENTION_FUNCTIONS` for their attention function; the
    modules of a class that has some are hosts.

    A class is read again every time: libraries replace the methods of classes.
    """
    return tuple([method for method in methods_of(cls) if calls_interface(method.__code__)])


@cache
def calls_interface(code: CodeType) -> bool:
    """Whether a function asks the attention interface for its function."""
    return INTERFACE <= set(names_in(code))


def find_hosts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Qualified name and module of every host, in the model's order."""
    modules = list(model.named_modules())
    host_classes = {
        cls for cls in {type(module) for _, module in modules} if interface_callers(cls)
    }
    return iter([(name, module) for name, module in modules if type(module) in host_classes])


def has_hosts(model: nn.Module) -> bool:
    """Whether there is a host in a model."""
    return any(map(interface_callers, set(map(type, model.modules()))))


def is_cross_attention(name: str, module: nn.Module) -> bool:
    """Whether keys come from another sequence; a call does not tell, so names and classes must."""
    return bool(
        CROSS.search(name.rsplit(".", 1)[-1]) or CROSS.search(type(module).__name__)
    ) or bool(getattr(module, "is_cross_attention", False))


def host_facts(
    name: str, module: nn.Module, layer_index: int, known: dict[int, dict] | None = None
) -> Host:
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


def generating_config(model: PreTrainedModel) -> object | None:
    """Return the config of the layers that read a cache as this model generates; None where there are none."""
    if not model.can_generate() or getattr(model.config, "is_encoder_decoder", False):
        return None
    try:
        config = model.config.get_text_config(decoder=True)
    except ValueError:  # there are several, and nothing tells which one generates
        return None
    # BERT and its kin have no cache unless they are decoders.
    return config if getattr(config, "is_decoder", True) else None


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


def settings_of(config: object) -> dict[str, Any]:
    """What a config has of the names above; it may refuse one that differs between layers."""
    values = {}
    for name in READ:
        try:
            values[name] = getattr(config, name, None)
        except Exception:
            values[name] = None
    return values


def module_dims(name: str, module: nn.Module, settings: dict[str, Any]) -> dict[str, int | None]:
    """Heads and widths of the host `name`, by the fields of `mechanisms.base.Host` that are numbers. Its projections
    are asked first, then its own names, then its config.

    Args:
        settings: what `settings_of` read of its config.

    Raises:
        ValueError: neither module nor config says how many heads there are.
    """
    numbers: dict[str, int] = {}
    for kind, names in NAMES.items():
        values = [*map(partial(getattr, module), names, repeat(None)), *map(settings.get, names)]
        for value in values:
            if kind not in numbers and isinstance(value, int) and not isinstance(value, bool):
                numbers[kind] = value
    if "heads" not in numbers:
        raise ValueError(
            f"cannot tell the number of heads of {name} ({type(module).__name__}); looked for "
            f"{', '.join(NAMES['heads'])} on the module and its config"
        )
    sizes: dict[
        str, tuple[int, int]
    ] = {}  # (in, out) of linear maps: torch's, quantised ones, PEFT's, Conv1D
    for path, part in module.named_modules():
        part = getattr(part, "base_layer", part)
        ends = ("in_features", "out_features") if hasattr(part, "in_features") else ("nx", "nf")
        if isinstance(getattr(part, ends[0], None), int):
            sizes[path.rpartition(".")[2]] = getattr(part, ends[0]), getattr(part, ends[1])
    reader = next(filter(None, map(sizes.get, READERS)), None)
    query_map = next(filter(None, map(sizes.get, QUERIES)), None)
    value_map = next(filter(None, map(sizes.get, VALUES)), None)
    heads, width = numbers["heads"], numbers.get("width")
    kv_heads = numbers.get("kv_heads") or heads
    read = reader[0] if reader else width
    head_dim, value_dim = numbers.get("head_dim"), numbers.get("value_dim")
    if head_dim is None and query_map and query_map[1] % heads == 0:
        head_dim = query_map[1] // heads
    if head_dim is None and (width or read):
        head_dim = (width or read or 0) // heads
    if value_dim is None and value_map and value_map[1] % kv_heads == 0:
        value_dim = value_map[1] // kv_heads
    sizes_of_heads = {"head_dim": head_dim, "value_dim": value_dim or head_dim}
    return {"heads": heads, "kv_heads": kv_heads, "width": read, **sizes_of_heads}


def rotary_reason(module: nn.Module, settings: dict[str, Any]) -> str:
    """What shows that a host turns its queries and keys by rotary positions, which nothing in its call tells; "" where
    it does not. Where a family rotates under some settings only, its config decides; else its code.

    Args:
        settings: what `settings_of` read of its config.
    """
    for name in ROTARY_KINDS:
        if isinstance(kind := settings[name], str):
            return f"{name}={kind!r}" if ROTARY.search(kind) else ""
    if settings["alibi"] is True:
        return ""  # Falcon and its kin have one or the other
    for name, _ in module.named_modules():
        if name and ROTARY.search(name):
            return name
    cls: Any = type(module)
    if rotating := rotating_name(cls):
        return rotating
    for name in ROTARY_SETTINGS:
        if settings[name] is not None:
            return f"config.{name}"
    return ""


@cache
def rotating_name(cls: type) -> str:
    """A rotary name in the methods of the class and its parents, or in what they call; "" where there is none."""
    names = (name for method in methods_of(cls) for name in names_in(method.__code__))
    return next(filter(ROTARY.search, names), "")


def methods_of(cls: type) -> list[FunctionType]:
    """The methods of a class and its parents, as they are written, but for those of every module or model."""
    found = []
    for base in cls.__mro__:
        if base is not nn.Module and base.__module__ not in (
            "builtins",
            PreTrainedModel.__module__,
        ):
            for member in vars(base).values():
                function = inspect.unwrap(getattr(member, "__func__", member))
                if isinstance(function, FunctionType):
                    found.append(function)
    return found


def names_in(code: CodeType) -> Iterator[str]:
    """All names that a function reads or sets, those of functions inside it included."""
    yield from code.co_names
    yield from code.co_varnames
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
