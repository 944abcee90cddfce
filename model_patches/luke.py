"""LUKE: words and entities in one sequence, with a query projection for each pair of kinds.

What differs. The module takes words and entities apart and returns them apart. With entity-aware attention
a word asks words by `query` and entities by `w2e_query`; an entity asks words by `e2w_query` and entities
by `e2e_query`; keys and values are common. The mask is added to the scores.

How it is routed. The main query of a word is `query`'s, of an entity `e2e_query`'s. What the two other
projections change in the cross blocks is computed exactly and goes on as `position_bias`, zero in the
blocks of equal kind; so the sum is the original score, and gradients reach all four projections.
"""

from __future__ import annotations

import torch

from .layouts import ProjectedRoute


class LukeRoute(ProjectedRoute):
    """`LukeSelfAttention` through the attention interface."""

    def forward(
        self, word_hidden_states, entity_hidden_states, attention_mask=None, output_attentions=False
    ):
        words, entities = word_hidden_states, entity_hidden_states
        both = words if entities is None else torch.cat([words, entities], dim=1)
        query, key, value = self.project(both)
        bias = None
        if self.use_entity_aware_attention and entities is not None:
            query, bias = self._by_kind(query, key, words, entities)
        context, weights = self.merge(query, key, value, attention_mask, position_bias=bias)
        length = words.shape[1]
        outputs = context[:, :length], None if entities is None else context[:, length:]
        return (*outputs, weights) if output_attentions else outputs

    def _by_kind(self, query, key, words, entities):
        length, scale = words.shape[1], query.shape[-1] ** -0.5
        word_query, entity_query = query[:, :, :length], self.split(self.e2e_query(entities))
        to_entities = (self.split(self.w2e_query(words)) - word_query) @ key[
            :, :, length:
        ].transpose(2, 3)
        to_words = (self.split(self.e2w_query(entities)) - entity_query) @ key[
            :, :, :length
        ].transpose(2, 3)
        above = torch.cat(
            [to_entities.new_zeros(*to_entities.shape[:3], length), to_entities], dim=3
        )
        below = torch.cat(
            [to_words, to_words.new_zeros(*to_words.shape[:3], entities.shape[1])], dim=3
        )
        return torch.cat([word_query, entity_query], dim=2), torch.cat(
            [above, below], dim=2
        ) * scale


ROUTES = {"LukeSelfAttention": LukeRoute}
