"""BROS: BERT's attention with a score between each token and the relative box of each other one.

What differs. The model hands down embeddings of relative boxes, `[Q, K, B, D]` whatever their shape says; their
product with the query is added to the scores before division by sqrt(D). The mask is added after it. Cross-attention
is declared, but the original's layer raises before it is reached. The module keeps no config.

How it is routed. The box term, divided, goes on as `position_bias`; it is made of the queries, per call.
"""

from __future__ import annotations

import torch

from .layouts import ProjectedRoute


class BrosRoute(ProjectedRoute):
    """`BrosSelfAttention` through the attention interface."""

    def forward(
        self,
        hidden_states,
        bbox_pos_emb,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
    ):
        query, key, value = self.project(hidden_states, encoder_hidden_states)
        batch, _, length, width = query.shape
        boxes = bbox_pos_emb.view(length, length, batch, width)
        bias = torch.einsum("bhqd,qkbd->bhqk", query, boxes) * width**-0.5
        mask = attention_mask if encoder_hidden_states is None else encoder_attention_mask
        return self.merge(query, key, value, mask, position_bias=bias)


ROUTES = {"BrosSelfAttention": BrosRoute}
