"""DeBERTa v1: disentangled attention with one fused projection and biases kept apart from it.

What differs from v2. `in_proj` interleaves q, k, v per head and has no bias; `q_bias` and `v_bias` are
parameters of the module. Queries are divided by `sqrt(D * terms)` before the product, and c2p is taken from
the divided queries. `terms` counts every entry of `pos_att_type`. `talking_head` mixes scores and weights
across heads, around the softmax: no attention call can say that, so such a model is refused. Separate
`query_states` fail in the original.

How it is routed. Queries go on undivided with the divisor as scaling; the bias is computed per call by the
stock's `disentangled_att_bias` and goes on as `position_bias`; the mask becomes bool.
"""

from __future__ import annotations

import math

from .routing import AttentionRoute


class DebertaRoute(AttentionRoute):
    """`DisentangledSelfAttention` of v1 through the attention interface."""

    @classmethod
    def check(cls, module):
        if module.talking_head:
            raise ValueError(
                "deberta: config.talking_head=True mixes heads around the softmax, which no attention call can "
                "express; only talking_head=False is served"
            )

    def forward(
        self,
        hidden_states,
        attention_mask,
        output_attentions=False,
        query_states=None,
        relative_pos=None,
        rel_embeddings=None,
    ):
        if query_states is not None:
            raise ValueError(
                "deberta: separate query_states are not served (the original fails on them too)"
            )
        query, key, value = self.transpose_for_scores(self.in_proj(hidden_states)).chunk(3, dim=-1)
        query = query + self.transpose_for_scores(self.q_bias[None, None, :])
        value = value + self.transpose_for_scores(self.v_bias[None, None, :])
        terms = 1 + len(self.pos_att_type)
        scaling = 1.0 / math.sqrt(query.shape[-1] * terms)
        bias = None
        if (
            self.relative_attention
            and self.pos_att_type
            and rel_embeddings is not None
            and relative_pos is not None
        ):
            table = self.pos_dropout(rel_embeddings)
            bias = self.disentangled_att_bias(query * scaling, key, relative_pos, table, terms)
        context, weights = self.attend(
            query,
            key,
            value,
            None if attention_mask is None else attention_mask.bool(),
            scaling=scaling,
            dropout=self.dropout.p,
            position_bias=bias,
        )
        return context.flatten(2), weights if output_attentions else None


ROUTES = {"DisentangledSelfAttention": DebertaRoute}
