"""Which models can be served, and the one error for those that cannot."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

import model_patches

from .hosts import find_hosts

#: Families that call the interface with something that no engine honours.
PER_TOKEN_SINKS = "its attention sinks differ from token to token, and engines take one per head"
UNHONOURED = {"inkling2": PER_TOKEN_SINKS, "inkling2_text": PER_TOKEN_SINKS}


def refusal(model_type: str, name: str) -> ValueError:
    """The error for a family out of reach."""
    known = UNHONOURED | model_patches.REFUSED
    reason = known.get(model_type, "its attention never calls Transformers' attention interface")
    return ValueError(
        f"attn_implementation={name!r} cannot be used with model type {model_type!r}: {reason}; use a "
        "family listed as working in docs/compatibility.md, or attn_implementation='sdpa'"
    )


def refuse_unrouted(config) -> None:
    """Raise if the mask of a family that is out of reach is asked for under one of our names."""
    model_type = getattr(config, "model_type", "")
    if model_type in model_patches.REFUSED:
        raise refusal(model_type, config._attn_implementation)


def check_routed(model: PreTrainedModel, name: str) -> None:
    """Route served families inside `model`; raise if nothing in it would call a function of ours."""
    if model.config.model_type in UNHONOURED:
        raise refusal(model.config.model_type, name)
    model_patches.serve(model)
    if next(find_hosts(model), None) is not None:
        return
    if has_attention(model) or not inside_another_model(model):
        raise refusal(model.config.model_type, name)


def check_parts(model: PreTrainedModel, name: str, configs=None) -> None:
    """Raise for a part of `model` whose attention never calls the interface, though `name` would be set for it.

    Args:
        configs: look only at parts that run on one of these; None for all.
    """
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        meant = configs is None or any(part.config is config for config in configs)
        unrouted = next(find_hosts(part), None) is None and has_attention(part)
        if meant and (unrouted or part.config.model_type in UNHONOURED):
            raise refusal(part.config.model_type, name)


def check_config(model: PreTrainedModel, config, name: str) -> None:
    """Raise if the parts of `model` that run on a sub-config have no host, though `name` is asked for just them."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is config]
    if parts and all(next(find_hosts(part), None) is None for part in parts):
        raise refusal(config.model_type, name)


def has_attention(model: nn.Module) -> bool:
    """Whether the model owns modules that call themselves attention."""
    return any("Attention" in type(module).__name__ for module in model.modules())


def inside_another_model(model: PreTrainedModel) -> bool:
    """Whether `model` is being built as part of a larger model, such as a backbone, which is checked itself."""
    return next(models_being_built(model), None) is not None


def models_being_built(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The models, other than `model`, whose `__init__` is running now: those that will contain it."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and isinstance(owner, PreTrainedModel) and owner is not model:
            yield owner
        frame = frame.f_back
