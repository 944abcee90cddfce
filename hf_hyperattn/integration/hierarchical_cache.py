"""A Transformers cache that keeps the means of windows, so that a generated token reads few keys, not all."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..mechanisms.hsa.store import STORE, Store


class HierarchicalLayer(DynamicLayer):
    """The cache of one layer: a `Store`, which attention finds on the key tensor that `update` returns."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.store = Store(key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Add tokens [B, Hkv, n, d]; returns all keys and values so far."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError(
                "HierarchicalCache was given keys that want gradients, which it writes into one buffer; allowed: "
                "torch.no_grad() or generate(), or training with use_cache=False"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.store.append(key_states, value_states)
        return self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (grown.view() for grown in self.store.tokens)
        setattr(self.keys, STORE, self.store)
        return self.keys, self.values

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
            self.store.pick(rows)
            self._show()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._pick(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._pick(torch.arange(len(self.keys))[indices] if self.is_initialized else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._pick(torch.arange(len(self.keys)).repeat_interleave(repeats))

    def reset(self) -> None:
        self.keys = self.values = self.store = None
        self.is_initialized = False

    def offload(self) -> None:
        raise ValueError(
            "HierarchicalCache cannot be offloaded; use DynamicCache(offloading=True), which is slower"
        )


class HierarchicalCache(DynamicCache):
    """A cache for models with hierarchical attention (tying="key"): `generate(..., past_key_values=...)`.

    It holds all keys and values, and beside them their means over the windows of every level, so that a new token
    costs O(near + refine_top_k · branching + windows of the largest size) reads. Outputs are those of any other cache.
    Layers with a sliding window keep the layer that `DynamicCache` gives them.

    Args:
        config: of the model, or the model itself; needed where layers are not all alike.
    """

    def __init__(self, config=None):
        super().__init__(config=getattr(config, "config", config))
        self.layers = [HierarchicalLayer() if type(x) is DynamicLayer else x for x in self.layers]
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = HierarchicalLayer
