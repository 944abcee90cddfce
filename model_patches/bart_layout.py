"""BART's attention module, kept by families that were not moved to the attention interface.

xglm, trocr, mvp, speecht5, groupvit and table-transformer. What they share: `q_proj`, `k_proj`, `v_proj`,
`out_proj`, queries scaled before the product, the mask added and its shape insisted on (None or additive
only); most keep no config.

- mvp may prepend learned keys and values (`attn_prompt`) that every query sees. With no mask given a
  decoder's causal mask is written out then, because the prompt shifts the keys.
- speecht5's encoder adds a relative term of the scaled queries and a table `[Q, K, D]`: it goes on as
  `position_bias`.
- groupvit's text part says `is_causal` in the call. Its grouping blocks (hard assignment) are not softmax
  attention over values and stay stock.
- table-transformer adds object queries to queries and keys, not to values, and reads bool masks as True =
  hidden, which none of its own code makes; a bool mask here means True = take part.
"""

from __future__ import annotations

import torch

from .layouts import ProjectedRoute


class BartRoute(ProjectedRoute):
    """Self- and cross-attention with a cache; returns output and weights."""

    projections = ("q_proj", "k_proj", "v_proj")
    heads = "num_heads"

    def forward(
        self, hidden_states, key_value_states=None, cache=None, attention_mask=None, **kwargs
    ):
        states = self.project_cached(hidden_states, key_value_states, cache)
        return self.finish(
            *states, attention_mask, is_causal=self.is_causal_in(key_value_states), **kwargs
        )

    def is_causal_in(self, context: torch.Tensor | None) -> bool:
        """Whether a call is causal: decoders, self-attention only."""
        return bool(getattr(self, "is_decoder", False)) and context is None

    def finish(self, query, key, value, mask, **options):
        """Attend and project."""
        context, weights = self.merge(query, key, value, mask, **options)
        return self.out_proj(context), weights


class MvpRoute(BartRoute):
    """With learned keys and values in front."""

    passes_on = ("attn_prompt",)

    def finish(self, query, key, value, mask, is_causal=False, attn_prompt=None, **options):
        """Attend, the prompt in front of keys and values, and project."""
        if attn_prompt is not None:
            mask = _with_prompt(mask, is_causal, query, key, attn_prompt[0].shape[1])
            prompts = (prompt.expand(query.shape[0], -1, -1, -1) for prompt in attn_prompt)
            key, value = (
                torch.cat(pair, dim=2) for pair in zip(prompts, (key, value), strict=True)
            )
        return super().finish(query, key, value, mask, is_causal=is_causal, **options)


def _with_prompt(mask, causal, query, key, length):
    queries, keys = query.shape[2], key.shape[2]
    if mask is None and causal and queries > 1:
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return None
    visible = mask.new_ones if mask.dtype == torch.bool else mask.new_zeros
    return torch.cat([visible(*mask.shape[:-1], length), mask], dim=-1)


class SpeechT5Route(BartRoute):
    """With a relative term of the queries."""

    passes_on = ("position_bias",)

    def finish(self, query, key, value, mask, position_bias=None, **options):
        """Attend, the term as a bias of the logits, and project."""
        if position_bias is not None:
            options["position_bias"] = torch.einsum(
                "bhqd,qkd->bhqk", query * self.scaling, position_bias
            )
        return super().finish(query, key, value, mask, **options)


class GroupViTRoute(BartRoute):
    """Without a cache; causal when the call says so."""

    def forward(self, hidden_states, attention_mask=None, encoder_hidden_states=None, **kwargs):
        states = self.project(hidden_states, encoder_hidden_states)
        return self.finish(*states, attention_mask, **kwargs)


class TableTransformerRoute(BartRoute):
    """Without a cache; positions are added to queries and keys."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        object_queries=None,
        key_value_states=None,
        spatial_position_embeddings=None,
        output_attentions=False,
    ):
        source = self.with_pos_embed(hidden_states, object_queries)
        values = hidden_states if key_value_states is None else key_value_states
        keys = source
        if key_value_states is not None:
            keys = self.with_pos_embed(key_value_states, spatial_position_embeddings)
        pairs = ((self.q_proj, source), (self.k_proj, keys), (self.v_proj, values))
        query, key, value = (self.split(projection(inputs)) for projection, inputs in pairs)
        output, weights = self.finish(query, key, value, attention_mask)
        return output, weights if output_attentions else None


ROUTES = {
    "GroupViTAttention": GroupViTRoute,
    "MvpAttention": MvpRoute,
    "SpeechT5Attention": SpeechT5Route,
    "TableTransformerAttention": TableTransformerRoute,
    "TrOCRAttention": BartRoute,
    "XGLMAttention": BartRoute,
}
