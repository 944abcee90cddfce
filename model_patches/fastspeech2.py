"""FastSpeech2 Conformer: Transformer-XL positions, learned biases on the queries, weights of padding set to
zero.

What differs. Scores are `(q + u).k + shift((q + v).p)` over sqrt(D): `p` are projected sinusoids of
relative positions, `shift` lines them up with the keys. The mask is `[B, 1, T]` of ones and zeros; hidden
weights are zeroed once more after the softmax, which matters where every key is hidden.

How it is routed. The query that goes on is `q + u`; the shifted term, divided, is the `position_bias`.
"""

from __future__ import annotations

from .layouts import ProjectedRoute


class FastSpeech2Route(ProjectedRoute):
    """`FastSpeech2ConformerAttention` through the attention interface."""

    projections = ("linear_q", "linear_k", "linear_v")
    heads = "num_heads"

    def forward(self, hidden_states, attention_mask=None, pos_emb=None, output_attentions=False):
        query, key, value = self.project(hidden_states)
        positions = self.split(self.linear_pos(pos_emb))
        shifted = (query + self.pos_bias_v[:, None]) @ positions.transpose(2, 3)
        bias = self.shift_relative_position_tensor(shifted) * self.dim_key**-0.5
        mask = None if attention_mask is None else attention_mask[:, None].ne(0)
        context, weights = self.merge(
            query + self.pos_bias_u[:, None], key, value, mask, position_bias=bias
        )
        return self.linear_out(context), weights if output_attentions else None


ROUTES = {"FastSpeech2ConformerAttention": FastSpeech2Route}
