"""ConvBERT: half of the width is attention, half a convolution whose kernel each token computes for itself.

What differs. There are fewer heads than configured (`head_ratio`), of half the width. Beside them a span of
`conv_kernel_size` neighbours is averaged with weights made of the query and a separable convolution of the states.
The output is the heads of attention followed by those of the convolution. The mask is added to the scores.

How it is routed. The attention half goes through the interface as in BERT; the convolution half is computed from the
same projections, and an attention implementation never sees it.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .layouts import ProjectedRoute


class ConvBertRoute(ProjectedRoute):
    """`ConvBertSelfAttention` through the attention interface."""

    def forward(self, hidden_states, attention_mask=None, encoder_hidden_states=None, **kwargs):
        query, key, value = self.project(hidden_states, encoder_hidden_states)
        context, weights = self.merge(query, key, value, attention_mask, **kwargs)
        convolved = self.convolved(hidden_states, query.transpose(1, 2).flatten(2))
        return torch.cat([context, convolved], dim=-1), weights

    def convolved(self, states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """The convolution half `[B, T, H * D]` of states `[B, T, C]` and queries `[B, T, H * D]`."""
        spans = self.key_conv_attn_layer(states.transpose(1, 2)).transpose(1, 2) * query
        kernels = (
            self.conv_kernel_layer(spans).unflatten(-1, (self.num_attention_heads, -1)).softmax(-1)
        )
        reach = (self.conv_kernel_size - 1) // 2
        padded = F.pad(self.conv_out_layer(states), (0, 0, reach, reach))
        neighbours = padded.unfold(1, self.conv_kernel_size, 1).unflatten(
            2, (self.num_attention_heads, -1)
        )
        return torch.einsum("bthdk,bthk->bthd", neighbours, kernels).flatten(2)


ROUTES = {"ConvBertSelfAttention": ConvBertRoute}
