"""SqueezeBERT: grouped convolutions instead of linear layers, channels before tokens.

What differs. States are `[B, C, T]`; `query`, `key`, `value` are `Conv1d` of width one. The module returns
a dict, and under `output_attentions` the *scores* before the softmax, mask included.

How it is routed. States are turned to heads and back; scores are computed once more where they are asked for.
"""

from __future__ import annotations

import torch

from .eager import eager_scores
from .layouts import ProjectedRoute


class SqueezeBertRoute(ProjectedRoute):
    """`SqueezeBertSelfAttention` through the attention interface."""

    def split(self, states: torch.Tensor) -> torch.Tensor:
        """`[B, H * D, T]` to `[B, H, T, D]`."""
        return states.unflatten(1, (self.num_attention_heads, -1)).transpose(2, 3)

    def forward(self, hidden_states, attention_mask, output_attentions):
        query, key, value = self.project(hidden_states)
        context, _ = self.merge(query, key, value, attention_mask)
        result = {"context_layer": context.transpose(1, 2)}
        if output_attentions:
            result["attention_score"] = eager_scores(self, query, key, attention_mask)
        return result


ROUTES = {"SqueezeBertSelfAttention": SqueezeBertRoute}
