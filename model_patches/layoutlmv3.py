"""LayoutLMv3: relative positions in one and two dimensions, and a softmax written to survive half precision.

What differs. `rel_pos` and `rel_2d_pos` `[B, H, T, T]` are added after division by sqrt(D) (two dimensions
only together with one). The softmax takes scores apart by 32 and the row maximum, which is the same
function. The mask is added; its additive form is all the stock knows.

How it is routed. Both terms, divided, go on as `position_bias`.
"""

from __future__ import annotations

from typing import Any

from .layouts import ProjectedRoute


class LayoutLMv3Route(ProjectedRoute):
    """`LayoutLMv3SelfAttention` through the attention interface."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        rel_pos: Any = None,
        rel_2d_pos: Any = None,
        **kwargs,
    ):
        bias = None
        if self.has_relative_attention_bias:
            bias = rel_pos + rel_2d_pos if self.has_spatial_attention_bias else rel_pos
            bias = bias * self.attention_head_size**-0.5
        states = self.project(hidden_states)
        return self.merge(*states, attention_mask, position_bias=bias, **kwargs)


ROUTES = {"LayoutLMv3SelfAttention": LayoutLMv3Route}
