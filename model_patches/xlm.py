"""XLM and FlauBERT: masks of ones and zeros, in two shapes, with causality inside them.

What differs. The model makes its own mask, `[B, K]` for padding or `[B, Q, K]` where causal, 1 = take part,
calls no mask function, and the module fills with the dtype's minimum where it is zero. Queries are divided
before the product. The cache is read under the name `layer_id`; the module keeps no config.

How it is routed. The mask becomes bool `[B, 1, 1 or Q, K]`, True = take part.
"""

from __future__ import annotations

from .layouts import ProjectedRoute


class XLMRoute(ProjectedRoute):
    """`MultiHeadAttention` of xlm and flaubert through the attention interface."""

    projections = ("q_lin", "k_lin", "v_lin")
    heads = "n_heads"

    @property
    def layer_idx(self) -> int:
        return self.layer_id

    @property
    def is_causal(self) -> bool:  # type: ignore[override]  # nobody sets it
        return self.config.causal

    def forward(self, input, mask, kv=None, cache=None, output_attentions=False, **kwargs):
        visible = (mask != 0)[:, None] if mask.dim() == 3 else (mask != 0)[:, None, None]
        context, weights = self.merge(*self.project_cached(input, kv, cache), visible)
        output = self.out_lin(context)
        return (output, weights) if output_attentions else (output,)


ROUTES = {"MultiHeadAttention": XLMRoute}
