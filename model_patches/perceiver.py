"""Perceiver: a few latents attend to a long input, then to themselves.

What differs. Keys and queries may have another width than values; both inputs are normalised inside the
module; cross-attention takes the inputs' own mask. The mask is added to the scores, heads may be one.

How it is routed. Head widths are read from the projections; the mask that belongs to the keys goes on as it
came.
"""

from __future__ import annotations

from .layouts import ProjectedRoute


class PerceiverRoute(ProjectedRoute):
    """`PerceiverSelfAttention` through the attention interface."""

    heads = "num_heads"

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        inputs=None,
        inputs_mask=None,
        output_attentions=False,
    ):
        states = self.layernorm1(hidden_states)
        context = None if inputs is None else self.layernorm2(inputs)
        mask = attention_mask if inputs is None else inputs_mask
        output, weights = self.merge(*self.project(states, context), mask)
        return (output, weights) if output_attentions else (output,)


ROUTES = {"PerceiverSelfAttention": PerceiverRoute}
