"""Find a model's attention layers ("hosts") and read their sizes.

A host is a module that calls Transformers' attention interface. Its heads, widths and use of rotary
positions are read from the module and its config, under the names that the families use for them.
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

from ...mechanisms.base import Host

#: Names of modules and classes whose keys come from another sequence.
CROSS = re.compile(
    r"cross_?att|encoder_att|encdec|enc_dec|multihead_attn|encoder_decoder_att|token_to_image|pooling_?head",
    re.IGNORECASE,
)
#: A number between dots in the name of a module.
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
#: Attribute of an attention layer: the result of `count_heads`.
HEADS = "_hyperattn_heads"

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
#: Last part of the names of projections that read the layer's own hidden states. Key projections
#: are not among them: in cross-attention they read another sequence, maybe of another width.
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
#: Projections that produce only queries, and only values. Fused ones do not tell a head's width.
QUERIES = ("q_proj", "query", "q", "q_lin", "wq", "to_q", "query_proj", "c_q")
VALUES = ("v_proj", "value", "v", "v_lin", "wv", "to_v", "value_proj", "c_v")

#: Matches the names of functions and modules that apply rotary positions.
ROTARY = re.compile(r"rotary|(^|_)rope(_|$|[A-Z])|Rope|RoPE|apply_rot", re.ASCII)
#: Settings that only configs of rotary families set.
ROTARY_SETTINGS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rotary_dim",
    "rotary_pct",
    "rotary_emb_base",
    "rotary_base",
)
#: Settings with the kind of positions as their value, such as "rotary".
ROTARY_KINDS = (
    "position_embedding_type",
    "position_embeddings_type",
    "pos_emb_type",
    "position_encoding_type",
)


#: All names that `read_settings` reads.
READ = (
    *(name for names in NAMES.values() for name in names),
    *ROTARY_KINDS,
    "alibi",
    *ROTARY_SETTINGS,
)


#: Both names occur in the code of a method that asks the attention interface for its function.
INTERFACE = frozenset({"ALL_ATTENTION_FUNCTIONS", "get_interface"})


def interface_callers(cls: type) -> tuple[FunctionType, ...]:
    """Return the methods of a class and its parents that call the interface.

    Modules of a class with such a method are attention layers.
    """
    # Missing upstream: a marker or registry of attention layers. The code of their methods is the
    # only sign that all families share.
    # Not cached by class: other libraries replace methods of classes at any time.
    return tuple([method for method in list_methods(cls) if calls_interface(method.__code__)])


@cache
def calls_interface(code: CodeType) -> bool:
    """Return whether a function asks the attention interface for its function."""
    return INTERFACE <= set(names_in(code))


def find_hosts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Return qualified name and module of every attention layer, in the model's order."""
    modules = list(model.named_modules())
    # Read each class once: a model has few classes and many modules.
    classes = {type(module) for _, module in modules}
    host_classes = {cls for cls in classes if interface_callers(cls)}
    return iter([(name, module) for name, module in modules if type(module) in host_classes])


def has_hosts(model: nn.Module) -> bool:
    """Return whether a model contains an attention layer."""
    return any(map(interface_callers, set(map(type, model.modules()))))


def is_cross_attention(name: str, module: nn.Module) -> bool:
    """Return whether the keys of an attention layer come from another sequence.

    A call does not show this, so the names of the module and of its class must.

    Args:
        name: Qualified name of the module.
        module: The attention layer.
    """
    if CROSS.search(name.rsplit(".", 1)[-1]) or CROSS.search(type(module).__name__):
        return True
    return bool(getattr(module, "is_cross_attention", False))


