"""Hooks on continuous batching (`model.generate_batch`, `transformers serve --continuous-batching`).

Transformers accepts "sdpa", eager and flash attention there by name. These functions are wrapped
once, on import, so that it also serves models that run our names. Each request is computed by
itself (attention/batched_requests.py).
"""

from __future__ import annotations

import copy
import logging
from importlib import import_module
from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ...config import MechanismConfig
from ...config.registry import named_configs
from ..attention.batched_requests import IDS_OF_STEP, find_states
from ..attention.hyper import patched_hosts, unwrap_hyper
from ..attention.stock import HYPER_DOT, OURS
from ..patching.checkpoint_config import all_configs
from ..patching.wrapping import wrap

logger: Any = logging.getLogger("hf_hyperattn")  # `warning_once` is Transformers'

BATCHING = "transformers.generation.continuous_batching"
MANAGER = import_module(f"{BATCHING}.continuous_api").ContinuousBatchingManager
#: The inputs of a step, made before the model is called.
INPUTS = import_module(f"{BATCHING}.input_outputs")


def list_running(model: Any) -> list[MechanismConfig]:
    """Return the configs of all mechanisms that a model runs, by name or by a patch."""
    names = {config._attn_implementation for config in all_configs(model)}
    by_name = [config for name, config in named_configs().items() if name in names]
    patched = [
        config
        for _, host in patched_hosts(model)
        for config in unwrap_hyper(host.hyper).mechanisms()
    ]
    return by_name + patched


@wrap("__init__", MANAGER)
def _make_manager(
    original, self, model, generation_config, continuous_batching_config, *args, **kwargs
):
    """Turn off what would lose the queries of earlier steps, if a mechanism reads them.

    Raises:
        ValueError: The settings copy or move the state of a request, which takes its queries away,
            or record steps as CUDA graphs.
    """
    if (
        is_ours(model)
        and model.device.type != "cpu"
        and asks_for_graphs(continuous_batching_config)
    ):
        raise ValueError(
            "continuous batching with CUDA graphs is refused for models that run hf_hyperattn: each request is "
            "computed by itself, and a graph cannot hold its size; allowed: use_cuda_graph=False, and no "
            "q_padding_interval_size or kv_padding_interval_size"
        )
    if is_ours(model) and any(config.reads_earlier_queries for config in list_running(model)):
        copies = getattr(generation_config, "num_return_sequences", None) or 1
        moved = bool(getattr(continuous_batching_config, "cpu_offload_space", 0))
        if copies > 1 or moved:
            setting = f"num_return_sequences={copies}" if copies > 1 else "cpu_offload_space"
            raise ValueError(
                f"sparse rules that select by earlier queries cannot go on with a copied or moved cache ({setting}) in "
                "continuous batching; allowed: one sequence for each request and cpu_offload_space=0, rules with "
                "query='own', or generate()"
            )
        if continuous_batching_config.allow_block_sharing:
            logger.warning_once(
                "hf_hyperattn: requests share no prefixes in continuous batching, since a sparse rule selects by "
                "earlier queries, which belong to one request; rules with query='own' share them"
            )
            continuous_batching_config = copy.copy(continuous_batching_config)
            continuous_batching_config.allow_block_sharing = False
    original(self, model, generation_config, continuous_batching_config, *args, **kwargs)


@wrap("switch_to_cb_friendly_attn", MANAGER)
def _switch_attention(original, self, model, *args, **kwargs):
    """Keep our names, and refuse mechanisms that continuous batching cannot serve.

    Raises:
        ValueError: A mechanism's result depends on how a text is cut into steps, or the manager was
            made for another patch of the model.
    """
    if not is_ours(model):
        return original(self, model, *args, **kwargs)
    configs = list_running(model)
    for config in configs:
        if config.depends_on_calls:
            raise ValueError(
                f"{config.mechanism} is refused in continuous batching: with query='chunk' a rule selects by the "
                "queries of a step, and other requests decide where steps end; allowed: query='own', 'first' or "
                "'previous', or generate()"
            )
    # A manager that is kept was made before a later patch. `__init__` calls this, too, before it
    # has a config.
    made_with = getattr(self, "continuous_batching_config", None)
    shares = getattr(made_with, "allow_block_sharing", False)
    if shares and any(config.reads_earlier_queries for config in configs):
        raise ValueError(
            "this manager of continuous batching was made before the model got sparse rules that select by earlier "
            "queries; call model.destroy_cached_continuous_batching_manager() first"
        )
    return None


def asks_for_graphs(settings: Any) -> bool:
    """Return whether settings of continuous batching turn CUDA graphs on.

    Without a word about them, Transformers leaves them off for our names.
    """
    wanted = getattr(settings, "use_cuda_graph", None)
    if wanted is not None:
        return any(wanted) if isinstance(wanted, tuple | list) else bool(wanted)
    names = "q_padding_interval_size", "kv_padding_interval_size"
    return any(getattr(settings, name, 0) for name in names)


def is_ours(model: Any) -> bool:
    """Return whether a model runs one of our names, `hyper_dot` among them."""
    return model.config._attn_implementation in OURS | {HYPER_DOT}


@wrap("attn_mask_is_needed", INPUTS)
def _needs_mask(original, config):
    """Return whether continuous batching must make a mask of all pairs."""
    return config._attn_implementation not in OURS | {HYPER_DOT} and original(config)


@wrap("prepare_batch_tensors", INPUTS.ContinuousBatchingIOs)
def _note_requests(original, self, requests_in_batch, *args, **kwargs):
    """Note which requests the next step holds, in the order of its row."""
    original(self, requests_in_batch, *args, **kwargs)
    ids = [future.state.request_id for future in requests_in_batch]
    setattr(self.cache, IDS_OF_STEP, ids)


@wrap("free_blocks", PagedAttentionCache)
def _forget_request(original, self, request_id, *args, **kwargs):
    """Forget the state of a request whose keys are given back."""
    original(self, request_id, *args, **kwargs)
    find_states(self).pop(request_id, None)
