"""DeBERTa-v2 and v3: disentangled attention, whose position terms come from the queries and keys themselves.

What differs. Scores are content to content plus content to position (c2p) plus position to content (p2c),
all over `sqrt(D * terms)`, `terms` being 1 + the number of position terms in use. The stock works on `[B*H,
N, D]`. The encoder multiplies the padding mask by itself (`[B, 1, N, N]`, integer or bool), calls no mask
function and passes no implementation name on; a padded row is hidden from everything. Queries may come from
another state (`query_states`, the enhanced mask decoder).

How it is routed. c2p and p2c are computed per call by the stock's own `disentangled_attention_bias`, so
gradients reach the position projections, and go on as `position_bias`; scaling carries `sqrt(D * terms)`;
the mask becomes bool. Position embeddings keep their dropout.
"""

from __future__ import annotations

import math

from .routing import AttentionRoute


class DebertaV2Route(AttentionRoute):
    """`DisentangledSelfAttention` of v2 through the attention interface."""

    @property
    def weights_dropout(self) -> float:
        """Probability with which weights are dropped."""
        return self.dropout.p

    def forward(
        self,
        hidden_states,
        attention_mask,
        output_attentions=False,
        query_states=None,
        relative_pos=None,
        rel_embeddings=None,
    ):
        mask = None if attention_mask is None else attention_mask.bool()
        context, weights = self.disentangled(
            hidden_states, mask, query_states, relative_pos, rel_embeddings
        )
        return context, weights if output_attentions else None

    def disentangled(self, hidden_states, mask, query_states, relative_pos, rel_embeddings):
        """Output `[B, N, C]` and weights, with a bool mask `[B, 1, N, N]` or None."""
        heads = self.num_attention_heads
        source = hidden_states if query_states is None else query_states
        query = self.transpose_for_scores(self.query_proj(source), heads)
        key = self.transpose_for_scores(self.key_proj(hidden_states), heads)
        value = self.transpose_for_scores(self.value_proj(hidden_states), heads)
        terms = 1 + sum(term in self.pos_att_type for term in ("c2p", "p2c"))
        bias = None
        if self.relative_attention and terms > 1:
            table = self.pos_dropout(rel_embeddings)
            bias = self.disentangled_attention_bias(query, key, relative_pos, table, terms)
            bias = bias.unflatten(0, (-1, heads))
        query, key, value = (states.unflatten(0, (-1, heads)) for states in (query, key, value))
        context, weights = self.attend(
            query,
            key,
            value,
            mask,
            scaling=1.0 / math.sqrt(query.shape[-1] * terms),
            dropout=self.weights_dropout,
            position_bias=bias,
        )
        return context.flatten(2), weights


ROUTES = {"DisentangledSelfAttention": DebertaV2Route}
