"""BERT's attention module, kept by families that were not moved to the attention interface.

megatron-bert, rembert, tapas, visual_bert, vilt, flava, lxmert, tvp, mobilevit, canine and git's text part.
What differs between them is small: what the forward is called with, and whether weights are returned always
or on demand. All *add* the mask to the scores, so a bool mask of another implementation would have been
misread; none keeps a config.

- tapas appends the cache to its outputs as a decoder.
- lxmert uses one module for self- and cross-attention, told apart by the context only.
- tvp's module ends in the output projection and its layer norm.
- mobilevit attends among pixels of equal place in their patches: the batch is images times places, no mask.
- git is a decoder without saying so, and reads its attention class from a dict of names (`construct_as`);
  its vision part calls the interface itself.
- canine's local layers call the module on chunks of queries and keys with a mask `[B, Q, K]`, 1 = take
  part.
"""

from __future__ import annotations

import torch

from .layouts import ProjectedRoute, causal_decoder


class BertRoute(ProjectedRoute):
    """Self- and cross-attention with a cache; returns output and weights."""

    def forward(
        self, hidden_states, attention_mask=None, encoder_hidden_states=None, cache=None, **kwargs
    ):
        states = self.project_cached(hidden_states, encoder_hidden_states, cache)
        causal = causal_decoder(self) and encoder_hidden_states is None
        return self.merge(*states, attention_mask, is_causal=causal, **kwargs)


class GitRoute(BertRoute):
    """As BERT, always causal."""

    is_decoder = True

    def forward(self, hidden_states, attention_mask=None, cache=None, **kwargs):
        return super().forward(hidden_states, attention_mask, cache=cache, **kwargs)


class TapasRoute(BertRoute):
    """As BERT, weights on demand, the cache among the outputs."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_hidden_states=None,
        cache=None,
        output_attentions=False,
        **kwargs,
    ):
        context, weights = super().forward(
            hidden_states, attention_mask, encoder_hidden_states, cache, **kwargs
        )
        outputs = (context, weights) if output_attentions else (context,)
        return (*outputs, cache) if self.is_decoder else outputs


class OnDemandRoute(ProjectedRoute):
    """Self-attention without a cache, weights on demand."""

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        context, weights = self.merge(*self.project(hidden_states), attention_mask)
        return (context, weights) if output_attentions else (context,)


class LxmertRoute(ProjectedRoute):
    """Attention from one sequence to another, which may be the same."""

    def forward(self, hidden_states, context, attention_mask=None, output_attentions=False):
        output, weights = self.merge(*self.project(hidden_states, context), attention_mask)
        return (output, weights) if output_attentions else (output,)


class CanineRoute(LxmertRoute):
    """As lxmert, with the three-dimensional mask of local layers."""

    def forward(self, from_tensor, to_tensor, attention_mask=None, output_attentions=False):
        if attention_mask is not None and attention_mask.dim() == 3:
            # Additive as in the original: a chunk of padding then averages its values instead of giving zeros,
            # and the convolution that follows lets that reach real characters
            hidden = attention_mask[:, None] <= 0
            attention_mask = torch.zeros_like(hidden, dtype=from_tensor.dtype)
            attention_mask = attention_mask.masked_fill(hidden, torch.finfo(from_tensor.dtype).min)
        return super().forward(from_tensor, to_tensor, attention_mask, output_attentions)


class TvpRoute(ProjectedRoute):
    """Self-attention with output projection, residual and norm inside."""

    dropouts = "attn_dropout"

    def forward(self, hidden_states, attention_mask=None, output_attentions=None):
        context, weights = self.merge(*self.project(hidden_states), attention_mask)
        output = self.layer_norm(self.dropout(self.dense(context)) + hidden_states)
        return (output, weights) if output_attentions else (output,)


class MobileViTRoute(ProjectedRoute):
    """Self-attention that returns the output alone."""

    def forward(self, hidden_states):
        return self.merge(*self.project(hidden_states), None)[0]


ROUTES = {
    "CanineSelfAttention": CanineRoute,
    "FlavaSelfAttention": OnDemandRoute,
    "GitSelfAttention": GitRoute,
    "LxmertAttention": LxmertRoute,
    "MegatronBertSelfAttention": BertRoute,
    "MobileViTSelfAttention": MobileViTRoute,
    "RemBertSelfAttention": BertRoute,
    "TapasSelfAttention": TapasRoute,
    "TvpAttention": TvpRoute,
    "ViltSelfAttention": OnDemandRoute,
    "VisualBertSelfAttention": OnDemandRoute,
}