def host_facts(
    name: str, module: nn.Module, layer_index: int, known: dict[int, dict] | None = None
) -> Host:
    """Return the facts of an attention layer, read from its module and config.

    Args:
        name: Qualified name of the module.
        module: The attention layer.
        layer_index: Its number among the layers of its stack.
        known: Settings by the id of a config, shared by calls for one model. Missing ones are
            added. Default: nothing is shared.

    Raises:
        ValueError: Neither module nor config says how many heads there are.
    """
    config = getattr(module, "config", None)
    if known is None:
        known = {}
    if id(config) not in known:
        known[id(config)] = read_settings(config)
    settings = known[id(config)]
    return Host(
        name=name,
        is_causal=bool(getattr(module, "is_causal", getattr(config, "is_decoder", False))),
        is_cross=is_cross_attention(name, module),
        layer_index=layer_index,
        config=config,
        rotary=find_rotary_sign(module, settings),
        **read_dims(name, module, settings),  # type: ignore[arg-type]
    )


def generating_config(model: PreTrainedModel) -> object | None:
    """Return the config of the layers that read a cache during generation, or None."""
    if not model.can_generate() or getattr(model.config, "is_encoder_decoder", False):
        return None
    try:
        config = model.config.get_text_config(decoder=True)
    except ValueError:  # there are several text configs, and nothing tells which one generates
        return None
    # BERT and similar families have no cache unless they are decoders.
    return config if getattr(config, "is_decoder", True) else None


def layer_indices(names: list[str]) -> list[tuple[str, int]]:
    """Return the stack of each attention layer, and its number in that stack.

    The stack is the name with the varying number replaced: "model.layers.#.self_attn". The number
    is the one in the name, so that in hybrid models layer 4 stays layer 4. A layer whose name has
    no number gets 0.

    Args:
        names: Qualified names of all attention layers of a model.
    """
    places: list[tuple[str, tuple[int, ...]]] = []
    stacks: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        # The dot in front lets `NUMBER` also find a number at the very start.
        numbers = tuple(map(int, NUMBER.findall("." + name)))
        stack = NUMBER.sub("#", "." + name)[1:]
        places.append((stack, numbers))
        stacks.setdefault(stack, []).append(numbers)
    # Names with several numbers, such as "stages.1.blocks.3.attn": the first one that differs
    # between the layers of a stack counts them.
    varying = {}
    for stack, lists in stacks.items():
        varying[stack] = 0
        for i, column in enumerate(zip(*lists, strict=True)):
            if len(set(column)) > 1:
                varying[stack] = i
                break
    return [(stack, numbers[varying[stack]] if numbers else 0) for stack, numbers in places]


def count_heads(module: nn.Module) -> int:
    """Return the number of an attention layer's heads, on all ranks together.

    Raises:
        ValueError: Neither module nor config says how many heads there are.
    """
    # Read once and kept: reading all settings in every call would take too long.
    if HEADS not in module.__dict__:
        dims = read_dims("a host", module, read_settings(getattr(module, "config", None)))
        module.__dict__[HEADS] = dims["heads"]
    return module.__dict__[HEADS]


def read_settings(config: object) -> dict[str, Any]:
    """Return the values of all names in `READ` that a config has, None for the others."""
    values = {}
    for name in READ:
        try:
            values[name] = getattr(config, name, None)
        except Exception:  # configs with settings per layer may refuse to name one for all
            values[name] = None
    return values


