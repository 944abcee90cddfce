"""BLIP: a vision encoder with one fused projection, and a text model that is causal only when called so.

What differs. Vision attention has no mask. The text attention is BERT's with cross-attention and cache;
whether it is causal is an argument of the text *model's* forward (`is_decoder`), which the attention never
sees: without a mask it could not know. The mask is added to the scores.

How it is routed. The text model is routed too: called as a decoder it always hands a mask down.
"""

from __future__ import annotations

import torch
from transformers.masking_utils import create_causal_mask

from .bert_layout import BertRoute
from .routing import STOCK_CACHE, Route
from .vit_layout import FusedRoute


class BlipTextModelRoute(Route):
    """`BlipTextModel` that builds the causal mask whether or not it could be left out."""

    def forward(self, input_ids=None, attention_mask=None, *, cache=None, **kwargs):
        if kwargs.get("is_decoder") and (attention_mask is None or attention_mask.dim() == 2):
            names = (
                name for name in ("inputs_embeds", "encoder_embeds") if kwargs.get(name) is not None
            )
            given = input_ids if input_ids is not None else kwargs[next(names)]
            shape = torch.empty(*given.shape[:2], 1, device=given.device, dtype=self.dtype)
            attention_mask = create_causal_mask(
                self.config, shape, attention_mask, cache, allow_is_causal_skip=False
            )
        kwargs[STOCK_CACHE] = cache
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


class BlipTextRoute(BertRoute):
    """`BlipTextSelfAttention` through the attention interface."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        cache=None,
        **kwargs,
    ):
        mask = attention_mask if encoder_hidden_states is None else encoder_attention_mask
        return super().forward(hidden_states, mask, encoder_hidden_states, cache, **kwargs)


class BlipVisionRoute(FusedRoute):
    """`BlipAttention` through the attention interface."""

    def forward(self, hidden_states, **kwargs):
        context, weights = self.merge(*self.project(hidden_states), None, scaling=self.scale)
        return self.projection(context), weights


ROUTES = {
    "BlipAttention": BlipVisionRoute,
    "BlipTextModel": BlipTextModelRoute,
    "BlipTextSelfAttention": BlipTextRoute,
}
