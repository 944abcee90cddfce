"""CPM-Ant: bucketed relative positions, learned per segment, and rows without a visible key give zero.

What differs. The model builds a bool mask `[B, Q, K]` (True = take part; context and padding rules inside
it) and `position_bias` `[B, H, Q, K]`, calls no mask function, fills with -inf and after the softmax sets
hidden weights to zero, so that a row of padding yields zeros instead of NaN. The module keeps no config;
dropout may be None.

How it is routed. Mask and bias go on; rows without a visible key are set to zero afterwards.
"""

from __future__ import annotations

from .layouts import ProjectedRoute


class CpmAntRoute(ProjectedRoute):
    """`CpmAntAttention` through the attention interface."""

    projections = ("project_q", "project_k", "project_v")
    heads = "num_heads"

    def forward(
        self,
        hidden_q,
        hidden_kv,
        attention_mask,
        position_bias,
        output_attentions=False,
        cache=None,
        use_cache=None,
        **kwargs,
    ):
        query, key, value = self.project(hidden_q, hidden_kv)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        visible = attention_mask.reshape(query.shape[0], 1, query.shape[2], key.shape[2]).bool()
        dropout = 0.0 if self.dropout is None else self.dropout.p
        context, weights = self.merge(
            query, key, value, visible, position_bias=position_bias, dropout=dropout
        )
        context = context.masked_fill(~visible.any(-1).transpose(1, 2), 0.0)
        if weights is not None:
            weights = weights.masked_fill(~visible, 0.0)
        return self.attention_out(context), weights if output_attentions else None


ROUTES = {"CpmAntAttention": CpmAntRoute}
