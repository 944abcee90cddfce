"""Continuous batching (`model.generate_batch`, `transformers serve --continuous-batching`): requests share every step.

Transformers lets in "sdpa", eager and flash attention by their names, and makes a mask for the first two. Names of ours
get the same mask, which says of every pair whether it belongs together; a mechanism that asks for more than that, where
a key stands in its text, is refused.
"""

from __future__ import annotations

from importlib import import_module

from ..registry import named_configs
from .checkpoint_config import all_configs, inner, patched_hosts
from .stock import OURS
from .wrapping import wrap

BATCHING = "transformers.generation.continuous_batching"


@wrap("switch_to_cb_friendly_attn", import_module(f"{BATCHING}.continuous_api").ContinuousBatchingManager)
def _switch(original, self, model, *args, **kwargs):
    if model.config._attn_implementation not in OURS:
        return original(self, model, *args, **kwargs)
    running = {config._attn_implementation for config in all_configs(model)}
    mechanisms = [config for name, config in named_configs().items() if name in running]
    mechanisms += [config for _, host in patched_hosts(model) for config in inner(host.hyper).mechanisms()]
    for config in mechanisms:
        if config.positional:
            raise ValueError(
                f"{config.mechanism} is refused in continuous batching: it needs the place of every key in its own "
                "text, and Transformers hands to attention the keys of all requests without it; allowed: generate(), "
                "or continuous batching of a model without it"
            )
    return None


@wrap("attn_mask_is_needed", import_module(f"{BATCHING}.input_outputs"))
def _needs_mask(original, config):
    return config._attn_implementation in OURS or original(config)
