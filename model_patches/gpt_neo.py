"""GPT-Neo: unscaled scores, and every other layer sees only the last `window_size` tokens.

What differs. The inner attention class comes from a dict of implementation names: construct as "eager"
(`construct_as`). Scores are not divided by sqrt(D) and are taken in float32. Causality and the local window
live in a buffer `bias` `[1, 1, max, max]` of the module, on top of the mask that the model builds; that
mask knows no window, so a local layer that trusted it would see the whole prefix.

How it is routed. Only `_attn` is replaced, with scaling 1.0. A global layer passes the model's mask on. A
local layer does so while no key is farther than its window, and otherwise intersects the mask with its own
window.
"""

from __future__ import annotations

import torch

from .routing import AttentionRoute, intersect


class GPTNeoRoute(AttentionRoute):
    """`GPTNeoSelfAttention` through the attention interface."""

    upcast_scores = True

    @property
    def layer_idx(self) -> int | None:
        return self.layer_id

    def _attn(self, query, key, value, attention_mask=None):
        if self.attention_type == "local" and key.shape[-2] > self.config.window_size:
            attention_mask = self._in_window(attention_mask, query.shape[-2], key.shape[-2])
        context, weights = self.attend(
            query, key, value, attention_mask, scaling=1.0, dropout=self.attn_dropout.p
        )
        return context.transpose(1, 2), weights

    def _in_window(self, mask: torch.Tensor | None, queries: int, keys: int) -> torch.Tensor:
        first = (
            0 if mask is None and queries > 1 else keys - queries
        )  # no mask: causal from the top left
        return intersect(mask, self.bias[:, :, first : first + queries, :keys])


ROUTES = {"GPTNeoSelfAttention": GPTNeoRoute}
