"""BLOOM: alibi inside one fused product, no rotary embedding, residual added by the attention module itself.

What differs. Scores are `alibi + q.k / sqrt(D)`, computed by `alibi.baddbmm(..., beta,
alpha=inv_norm_factor)`; alibi arrives as `[B*H, 1, K]`, already aware of padding, and its value depends on
the key alone (a constant per row cancels in softmax). The model builds its mask with `create_causal_mask`
and the stock module *adds* it: a bool mask of another implementation would shift scores by one. The softmax
is float32. The module ends in dropout and the residual. `slow_but_exact` sums the output projection in
slices, as trained under tensor parallelism.

How it is routed. The fused projection, the cache and the output stay; alibi becomes `position_bias`
`[B, H, Q, K]`, the mask goes on as it came.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from .routing import AttentionRoute


class BloomRoute(AttentionRoute):
    """`BloomAttention` through the attention interface."""

    is_causal = True

    def forward(self, hidden_states, residual, alibi, attention_mask, layer_past=None, **kwargs):
        batch, length, _ = hidden_states.shape
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        context, weights = self.attend(
            query,
            key,
            value,
            attention_mask,
            scaling=self.inv_norm_factor,
            dropout=self.attention_dropout.p,
            position_bias=self.beta * alibi.view(batch, self.num_heads, 1, -1),
        )
        output = self._project(context.reshape(batch, length, self.hidden_size))
        return residual + F.dropout(output, p=self.hidden_dropout, training=self.training), weights

    def _project(self, context: torch.Tensor) -> torch.Tensor:
        if not (self.pretraining_tp > 1 and self.slow_but_exact):
            return self.dense(context)
        width = self.hidden_size // self.pretraining_tp
        parts = zip(
            context.split(width, dim=-1), self.dense.weight.split(width, dim=-1), strict=True
        )
        total: Any = sum(F.linear(states, weight) for states, weight in parts)
        return total


ROUTES = {"BloomAttention": BloomRoute}
