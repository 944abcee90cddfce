"""MPNet: BERT's attention with one table of relative-position biases shared by all layers.

What differs. The encoder computes `position_bias` `[B, H, Q, K]` once (T5's buckets) and every layer adds
it to the scaled scores; the mask is added too. The output projection `o` is inside the attention module. No
cache, no causality, and the module keeps no config.

How it is routed. The table's values go on as `position_bias`, the mask as it came.
"""

from __future__ import annotations

from .routing import AttentionRoute


class MPNetRoute(AttentionRoute):
    """`MPNetSelfAttention` through the attention interface."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_bias=None,
        output_attentions=False,
        **kwargs,
    ):
        heads = (*hidden_states.shape[:-1], self.num_attention_heads, self.attention_head_size)
        query, key, value = (
            proj(hidden_states).view(heads).transpose(1, 2) for proj in (self.q, self.k, self.v)
        )
        context, weights = self.attend(
            query,
            key,
            value,
            attention_mask,
            scaling=self.attention_head_size**-0.5,
            dropout=self.dropout.p,
            position_bias=position_bias,
        )
        output = self.o(context.flatten(2))
        return (output, weights) if output_attentions else (output,)


ROUTES = {"MPNetSelfAttention": MPNetRoute}
