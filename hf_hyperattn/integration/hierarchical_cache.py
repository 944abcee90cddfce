"""A Transformers cache that keeps what stands for many keys, so that a generated token reads few of them, not all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..engines.score import WORKING_COPIES
from ..mechanisms.hsa.cache.mean_cache import MEAN_CACHES, GrowingTensor, Keep, MeanCache
from ..mechanisms.hsa.layer import HsaLayer
from ..mechanisms.sparse.page_cache import PAGE_CACHES, PageCache
from .checkpoint_config import inner, patched_hosts


class HierarchicalLayer(DynamicLayer):
    """The cache of one layer: a `MeanCache` and a `PageCache`, which attention knows by what `update` returns.

    Args:
        keep: what to keep; None: everything. Where something may be forgotten, the keys and values that `update`
            returns are placeholders, NaN, of the length that masks are made for.
    """

    def __init__(self, keep: Keep | None = None):
        super().__init__()
        self.keep = keep
        self.store: Any = None
        self.pages = PageCache()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the store for keys and values of this shape, dtype and device, [B, Hkv, n, d]."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.store = MeanCache(key_states, value_states, self.keep)
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
        self.keys, self.values = (self._shown(grown) for grown in self.store.tokens)
        for shown in (self.keys, self.values):
            MEAN_CACHES[shown] = self.store
        if self.store.exact is not self.store.tokens:
            WORKING_COPIES[self.keys] = self.store.exact[0].view()
        if self.keep is None:
            PAGE_CACHES[self.keys] = self.pages
        return self.keys, self.values

    def _shown(self, grown: GrowingTensor) -> Tensor:
        if self.keep is None:
            return grown.view()
        room = grown.room
        return room.new_full((), float("nan")).expand(*room.shape[:2], grown.length, room.shape[3])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; the number is 0 or negative, as in `DynamicCache`."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}) is not allowed; allowed: 0 or minus the number of tokens to remove"
            )
        if tokens_to_remove and self.is_initialized:
            length = max(0, self.get_seq_length() + tokens_to_remove)
            self.store.crop(length)
            self.pages.crop(length)
            self._show()

    def _pick(self, rows: Tensor) -> None:
        if self.get_seq_length() > 0:
            self.store.pick(rows)
            self.pages.pick(rows)
            self._show()

    def _rows(self) -> int:
        return len(self.store.exact[0].room)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of the chosen beams, int64 [B]."""
        self._pick(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch: int64 or bool [B]."""
        self._pick(torch.arange(self._rows())[indices] if self.is_initialized else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self.is_initialized:
            self._pick(torch.arange(self._rows()).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget all tokens, and free what held them."""
        self.keys = self.values = self.store = None
        self.pages = PageCache()
        self.is_initialized = False

    def offload(self) -> None:
        """Refused.

        Raises:
            ValueError: always; the means are needed on the device at every token.
        """
        raise ValueError("HierarchicalCache cannot be offloaded; use DynamicCache(offloading=True), which is slower")


class HierarchicalCache(DynamicCache):
    """A cache for hierarchical (tying="key") and sparse attention: `generate(..., past_key_values=...)`.

    It holds all keys and values. Beside them, for HSA, their means over the windows of every level, so that a new token
    costs O(near + refine_top_k · branching + windows of the largest size) reads; for sparse rules that choose pages,
    the summaries of these. Outputs are those of any other cache.
    Layers with a sliding window keep the layer that `DynamicCache` gives them.

    Args:
        config: of the model, or the model itself; needed where layers are not all alike.
        evict: forget keys that no later token can see, so that memory is O(near + windows of the largest size). For a
            model all of whose layers are patched with HSA alone, mode="replace", and refine_top_k=0.

    Raises:
        ValueError: `evict` for a model that would read what is forgotten.
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
    """What each of these layers of a patched model has to keep.

    Raises:
        ValueError: one that reads all keys.
    """
    hosts = patched_hosts(model) if isinstance(model, nn.Module) else ()
    by_layer: dict[Any, Any] = {getattr(host, "layer_idx", None): host for _, host in hosts}
    keeps: dict[int, Keep] = {}
    for index in layers:
        host = by_layer.get(index)
        keep = None if host is None else _keep(inner(host.hyper), host)
        if keep is None:
            raise ValueError(
                f"HierarchicalCache(evict=True) cannot serve layer {index}, which reads all keys; allowed: a model all "
                "of whose layers are patched with HsaConfig(refine_top_k=0) alone, tying='key', mode='replace'"
            )
        keeps[index] = keep
    return keeps


def _keep(hyper, host) -> Keep | None:
    """What a host needs; None for one that reads all keys."""
    layers = hyper.layers()
    if len(layers) != 1 or not isinstance(layers[0], HsaLayer):
        return None
    (layer,) = layers
    if layer.config.tying == "both" or layer.mode != "replace" or layer.heads is not None:
        return None
    rule = layer.config.rule(True, hyper.heads, type(host).__name__)
    most = lambda x: max(x) if isinstance(x, tuple) else x
    if not layer.config.windows or most(rule.refine_top_k):
        return None
    return Keep(layer.config.windows, most(rule.near), most(rule.sinks))
