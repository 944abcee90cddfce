"""CodeGen: GPT-J's attention with one fused projection, split as it was over four TPU cores.

What differs. `qkv_proj` is cut in four, each part holding query, *value*, key in that order; the rotary
embedding runs in float32, so in half precision queries and keys arrive wider than values; the mask is added
before the division by `scale_attn`, which hides the same keys. The stock module keeps no config.

How it is routed. As GPT-J: only `_attn` is replaced. Queries and keys are brought to the values' dtype for
the call, since fused kernels want one dtype; "eager" takes their product in float32 as the original does.
"""

from __future__ import annotations

from .routing import AttentionRoute


class CodeGenRoute(AttentionRoute):
    """`CodeGenAttention` through the attention interface."""

    is_causal = True
    upcast_scores = True

    def _attn(self, query, key, value, attention_mask=None):
        context, weights = self.attend(
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            attention_mask,
            scaling=1.0 / self.scale_attn,
            dropout=self.attn_dropout.p,
        )
        return context.transpose(1, 2), weights


ROUTES = {"CodeGenAttention": CodeGenRoute}
