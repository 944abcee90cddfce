"""MPT: alibi from the model, optional clipping of q, k, v, and a mask whose meaning is the opposite of usual.

What differs. The model turns whatever mask it gets into bool by `.to(torch.bool)`: right for the additive
mask of "eager" (non-zero = hidden), inverted for a bool mask (True = take part), an AttributeError for
None. The attention module then hides where the mask is True. Alibi `[H, 1, max_seq_len]` is cut to the last
K columns; the scale is `softmax_scale` or `1 / sqrt(D)`; dropout is a bare number.

How it is routed. The model itself is routed too: it builds the mask of the implementation in use and hands
down "hidden" masks of four dimensions, which the stock code passes on unchanged; where no mask is needed it
hands down the 1 x 1 mask that hides nothing. The attention module turns them back: True = take part, or
None.
"""

from __future__ import annotations

import torch
from transformers.masking_utils import create_causal_mask

from .routing import ASKED, STOCK_CACHE, AttentionRoute, Route


class MptModelRoute(Route):
    """`MptModel` with a mask that means the same under every implementation."""

    def forward(
        self, input_ids=None, cache=None, attention_mask=None, inputs_embeds=None, **kwargs
    ):
        if (
            attention_mask is None or attention_mask.dim() != 4
        ):  # a user's 4-D mask stays the user's
            embeds = inputs_embeds if inputs_embeds is not None else self.wte(input_ids)
            attention_mask = _hidden(create_causal_mask(self.config, embeds, attention_mask, cache))
            attention_mask = attention_mask.to(embeds.device)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **{STOCK_CACHE: cache},
            **kwargs,
        )


def _hidden(mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    return ~mask if mask.dtype == torch.bool else mask != 0


class MptBlockRoute(Route):
    """`MptBlock`, which does not tell its attention that weights are wanted."""

    def forward(self, *args, output_attentions=False, **kwargs):
        around = ASKED.weights_of_block
        ASKED.weights_of_block = output_attentions
        try:
            return super().forward(*args, output_attentions=output_attentions, **kwargs)
        finally:
            ASKED.weights_of_block = around


class MptRoute(AttentionRoute):
    """`MptAttention` through the attention interface."""

    is_causal = True

    def forward(self, hidden_states, position_bias, cache=None, attention_mask=None, **kwargs):
        batch, length, _ = hidden_states.shape
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        qkv = qkv.view(batch, length, 3, self.n_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if position_bias is not None:
            position_bias = position_bias[None, :, :, -key.shape[-2] :].to(query.dtype)
        context, weights = self.attend(
            query,
            key,
            value,
            _visible(attention_mask, length, key.shape[-2]),
            scaling=self.softmax_scale,
            dropout=self.attn_dropout_p,
            position_bias=position_bias,
            output_attentions=ASKED.weights_of_block,
        )
        return self.out_proj(context.reshape(batch, length, -1)), weights


def _visible(hidden: torch.Tensor | None, queries: int, keys: int) -> torch.Tensor | None:
    if hidden is None or (hidden.shape[-2:] == (1, 1) and (queries, keys) != (1, 1)):
        return None
    return ~hidden


ROUTES = {"MptModel": MptModelRoute, "MptBlock": MptBlockRoute, "MptAttention": MptRoute}
