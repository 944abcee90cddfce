"""Whether a host turns its queries and keys by rotary positions, which nothing in its call tells.

Its code does: rotating functions and modules carry the word in their names, in the host's own methods or in those of a
function that they call. Where a family rotates under some settings only, the config decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from types import CodeType

from torch import nn
from transformers import PreTrainedModel

ROTARY = re.compile(r"rotary|(^|_)rope(_|$|[A-Z])|Rope|RoPE|apply_rot", re.ASCII)
#: What configs of rotary families hold, set.
SETTINGS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rotary_dim",
    "rotary_pct",
    "rotary_emb_base",
    "rotary_base",
)
#: Names of settings that say "rotary" for one of their values.
KINDS = ("position_embedding_type", "position_embeddings_type", "pos_emb_type", "position_encoding_type")


def rotary_reason(module: nn.Module) -> str:
    """What shows that a host rotates; "" where it does not."""
    config = getattr(module, "config", None)
    for name in KINDS:
        kind = _setting(config, name)
        if isinstance(kind, str):
            return f"{name}={kind!r}" if ROTARY.search(kind) else ""
    if _setting(config, "alibi") is True:
        return ""  # Falcon and its kin have one or the other
    inside = next((n for n, _ in module.named_modules() if n and ROTARY.search(n)), None)
    found = inside or rotating_name(type(module))
    if found:
        return found
    name = next((n for n in SETTINGS if _setting(config, n) is not None), None)
    return f"config.{name}" if name else ""


@cache
def rotating_name(cls: type) -> str:
    """A name in the methods of the class and its parents that says so; "" where there is none."""
    for base in cls.__mro__:
        if base is nn.Module or base.__module__ in ("builtins", PreTrainedModel.__module__):
            continue
        for function in vars(base).values():
            function = getattr(function, "__func__", function)
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            code = getattr(function, "__code__", None)
            found = next((n for n in _names(code) if ROTARY.search(n)), "") if code else ""
            if found:
                return found
    return ""


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_varnames
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _setting(config, name: str):
    """The attribute, or None; a config may refuse one that differs between layers."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None
