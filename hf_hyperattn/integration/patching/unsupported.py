"""Models whose attention is out of reach, and the one error for them.

A model is unsupported if its attention never calls Transformers' attention interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

import model_patches

from ..attention.hosts import has_hosts

#: Families that call the interface with arguments that no engine supports, with the reason.
PER_TOKEN_SINKS = "its attention sinks differ from token to token, and engines take one per head"
UNHONOURED = dict.fromkeys(
    ("inkling2", "inkling2_text", "inkling2_loop", "inkling2_loop_text"), PER_TOKEN_SINKS
)


def unsupported(model_type: str, name: str | None) -> ValueError:
    """Return the error for an unsupported family.

    Args:
        model_type: The model type in its config.
        name: The name that was requested for it.
    """
    known = UNHONOURED | model_patches.REFUSED
    reason = known.get(model_type, "its attention never calls Transformers' attention interface")
    return ValueError(
        f"attn_implementation={name!r} cannot be used with model type {model_type!r}: {reason}; use a "
        "family listed as working in docs/compatibility.md, or attn_implementation='sdpa'"
    )


def refuse_unrouted(config: Any) -> None:
    """Raise if a mask is requested for an unsupported family under our names.

    Raises:
        ValueError: The family is unsupported.
    """
    model_type = getattr(config, "model_type", "")
    if model_type in model_patches.REFUSED:
        raise unsupported(model_type, config._attn_implementation)


def check_routed(model: PreTrainedModel, name: str, inside_another: bool = False) -> None:
    """Route supported families in a model; raise if nothing would call our function.

    Args:
        model: The model.
        name: The name of ours that was requested.
        inside_another: Whether it is built as a part of a larger model, such as a backbone. The
            larger model is checked as a whole.

    Raises:
        ValueError: No attention layer in the model would call a function of ours.
    """
    if model.config.model_type in UNHONOURED:
        raise unsupported(model.config.model_type, name)
    model_patches.serve(model)
    # A part without any attention (a convolutional backbone) is no mistake.
    if not has_hosts(model) and (has_attention(model) or not inside_another):
        raise unsupported(model.config.model_type, name)


def check_parts(model: PreTrainedModel, name: str, configs: Sequence | None = None) -> None:
    """Raise for a part of a model whose attention never calls the interface.

    Args:
        model: The model.
        name: The name of ours that would be set for the part.
        configs: Check only parts that run on one of these configs. Default: all parts.

    Raises:
        ValueError: There is such a part.
    """
    checked = None if configs is None else set(map(id, configs))
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        if checked is not None and id(part.config) not in checked:
            continue
        never_calls = not has_hosts(part) and has_attention(part)
        if never_calls or part.config.model_type in UNHONOURED:
            raise unsupported(part.config.model_type, name)


def check_config(model: PreTrainedModel, config: Any, name: str) -> None:
    """Raise if no part on a sub-config has attention layers that could run a name.

    Args:
        model: The model.
        config: The sub-config that the name was requested for.
        name: The name of ours.

    Raises:
        ValueError: There are parts on this config, and none has such a layer.
    """
    parts = [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and part.config is config
    ]
    if parts and not any(map(has_hosts, parts)):
        raise unsupported(config.model_type, name)


def has_attention(model: nn.Module) -> bool:
    """Return whether a model contains modules that are named attention."""
    # By name: an unsupported family has no other sign of its attention.
    return any("Attention" in type(module).__name__ for module in model.modules())
