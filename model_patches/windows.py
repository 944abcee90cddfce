"""Shifted windows over images: donut-swin, maskformer-swin, clap's audio part, swinv2, swin2sr; data2vec-vision.

What differs. The batch is windows times images; a relative-position table is read per window; shifted
layers add a mask `[windows, N, N]` of 0 and -100, one per window. swinv2 and swin2sr compare by cosine
under a learned temperature per head, make the table by a small network and add the mask twice.
data2vec-vision may have a table per layer, one for all, or both, and reads its attention class from a dict
of implementation names (`construct_as`).

How it is routed. The table's values go on as `position_bias`; the mask is repeated to `[B, 1, N, N]`. Cosine
attention is a plain product of unit vectors: queries carry the temperature, and scaling is 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from .layouts import ProjectedRoute


class SwinRoute(ProjectedRoute):
    """A window with a table of relative positions."""

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        mask = attention_mask
        if mask is not None:
            mask = mask.repeat(hidden_states.shape[0] // mask.shape[0], 1, 1)[:, None]
        query, key, value = self.project(hidden_states)
        context, weights = self.merge(
            *self.compared(query, key), value, mask, **self.options(query)
        )
        return (context, weights) if output_attentions else (context,)

    def compared(self, query, key):
        """What the product is taken of."""
        return query, key

    def options(self, query: torch.Tensor) -> dict:
        """Keywords of the call."""
        return {"position_bias": self._table(self.relative_position_bias_table)}

    def _table(self, values: torch.Tensor) -> torch.Tensor:
        size = self.window_size[0] * self.window_size[1]
        return (
            values[self.relative_position_index.view(-1)]
            .view(1, size, size, -1)
            .permute(0, 3, 1, 2)
        )


class Swinv2Route(SwinRoute):
    """Cosine attention with a table made by a network."""

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        doubled = None if attention_mask is None else 2 * attention_mask
        return super().forward(hidden_states, doubled, output_attentions)

    def compared(self, query, key):
        temperature = self.logit_scale.clamp(max=math.log(100.0)).exp()
        return F.normalize(query, dim=-1) * temperature, F.normalize(key, dim=-1)

    def options(self, query):
        values = self.continuous_position_bias_mlp(self.relative_coords_table).view(
            -1, self.num_attention_heads
        )
        return {"position_bias": 16 * torch.sigmoid(self._table(values)), "scaling": 1.0}


class Data2VecVisionRoute(ProjectedRoute):
    """`Data2VecVisionSelfAttention`, either class, through the attention interface."""

    def forward(
        self,
        hidden_states,
        output_attentions=False,
        relative_position_bias=None,
        interpolate_pos_encoding=False,
        resolution: Any = None,
    ):
        bias = relative_position_bias
        if self.has_relative_position_bias:
            window = tuple(side // self.config.patch_size for side in resolution)
            own = self.relative_position_bias(
                window, interpolate_pos_encoding, dim_size=hidden_states.shape[1]
            )
            bias = own if bias is None else own + bias
        context, weights = self.merge(*self.project(hidden_states), None, position_bias=_four(bias))
        return (context, weights) if output_attentions else (context,)


def _four(bias: torch.Tensor | None) -> torch.Tensor | None:
    return bias[None] if bias is not None and bias.dim() == 3 else bias


ROUTES = {
    "ClapAudioSelfAttention": SwinRoute,
    "Data2VecVisionSelfAttention": Data2VecVisionRoute,
    "DonutSwinSelfAttention": SwinRoute,
    "MaskFormerSwinSelfAttention": SwinRoute,
    "Swin2SRSelfAttention": Swinv2Route,
    "Swinv2SelfAttention": Swinv2Route,
}