def read_dims(name: str, module: nn.Module, settings: dict[str, Any]) -> dict[str, int | None]:
    """Return heads and widths of an attention layer, by the fields of `Host`.

    The sizes of its projections win over its own attributes, and these win over its config. One
    config may serve layers of several sizes.

    Args:
        name: Qualified name, for the error.
        module: The attention layer.
        settings: The settings that `read_settings` read from its config.

    Raises:
        ValueError: Neither module nor config says how many heads there are.
    """
    numbers: dict[str, int] = {}
    for kind, names in NAMES.items():
        values = [*map(partial(getattr, module), names, repeat(None)), *map(settings.get, names)]
        for value in values:
            # Some attributes of these names are modules, functions or flags.
            if kind not in numbers and isinstance(value, int) and not isinstance(value, bool):
                numbers[kind] = value
    if "heads" not in numbers:
        raise ValueError(
            f"cannot tell the number of heads of {name} ({type(module).__name__}); looked for "
            f"{', '.join(NAMES['heads'])} on the module and its config"
        )
    heads, kv_heads = numbers["heads"], numbers.get("kv_heads") or numbers["heads"]
    sizes = read_projection_sizes(module)
    reader = next(filter(None, map(sizes.get, READERS)), None)
    query_map = next(filter(None, map(sizes.get, QUERIES)), None)
    value_map = next(filter(None, map(sizes.get, VALUES)), None)
    width = reader[0] if reader else numbers.get("width")
    head_dim, value_dim = numbers.get("head_dim"), numbers.get("value_dim")
    if head_dim is None and query_map and query_map[1] % heads == 0:
        head_dim = query_map[1] // heads
    # The model's width, not the reader's: heads share the width of the model by convention.
    model_width = numbers.get("width") or width
    if head_dim is None and model_width:
        head_dim = model_width // heads
    if value_dim is None and value_map and value_map[1] % kv_heads == 0:
        value_dim = value_map[1] // kv_heads
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "width": width,
        "head_dim": head_dim,
        "value_dim": value_dim or head_dim,
    }


def read_projection_sizes(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of the linear maps in a module, by last part of name."""
    sizes: dict[str, tuple[int, int]] = {}
    for path, part in module.named_modules():
        # PEFT wraps a linear map. Quantised ones have the attributes of `nn.Linear`, and the
        # `Conv1D` of GPT-2 names them `nx` and `nf`.
        part = getattr(part, "base_layer", part)
        ends = ("in_features", "out_features") if hasattr(part, "in_features") else ("nx", "nf")
        if isinstance(getattr(part, ends[0], None), int):
            sizes[path.rpartition(".")[2]] = getattr(part, ends[0]), getattr(part, ends[1])
    return sizes


def find_rotary_sign(module: nn.Module, settings: dict[str, Any]) -> str:
    """Return a sign that an attention layer rotates its queries and keys, or "".

    A call does not show rotary positions. If a family rotates only under some settings, its config
    decides, otherwise its code does.

    Args:
        module: The attention layer.
        settings: The settings that `read_settings` read from its config.

    Returns:
        The setting, module or function that was found.
    """
    for name in ROTARY_KINDS:
        if isinstance(kind := settings[name], str):
            return f"{name}={kind!r}" if ROTARY.search(kind) else ""
    # Falcon and similar families have code for both kinds of positions and run one of them.
    if settings["alibi"] is True:
        return ""
    for name, _ in module.named_modules():
        if name and ROTARY.search(name):
            return name
    cls: Any = type(module)
    if rotating := find_rotary_name(cls):
        return rotating
    for name in ROTARY_SETTINGS:
        if settings[name] is not None:
            return f"config.{name}"
    return ""


@cache
def find_rotary_name(cls: type) -> str:
    """Return a rotary name in the code of a class and its parents, or ""."""
    names = (name for method in list_methods(cls) for name in names_in(method.__code__))
    return next(filter(ROTARY.search, names), "")


def list_methods(cls: type) -> list[FunctionType]:
    """Return the methods of a class and its parents, without decorators.

    Methods of `object`, `nn.Module` and `PreTrainedModel` are left out: they say nothing about
    attention.
    """
    methods = []
    left_out = ("builtins", PreTrainedModel.__module__)
    for base in cls.__mro__:
        if base is not nn.Module and base.__module__ not in left_out:
            for member in vars(base).values():
                function = inspect.unwrap(getattr(member, "__func__", member))
                if isinstance(function, FunctionType):
                    methods.append(function)
    return methods


def names_in(code: CodeType) -> Iterator[str]:
    """Yield all names that a function reads or sets, also inside nested functions."""
    yield from code.co_names
    yield from code.co_varnames
    # Nested functions and comprehensions are constants of the code around them.
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
