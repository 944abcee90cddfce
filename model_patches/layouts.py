"""What families of one layout share: names of the projections, the split into heads, the two kinds of cache.

A layout is data on the class (`projections`, `heads`, `dropouts`); what differs beyond names is a method in
the family's own file.
"""

from __future__ import annotations

import sys

import torch
from transformers.cache_utils import EncoderDecoderCache

from .routing import AttentionRoute

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value, [B, H, T, D]


def causal_decoder(module: torch.nn.Module) -> bool:
    """Whether the module is a decoder's, and its file in Transformers hides the future from decoders.

    It does not in megatron-bert, rembert and roformer of Transformers 5.17, nor in tapas of any: without a mask, their
    decoders attend to everything, and a causal route would be another model.
    """
    stock = sys.modules.get(
        type(module).__module__
    )  # a routed class has the module path of the stock class
    return bool(getattr(module, "is_decoder", False)) and hasattr(stock, "create_causal_mask")


class ProjectedRoute(AttentionRoute):
    """An attention module with three projections, `[B, T, C]` in, heads side by side in the last axis."""

    projections = ("query", "key", "value")
    heads = "num_attention_heads"
    dropouts = "dropout"

    @property
    def is_causal(self) -> bool:  # type: ignore[override]  # nobody sets it
        """Whether self-attention is causal, as far as the module knows."""
        return bool(getattr(self, "is_decoder", False))

    def split(self, states: torch.Tensor) -> torch.Tensor:
        """`[B, T, H * D]` to `[B, H, T, D]`."""
        return states.unflatten(-1, (getattr(self, self.heads), -1)).transpose(1, 2)

    def project(self, states: torch.Tensor, context: torch.Tensor | None = None) -> Heads:
        """Query of `states`, key and value of `context` (of `states` where that is None), split into heads."""
        query, key, value = (getattr(self, name) for name in self.projections)
        source = states if context is None else context
        return self.split(query(states)), self.split(key(source)), self.split(value(source))

    def project_cached(self, states, context, cache, rotate=None) -> Heads:
        """As `project`, with a cache; cross attention (`context` given) fills its part once and then reads it.

        `rotate(query, key, value)`, where given, is applied before the cache.
        """
        part, pair = cache, isinstance(cache, EncoderDecoderCache)
        if pair:
            part = cache.self_attention_cache if context is None else cache.cross_attention_cache
        if pair and context is not None and cache.is_updated.get(self.layer_idx):
            layer = part.layers[self.layer_idx]
            return self.split(getattr(self, self.projections[0])(states)), layer.keys, layer.values
        query, key, value = self.project(states, context)
        if rotate is not None:
            query, key, value = rotate(query, key, value)
        if part is not None:
            key, value = part.update(key, value, self.layer_idx)
            if pair and context is not None:
                cache.is_updated[self.layer_idx] = True
        return query, key, value

    def merge(self, query, key, value, mask, **options) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; output `[B, Q, H * D]` and the weights. Scaling is `D ** -0.5` unless given."""
        dropout = getattr(self, self.dropouts)
        options.setdefault("scaling", query.shape[-1] ** -0.5)
        options.setdefault("dropout", getattr(dropout, "p", dropout))
        context, weights = self.attend(query, key, value, mask, **options)
        return context.flatten(2), weights
