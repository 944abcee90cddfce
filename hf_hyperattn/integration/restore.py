"""What a patched checkpoint becomes while it is built to be loaded: patched again, before its weights come."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..config import HyperAttnConfig
from .attach import bring_back, settle_stock
from .conversions import rebuild
from .patching import route
from .records import name_before, parts, patched_hosts, recorded_hosts, tree
from .refusal import models_being_built
from .stock import STOCK


def restore(model: PreTrainedModel) -> bool:
    """Patch a model whose config says that it was; the outermost model does it, since hosts are named from there.

    Returns:
        Whether the config says so. `config.hyperattn` without hosts holds parameters of mechanisms used by name.

    Raises:
        ValueError: the config is malformed, or names hosts that the model does not have.
    """
    config = HyperAttnConfig.from_dict(model.config.hyperattn)
    if config.hosts is None:
        return False
    outer = models_being_built(model)
    if any(patched_hosts(model)) or any(recorded_hosts(m.config) is not None for m in outer):
        return True
    settle_stock(model)
    bring_back(model, config, route_as_before(model))
    rebuild(model)
    return True


def route_as_before(model: PreTrainedModel) -> bool:
    """Route served families while their configs name the implementation from before, so that it can be undone."""
    named = [c for part in parts(model) for c in tree(part.config) if STOCK in c.__dict__]
    now = [config._attn_implementation for config in named]
    try:
        for config in named:
            config._attn_implementation_internal = name_before(config)
        return route(model)
    finally:
        for config, name in zip(named, now, strict=True):
            config._attn_implementation_internal = name
