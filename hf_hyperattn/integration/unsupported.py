"""Which models cannot be served, and the one error for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

import model_patches

from .hosts import has_hosts

#: Families that call the interface with something that no engine honours.
PER_TOKEN_SINKS = "its attention sinks differ from token to token, and engines take one per head"
UNHONOURED = {"inkling2": PER_TOKEN_SINKS, "inkling2_text": PER_TOKEN_SINKS}


def unsupported(model_type: str, name: str | None) -> ValueError:
    """The error for a family out of reach."""
    known = UNHONOURED | model_patches.REFUSED
    reason = known.get(model_type, "its attention never calls Transformers' attention interface")
    return ValueError(
        f"attn_implementation={name!r} cannot be used with model type {model_type!r}: {reason}; use a "
        "family listed as working in docs/compatibility.md, or attn_implementation='sdpa'"
    )


def refuse_unrouted(config: Any) -> None:
    """Raise if the mask of a family that is out of reach is asked for under one of our names."""
    model_type = getattr(config, "model_type", "")
    if model_type in model_patches.REFUSED:
        raise unsupported(model_type, config._attn_implementation)


def check_routed(model: PreTrainedModel, name: str, inside_another: bool = False) -> None:
    """Route served families inside `model`; raise if nothing in it would call a function of ours.

    Args:
        inside_another: whether it is built as a part of a larger model, such as a backbone, which is checked itself.
    """
    if model.config.model_type in UNHONOURED:
        raise unsupported(model.config.model_type, name)
    model_patches.serve(model)
    if not has_hosts(model) and (has_attention(model) or not inside_another):
        raise unsupported(model.config.model_type, name)


def check_parts(model: PreTrainedModel, name: str, configs: Sequence | None = None) -> None:
    """Raise for a part of `model` whose attention never calls the interface, though `name` would be set for it.

    Args:
        configs: look only at parts that run on one of these; None for all.
    """
    looked_at = None if configs is None else set(map(id, configs))
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and (
            looked_at is None or id(part.config) in looked_at
        ):
            if part.config.model_type in UNHONOURED or (
                not has_hosts(part) and has_attention(part)
            ):
                raise unsupported(part.config.model_type, name)


def check_config(model: PreTrainedModel, config: Any, name: str) -> None:
    """Raise if the parts of `model` that run on a sub-config have no host, though `name` is set for just them."""
    parts = [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and part.config is config
    ]
    if parts and not any(map(has_hosts, parts)):
        raise unsupported(config.model_type, name)


def has_attention(model: nn.Module) -> bool:
    """Whether the model owns modules that call themselves attention."""
    return any("Attention" in type(module).__name__ for module in model.modules())
