"""RoFormer: BERT's attention with rotary positions, on the values too where `rotary_value` says so.

What differs. Sinusoids arrive as one tensor of sines and cosines; the stock's own static method applies
them, to self-attention only and before the cache. The mask is added to the scores.

How it is routed. Projections, rotation and cache are as in the stock; the mask goes on as it came.
"""

from __future__ import annotations

from .layouts import ProjectedRoute, causal_decoder


class RoFormerRoute(ProjectedRoute):
    """`RoFormerSelfAttention` through the attention interface."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        sinusoidal_pos=None,
        encoder_hidden_states=None,
        cache=None,
        **kwargs,
    ):
        def rotate(query, key, value):
            if self.rotary_value:
                return self.apply_rotary_position_embeddings(sinusoidal_pos, query, key, value)
            return *self.apply_rotary_position_embeddings(sinusoidal_pos, query, key), value

        own = encoder_hidden_states is None
        turned = rotate if own and sinusoidal_pos is not None else None
        states = self.project_cached(hidden_states, encoder_hidden_states, cache, turned)
        return self.merge(*states, attention_mask, is_causal=causal_decoder(self) and own, **kwargs)


ROUTES = {"RoFormerSelfAttention": RoFormerRoute}
