"""A Transformers cache that keeps what stands for many keys, so that a generated token reads few of them, not all."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..mechanisms.selection.cache import Keep, KeepWindows, LayerCache
from ..mechanisms.sparse.evicted import find_reaches
from ..mechanisms.sparse.layer import SparseLayer
from ..readable import is_recorded
from .checkpoint_config import inner, patched_hosts
from .forgotten import ForgottenTokens
from .hosts import host_facts

logger = logging.getLogger("hf_hyperattn")


class HierarchicalLayer(DynamicLayer):
    """The cache of one layer, as Transformers calls it; attention finds its `LayerCache` by what `update` returns.

    Args:
        keep: what to keep; None: everything. If something may be forgotten, `update` returns `ForgottenTokens` of the
            length that masks are made for.
    """

    def __init__(self, keep: Keep = None):
        super().__init__()
        self.keep = keep
        self.store: Any = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the store for keys and values of this shape, dtype and device, [B, Hkv, n, d]."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.store = LayerCache(key_states, value_states, self.keep)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Add tokens [B, Hkv, n, d]; returns all keys and values so far."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError(
                "HierarchicalCache was given keys that want gradients, which it writes into one buffer; allowed: "
                "torch.no_grad() or generate(), or training with use_cache=False"
            )
        if self.keep is not None and is_recorded():
            raise ValueError(
                "HierarchicalCache(evict=True) cannot be compiled or traced; allowed: evict=False"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.store.append(key_states, value_states)
        return self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        keys, values = self.store.show_tokens()
        if self.keep is not None:
            keys, values = ForgottenTokens(keys), ForgottenTokens(values)
        self.keys, self.values = keys, values
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; the number is 0 or negative, as in `DynamicCache`."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}) is not allowed; allowed: 0 or minus the number of tokens to remove"
            )
        if tokens_to_remove and self.is_initialized:
            self.store.crop(max(0, self.get_seq_length() + tokens_to_remove))
            self._show()

    def _pick(self, rows: Tensor) -> None:
        if self.get_seq_length() > 0:
            self.store.select_rows(rows)
            self._show()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of the chosen beams, int64 [B]."""
        self._pick(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch: int64 or bool [B]."""
        self._pick(
            torch.arange(len(self.store.tokens[0].room))[indices]
            if self.is_initialized
            else indices
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self.is_initialized:
            self._pick(torch.arange(len(self.store.tokens[0].room)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget all tokens, and free what held them."""
        self.keys = self.values = self.store = None
        self.is_initialized = False

    def offload(self) -> None:
        """Refused.

        Raises:
            ValueError: always; the means are needed on the device at every token.
        """
        raise ValueError(
            "HierarchicalCache cannot be offloaded; use DynamicCache(offloading=True), which is slower"
        )


class HierarchicalCache(DynamicCache):
    """A cache for hierarchical (tying="key") and sparse attention: `generate(..., past_key_values=...)`.

    It holds all keys and values. Beside them, for HSA, their means over the windows of every level, so that a new token
    costs O(near + refine_top_k · branching + windows of the largest size) reads; for sparse rules that choose pages,
    the summaries of these. Outputs are those of any other cache.
    Layers with a sliding window keep the layer that `DynamicCache` gives them.

    Args:
        config: of the model, or the model itself; needed where layers are not all alike.
        evict: forget the keys that no later token can see: of layers that are patched with HSA alone, mode="replace",
            where refine_top_k=0, and of those with sparse rules alone, mode="replace", the key heads all of whose query
            heads have a `Window` or a rule with `reach`. The others keep all; where all do, a warning says why.

    Raises:
        ValueError: `evict` without the model.
    """

    def __init__(self, config=None, evict: bool = False):
        super().__init__(config=getattr(config, "config", config))
        if evict:
            if self.layer_class_to_replicate is not None:
                raise ValueError(
                    f"HierarchicalCache(evict=True) was given {type(config).__name__}; allowed: the patched model"
                )
        plain = [i for i, layer in enumerate(self.layers) if type(layer) is DynamicLayer]
        keep = what_to_keep(config, plain) if evict else dict.fromkeys(plain)
        for index in plain:
            self.layers[index] = HierarchicalLayer(keep[index])
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = HierarchicalLayer


def what_to_keep(model, layers: list[int]) -> dict[int, Keep]:
    """What each of these layers of a patched model has to keep; None: everything. Warns where all keep that."""
    hosts = patched_hosts(model) if isinstance(model, nn.Module) else ()
    by_layer = {getattr(host, "layer_idx", None): (name, host) for name, host in hosts}
    found = {i: _keep(*by_layer[i]) if i in by_layer else "is not patched" for i in layers}
    if layers and all(isinstance(keep, str) for keep in found.values()):
        logger.warning(
            f"hf_hyperattn: HierarchicalCache(evict=True) can forget nothing of this model: layer {layers[0]} "
            f"{found[layers[0]]}; forgotten are keys under HsaConfig(tying='key', refine_top_k=0), and those of key "
            "heads all of whose query heads have the sparse rule Window, with mode='replace' and no mechanism beside"
        )
    return {i: None if isinstance(keep, str) else keep for i, keep in found.items()}


def _keep(name: str, host) -> KeepWindows | tuple | str:
    """What a host needs, or why that is everything."""
    hyper = inner(host.hyper)
    layers = hyper.layers()
    layer = layers[0]
    if len(layers) != 1 or not layer.reads_forgotten or layer.mode != "replace":
        return f"runs {' and '.join(c.mechanism for c in hyper.mechanisms())}, mode={hyper.config.mode!r}"
    if isinstance(layer, SparseLayer):
        facts = host_facts(name, host, 0)
        if not facts.is_causal:
            return "is not causal, and is given no cache"
        reaches = find_reaches(
            layer.find_rules(0, facts.heads, facts.heads, is_causal=True), facts.kv_heads
        )
        return (
            reaches
            if any(reaches)
            else "has in every group of query heads one whose rule may look at any key"
        )
    rule = layer.config.rule(True, hyper.heads, type(host).__name__)
    most = lambda x: max(x) if isinstance(x, tuple) else x
    if (
        layer.config.tying == "both"
        or layer.heads is not None
        or not layer.config.windows
        or most(rule.refine_top_k)
    ):
        return "has heads that HSA lets look at any key"
    return KeepWindows(layer.config.windows, most(rule.near), most(rule.sinks))
