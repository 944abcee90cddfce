"""Decoders whose attention sits in one method `_attn`: gpt_neox_japanese, openai-gpt, imagegpt, bark.

What differs. openai-gpt, imagegpt and bark keep causality in a buffer `bias` of the module and take a mask
that knows padding only; gpt_neox_japanese gets a causal mask from the model. openai-gpt hands the keys over
transposed, has no cache and hides by -10000. imagegpt may scale by the layer index and in float32
(`reorder_and_upcast_attn`, a second method of the same meaning), and has cross-attention. bark reads its
attention class from a dict of implementation names (`construct_as`), and its fine model is not causal.

How it is routed. Only `_attn` is replaced. Where the mask is None a square or one-row call is left to
`is_causal`; any other mask is intersected with the buffer.
"""

from __future__ import annotations

import torch
from transformers.utils import torch_float

from .routing import AttentionRoute, intersect


class TriangleRoute(AttentionRoute):
    """Causality from the module's buffer `bias` `[1, 1, max, max]`."""

    def within_triangle(
        self, mask: torch.Tensor | None, queries: int, keys: int
    ) -> torch.Tensor | None:
        """The mask to hand on: None where `is_causal` says the same."""
        if queries == 1 or (mask is None and queries == keys):
            return mask
        return intersect(mask, self.bias[:, :, keys - queries : keys, :keys].bool())

    def attend_first(self, query, key, value, mask, **options):
        """`attend` with the output as the stock's `_attn` gives it, `[B, H, Q, D]`."""
        context, weights = self.attend(query, key, value, mask, **options)
        return context.transpose(1, 2), weights


class GPTNeoXJapaneseRoute(TriangleRoute):
    """`GPTNeoXJapaneseAttention` through the attention interface."""

    is_causal = True

    def _attn(self, query, key, value, attention_mask=None):
        scaling, dropout = 1.0 / self.norm_factor, self.attention_dropout.p
        return self.attend_first(
            query, key, value, attention_mask, scaling=scaling, dropout=dropout
        )


class OpenAIGPTRoute(TriangleRoute):
    """`Attention` of openai-gpt through the attention interface."""

    is_causal = True

    def _attn(self, q, k, v, attention_mask=None, output_attentions=False):
        mask = self.within_triangle(attention_mask, q.shape[2], k.shape[3])
        scaling = v.shape[-1] ** -0.5 if self.scale else 1.0
        context, weights = self.attend_first(
            q, k.transpose(2, 3), v, mask, scaling=scaling, dropout=self.attn_dropout.p
        )
        return [context, weights] if output_attentions else [context]


class ImageGPTRoute(TriangleRoute):
    """`ImageGPTAttention` through the attention interface."""

    is_causal = True

    @property
    def upcast_scores(self) -> bool:  # type: ignore[override]  # nobody sets it
        return self.reorder_and_upcast_attn

    def _attn(self, query, key, value, attention_mask=None):
        root = value.shape[-1] ** 0.5
        root = (
            root if self.upcast_scores else torch_float(root)
        )  # rounded down in Transformers 5.17
        scaling = 1 / root if self.scale_attn_weights else 1.0
        if self.scale_attn_by_inverse_layer_idx:
            scaling = scaling / (self.layer_idx + 1)
        causal = not self.is_cross_attention
        if causal:
            attention_mask = self.within_triangle(attention_mask, query.shape[2], key.shape[2])
        return self.attend_first(
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            dropout=self.attn_dropout.p,
            is_causal=causal,
        )

    _upcast_and_reordered_attn = _attn


class BarkRoute(TriangleRoute):
    """`BarkSelfAttention` through the attention interface."""

    def _attn(self, query, key, value, attention_mask=None):
        if self.is_causal:
            attention_mask = self.within_triangle(attention_mask, query.shape[2], key.shape[2])
        return self.attend_first(
            query,
            key,
            value,
            attention_mask,
            scaling=self.head_dim**-0.5,
            dropout=self.attn_dropout.p,
        )


ROUTES = {
    "Attention": OpenAIGPTRoute,
    "BarkSelfAttention": BarkRoute,
    "GPTNeoXJapaneseAttention": GPTNeoXJapaneseRoute,
    "ImageGPTAttention": ImageGPTRoute,
}
