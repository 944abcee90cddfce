"""GPT-J: rotary embedding over pairs of neighbours on the first `rotary_dim` features, scores in float32.

What differs. The block takes the attention class from a dict of implementation names, so a custom name (and
"sdpa") is a KeyError while the model is built: construct it as "eager" and switch after (`construct_as`).
The product of queries and keys is taken in float32 and divided by `scale_attn`; the mask is added, whatever
its dtype.

How it is routed. Projections, rotary embedding and cache are the stock's; only `_attn`, which receives
them, is replaced. It has to give `[B, H, Q, D]` back, because the stock merges the heads.
"""

from __future__ import annotations

from .routing import AttentionRoute


class GPTJRoute(AttentionRoute):
    """`GPTJAttention` through the attention interface."""

    upcast_scores = True

    def _attn(self, query, key, value, attention_mask=None):
        context, weights = self.attend(
            query,
            key,
            value,
            attention_mask,
            scaling=1.0 / self.scale_attn,
            dropout=self.attn_dropout.p,
        )
        return context.transpose(1, 2), weights


ROUTES = {"GPTJAttention": GPTJRoute}
