"""What a patched checkpoint becomes while it is built to be loaded: patched again, before its weights come."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.utils import logging

from ..config import HyperAttnConfig
from .patching import attach, choose_hosts, route
from .records import parts, patched_hosts, recorded_hosts, tree
from .refusal import models_being_built
from .stock import PATCHED, STOCK, stock_name

logger = logging.get_logger(__name__)


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
    newly_routed = route_as_before(model)
    chosen = choose_hosts(model, config)
    attach(model, config, chosen, newly_routed)
    others = sorted({module.config._attn_implementation for module, _ in chosen} - {PATCHED})
    if others:
        logger.warning(
            f"{type(model).__name__} was saved patched by hf_hyperattn, and is loaded with "
            f"attn_implementation={others[0]!r}: what was added has no effect until "
            f"model.set_attn_implementation({PATCHED!r})"
        )
    return True


def settle_stock(model: PreTrainedModel) -> None:
    """An implementation from before that this machine or family does not have becomes what Transformers would take."""
    for part in parts(model):
        if STOCK in part.config.__dict__:
            try:
                name = part.get_correct_attn_implementation(stock_name(part.config), is_init_check=True)
            except (ValueError, ImportError):
                name = part.get_correct_attn_implementation(None, is_init_check=True)
            setattr(part.config, STOCK, name)


def route_as_before(model: PreTrainedModel) -> bool:
    """Route served families while their configs name the implementation from before, so that it can be undone."""
    named = [c for part in parts(model) for c in tree(part.config) if STOCK in c.__dict__]
    now = [config._attn_implementation for config in named]
    try:
        for config in named:
            config._attn_implementation_internal = stock_name(config)
        return route(model)
    finally:
        for config, name in zip(named, now, strict=True):
            config._attn_implementation_internal = name
