"""What a patched checkpoint becomes while it is built to be loaded: patched again, before its weights come."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.utils import logging

from ..config import HyperAttnConfig
from .patching import attach, choose_hosts, patched_hosts, route
from .refusal import models_being_built
from .stock import PATCHED, STOCK, stock_name

logger = logging.get_logger(__name__)


def restore(model: PreTrainedModel) -> None:
    """Patch a model whose config says that it was; the outermost model does it, since hosts are named from there.

    `config.hyperattn` without hosts holds parameters of mechanisms used by name, and patches nothing.

    Raises:
        ValueError: the config is malformed, or names hosts that the model does not have.
    """
    config = HyperAttnConfig.from_dict(model.config.hyperattn)
    if config.hosts is None or any(patched_hosts(model)):
        return
    if any(getattr(outer.config, "hyperattn", None) is not None for outer in models_being_built(model)):
        return
    newly_routed = route_as_before(model)
    chosen = choose_hosts(model, config)
    attach(model, config, chosen, newly_routed)
    active = {module.config._attn_implementation for module, _ in chosen}
    if active != {PATCHED}:
        logger.warning(
            f"{type(model).__name__} was saved patched by hf_hyperattn, and is loaded with "
            f"attn_implementation={active.pop()!r}: what was added has no effect until "
            f"model.set_attn_implementation({PATCHED!r})"
        )


def route_as_before(model: PreTrainedModel) -> bool:
    """Route a served family while its config names the implementation from before, so that it can be undone."""
    name = model.config._attn_implementation
    if not hasattr(model.config, STOCK):
        return route(model)
    model.config._attn_implementation_internal = stock_name(model.config)
    try:
        return route(model)
    finally:
        model.config._attn_implementation_internal = name
