"""A Transformers cache with summaries of its keys, so that a generated token reads few of them.

With `evict=True` it also drops keys that no later token can attend to.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ...mechanisms.selection.cache import Keep, KeepWindows, LayerCache
from ...mechanisms.sparse.evicted import find_reaches
from ...mechanisms.sparse.layer import SparseLayer
from ...utils.readable import is_recorded
from .forgotten import ForgottenTokens
from .hosts import host_facts
from .hyper import patched_hosts, unwrap_hyper

logger = logging.getLogger("hf_hyperattn")


class HierarchicalLayer(DynamicLayer):
    """The cache of one layer, with the interface of Transformers.

    Attention finds the `LayerCache` by the tensors that `update` returns.

    Args:
        keep: Tokens that must stay. None: all. If tokens may be evicted, `update` returns
            `ForgottenTokens`, as long as the masks.
    """

    def __init__(self, keep: Keep = None):
        super().__init__()
        self.keep = keep
        self.store: Any = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the store for keys and values [B, Hkv, n, d] of this dtype and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.store = LayerCache(key_states, value_states, self.keep)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Add tokens [B, Hkv, n, d], and return all keys and values so far.

        Raises:
            ValueError: The keys need gradients, or an evicting cache is compiled or traced.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError(
                "HierarchicalCache was given keys that want gradients, which it writes into one buffer; allowed: "
                "torch.no_grad() or generate(), or training with use_cache=False"
            )
        # Eviction chooses shapes in Python, which a recorded graph would not do again.
        if self.keep is not None and is_recorded():
            raise ValueError(
                "HierarchicalCache(evict=True) cannot be compiled or traced; allowed: evict=False"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.store.append(key_states, value_states)
        return self._refresh_views()

    def _refresh_views(self) -> tuple[Tensor, Tensor]:
        """Return the current keys and values, and update the attributes that Transformers reads."""
        keys, values = self.store.show_tokens()
        if self.keep is not None:
            keys, values = ForgottenTokens(keys), ForgottenTokens(values)
        self.keys, self.values = keys, values
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Args:
            tokens_to_remove: 0 or negative, as in `DynamicCache`.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}) is not allowed; allowed: 0 or minus the number of tokens to remove"
            )
        # 0 removes nothing, as in `DynamicCache`.
        if tokens_to_remove and self.is_initialized:
            self.store.crop(max(0, self.get_seq_length() + tokens_to_remove))
            self._refresh_views()

    def _select_rows(self, rows: Tensor) -> None:
        """Keep these rows of the batch, int64; a row may be repeated."""
        if self.get_seq_length() > 0:
            self.store.select_rows(rows)
            self._refresh_views()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows of the chosen beams, int64 [B]."""
        self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch, int64 or bool [B]."""
        if self.is_initialized:
            # Turns a bool index into row numbers.
            indices = self._row_numbers()[indices]
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self.is_initialized:
            self._select_rows(self._row_numbers().repeat_interleave(repeats))

    def _row_numbers(self) -> Tensor:
        """Return the numbers of all rows of the batch, int64 [B]."""
        return torch.arange(len(self.store.tokens[0].room))

    def reset(self) -> None:
        """Remove all tokens, and free their memory."""
        self.keys = self.values = self.store = None
        self.is_initialized = False

    def offload(self) -> None:
        """Raise: this cache cannot be offloaded.

        Raises:
            ValueError: Always. Every token needs the summaries on the device.
        """
        raise ValueError(
            "HierarchicalCache cannot be offloaded; use DynamicCache(offloading=True), which is slower"
        )


class HierarchicalCache(DynamicCache):
    """Cache for hierarchical (tying="key") and sparse attention.

    Pass it to `generate(..., past_key_values=...)`.
    It holds all keys and values, and summaries of them. Outputs are the same as with any other
    cache. For HSA the summaries are means over the windows of every level. A new token then costs
    O(near + refine_top_k · branching + windows of the largest size) reads. For sparse rules that
    choose pages they are summaries of the pages. Layers with a sliding window keep the layer that
    `DynamicCache` gives them.

    Args:
        config: Config of the model, or the model itself. Needed if the layers are not all alike.
        evict: Drop the keys that no later token can attend to. This applies to layers with
            mode="replace" and a single mechanism: HSA with refine_top_k=0, or sparse rules. Of
            sparse rules it applies to key heads whose query heads all have a `Window` or a rule
            with `reach`. All other layers keep everything. If no layer can evict, a warning says
            why.

    Raises:
        ValueError: `evict` without the model.
    """

    def __init__(self, config=None, evict: bool = False):
        super().__init__(config=getattr(config, "config", config))
        if evict and self.layer_class_to_replicate is not None:
            # Without a config `DynamicCache` makes layers as they come, and nothing is known of
            # them yet.
            raise ValueError(
                f"HierarchicalCache(evict=True) was given {type(config).__name__}; allowed: the patched model"
            )
        plain = [i for i, layer in enumerate(self.layers) if type(layer) is DynamicLayer]
        keep = choose_keeps(config, plain) if evict else dict.fromkeys(plain)
        for index in plain:
            self.layers[index] = HierarchicalLayer(keep[index])
        # Layers that the cache makes during generation, if it has no config.
        if self.layer_class_to_replicate is DynamicLayer:
            self.layer_class_to_replicate = HierarchicalLayer


def choose_keeps(model, layers: list[int]) -> dict[int, Keep]:
    """Return which tokens each layer of a patched model must keep; None means all.

    Logs a warning if all layers keep all tokens.

    Args:
        layers: Numbers of the layers.
    """
    hosts = patched_hosts(model) if isinstance(model, nn.Module) else ()
    by_layer = {getattr(host, "layer_idx", None): (name, host) for name, host in hosts}
    found = {i: _choose_keep(*by_layer[i]) if i in by_layer else "is not patched" for i in layers}
    if layers and all(isinstance(keep, str) for keep in found.values()):
        logger.warning(
            f"hf_hyperattn: HierarchicalCache(evict=True) can forget nothing of this model: layer {layers[0]} "
            f"{found[layers[0]]}; keys can be evicted under HsaConfig(tying='key', refine_top_k=0), and for key heads "
            "whose query heads all have the sparse rule Window, with mode='replace' and no other mechanism"
        )
    return {i: None if isinstance(keep, str) else keep for i, keep in found.items()}


def _choose_keep(name: str, host) -> KeepWindows | tuple | str:
    """Return the tokens that an attention layer must keep, or the reason why all must stay."""
    hyper = unwrap_hyper(host.hyper)
    layers = hyper.layers()
    layer = layers[0]
    if len(layers) != 1 or not layer.reads_forgotten or layer.mode != "replace":
        return f"runs {' and '.join(c.mechanism for c in hyper.mechanisms())}, mode={hyper.config.mode!r}"
    if isinstance(layer, SparseLayer):
        facts = host_facts(name, host, 0)
        if not facts.is_causal:
            return "is not causal, and is given no cache"
        rules = layer.find_rules(0, facts.heads, facts.heads, is_causal=True)
        reaches = find_reaches(rules, facts.kv_heads)
        if not any(reaches):
            return "has in every group of query heads one whose rule may look at any key"
        return reaches
    # HSA: refinement, and heads without HSA, may attend to any key.
    rule = layer.config.rule(True, hyper.heads, type(host).__name__)
    reads_all_keys = layer.config.tying == "both" or layer.heads is not None
    if reads_all_keys or not layer.config.windows or _largest(rule.refine_top_k):
        return "has heads that HSA lets look at any key"
    # One cache serves all heads, so the head that reads most decides.
    return KeepWindows(layer.config.windows, _largest(rule.near), _largest(rule.sinks))


def _largest(numbers: int | tuple[int, ...]) -> int:
    """Return the largest number of the heads; a single number is the same for all heads."""
    return max(numbers) if isinstance(numbers, tuple) else numbers
