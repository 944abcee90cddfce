"""WavLM: a relative-position bias from the first layer, gated per query and head in every layer.

What differs. The first layer owns the bucket table and hands its values `[B*H, T, T]` to the next; each
layer scales them by a gate computed from its own input (`gru_rel_pos_linear`, `gru_rel_pos_const`). The
stock runs `F.multi_head_attention_forward` on raw weights, so adapters inside `q_proj`, `k_proj`, `v_proj`,
`out_proj` have no effect there. The mask is the reduced padding mask `[B, T]` (1 = real). Returned weights
are averaged over heads.

How it is routed. Projections are called as modules; the gated bias goes on as `position_bias`, the padding
mask as bool `[B, 1, 1, T]`. Weights, where the implementation gives any, are averaged as in the original.
"""

from __future__ import annotations

import torch

from .routing import AttentionRoute


class WavLMRoute(AttentionRoute):
    """`WavLMAttention` through the attention interface."""

    def forward(self, hidden_states, attention_mask=None, position_bias=None, index=0, **kwargs):
        batch, length, _ = hidden_states.shape
        if position_bias is None:
            position_bias = self.compute_bias(length, length).repeat(batch, 1, 1)
        split = hidden_states.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        bias = self._gate(split) * position_bias.unflatten(0, (batch, self.num_heads))
        query, key, value = (
            proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        context, weights = self.attend(
            query,
            key,
            value,
            _keys(attention_mask),
            scaling=self.scaling,
            dropout=self.dropout,
            position_bias=bias,
        )
        if weights is not None:
            weights = weights.mean(1, keepdim=True).expand(-1, self.num_heads, -1, -1)
        return self.out_proj(context.flatten(2)), weights, position_bias

    def _gate(self, split: torch.Tensor) -> torch.Tensor:
        logits = self.gru_rel_pos_linear(split).unflatten(-1, (2, 4)).sum(-1)
        update, reset = torch.sigmoid(logits).chunk(2, dim=-1)
        return update * (reset * self.gru_rel_pos_const - 1.0) + 2.0


def _keys(mask: torch.Tensor | None) -> torch.Tensor | None:
    return mask.eq(1)[:, None, None, :] if mask is not None and mask.dim() == 2 else mask


ROUTES = {"WavLMAttention": WavLMRoute}
