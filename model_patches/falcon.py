"""Falcon: rotary embedding or alibi, three layouts of the fused projection, alibi folded into the mask.

What differs. The decoder layer takes the attention class from a dict of implementation names, so a custom
name is a KeyError while the model is built: construct it as "eager" and switch after (`construct_as`). The
projection is plain multi-head, multi-query (one key head) or grouped (`new_decoder_architecture`), whose
keys the stock module copies to every query head before they enter the cache. With alibi the model replaces
the mask by `alibi / sqrt(D)` where visible and the dtype's minimum elsewhere; the stock "sdpa" branch uses
that mask alone, the stock "eager" branch adds `alibi / sqrt(D)` once more. Dropout on the weights exists
with alibi only.

How it is routed. Keys and values stay unrepeated, in the cache too. With alibi the mask is read back as
bool and alibi goes on as `position_bias`, once; under "eager" twice, because that is what the original
computes there. `output_attentions` under "sdpa" takes the eager branch, as in the original.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

from .routing import AttentionRoute


class FalconRoute(AttentionRoute):
    """`FalconAttention` through the attention interface."""

    @property
    def num_key_value_groups(self) -> int:
        if self.new_decoder_architecture:
            return self.num_heads // self.num_kv_heads
        return self.num_heads if self.multi_query else 1

    def forward(
        self,
        hidden_states,
        alibi,
        attention_mask,
        position_ids=None,
        layer_past=None,
        use_cache=False,
        output_attentions=False,
        position_embeddings: Any = None,
        **kwargs,
    ):
        query, key, value = self._split_unrepeated(self.query_key_value(hidden_states))
        if alibi is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        name = self.config._attn_implementation
        if name == "sdpa" and output_attentions:
            name = "eager"
        bias, dropout = None, 0.0
        if alibi is not None:
            attention_mask, dropout = _without_alibi(attention_mask), self.attention_dropout.p
            bias = alibi.view(-1, self.num_heads, 1, alibi.shape[-1]) * self.inv_norm_factor
            bias = 2 * bias if name == "eager" else bias
        context, weights = self.attend(
            query,
            key,
            value,
            attention_mask,
            scaling=self.inv_norm_factor,
            dropout=dropout,
            position_bias=bias,
            implementation=name,
        )
        return self.dense(context.reshape(*hidden_states.shape[:-1], self.hidden_size)), weights

    def _split_unrepeated(
        self, fused: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups = self.num_key_value_groups
        fused = fused.view(*fused.shape[:2], self.num_heads // groups, groups + 2, self.head_dim)
        query, key, value = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _without_alibi(mask: torch.Tensor | None) -> torch.Tensor | None:
    # What the model hid holds the dtype's minimum, what it left holds alibi, which is small and not negative
    return None if mask is None else mask[:, :1] > torch.finfo(mask.dtype).min / 2


ROUTES = {"FalconAttention": FalconRoute}
