"""FSMT: fairseq's attention, time before batch, with two masks of its own.

What differs. States are `[T, B, C]`. The decoder passes a causal mask of 0 and -inf `[T, T]` and a padding
mask `[B, K]`, True = *hidden*; encoder and cross-attention pass padding only; no mask function is called.
Which part of the cache is meant is fixed when the module is built.

How it is routed. States are turned to batch first and back; the two masks become one bool mask, True = take
part.
"""

from __future__ import annotations

import torch

from .layouts import ProjectedRoute


class FSMTRoute(ProjectedRoute):
    """`Attention` of fsmt through the attention interface."""

    projections = ("q_proj", "k_proj", "v_proj")
    heads = "num_heads"

    def forward(
        self,
        query,
        key,
        key_padding_mask=None,
        layer_state=None,
        attn_mask=None,
        output_attentions=False,
        **kwargs,
    ):
        context = key.transpose(0, 1) if self.encoder_decoder_attention else None
        states = self.project_cached(query.transpose(0, 1), context, layer_state)
        output, weights = self.merge(*states, _visible(key_padding_mask, attn_mask))
        return self.out_proj(output.transpose(0, 1)), weights if output_attentions else None


def _visible(padding: torch.Tensor | None, causal: torch.Tensor | None) -> torch.Tensor | None:
    visible = None if padding is None or padding.dim() == 0 else ~padding[:, None, None].bool()
    if causal is None:
        return visible
    return causal >= 0 if visible is None else (causal >= 0) & visible


ROUTES = {"Attention": FSMTRoute}
