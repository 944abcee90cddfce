"""Which models can be served, and the one error for those that cannot."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

import model_patches

from .hosts import find_hosts


def refusal(model_type: str, name: str) -> ValueError:
    """The error for a family out of reach."""
    reason = model_patches.REFUSED.get(
        model_type, "its attention never calls Transformers' attention interface"
    )
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
    model_patches.serve(model)
    if next(find_hosts(model), None) is not None:
        return
    if has_attention(model) or not _inside_another_model(model):
        raise refusal(model.config.model_type, name)


def has_attention(model: nn.Module) -> bool:
    """Whether the model owns modules that call themselves attention."""
    return any("Attention" in type(module).__name__ for module in model.modules())


def _inside_another_model(model: PreTrainedModel) -> bool:
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
