"""Vision encoders with one fused projection: timesformer, mgp-str, vitdet, seggpt, and SAM's encoder in its
copies.

What differs. No masks, no cache. timesformer attends in time and in space by the same module, the caller
reshapes. vitdet, seggpt and SAM's encoder (sam, sam_hq, got_ocr2, deepseek_ocr2, unlimited_ocr,
pp_formulanet) work on `[B, height, width, C]`, in windows or globally, and add a decomposed relative
position term made of the *unscaled* queries and two tables (`rel_pos_h`, `rel_pos_w`).

How it is routed. The decomposed term is computed per call by the stock's own code and goes on as
`position_bias`. The other parts of SAM and of the OCR models call the interface themselves. sam, sam_hq,
deepseek_ocr2 and unlimited_ocr pick the class from a dict of implementation names (`construct_as`).
"""

from __future__ import annotations

import torch
from transformers.models.vitdet.modeling_vitdet import add_decomposed_relative_positions

from .layouts import ProjectedRoute


class FusedRoute(ProjectedRoute):
    """One projection `qkv` to query, key and value in that order, `[B, T, C]` in."""

    heads = "num_heads"

    def project(self, states, context=None):
        heads = self.qkv(states).unflatten(-1, (3, getattr(self, self.heads), -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value


class TimesformerRoute(FusedRoute):
    """Weights on demand, output projection in the caller."""

    dropouts = "attn_drop"

    def forward(self, hidden_states, output_attentions=False):
        context, weights = self.merge(*self.project(hidden_states), None, scaling=self.scale)
        return (context, weights) if output_attentions else (context,)


class MgpstrRoute(FusedRoute):
    """Output projection and its dropout inside."""

    dropouts = "attn_drop"

    def forward(self, hidden_states):
        context, weights = self.merge(*self.project(hidden_states), None, scaling=self.scale)
        return self.proj_drop(self.proj(context)), weights


class PlaneRoute(FusedRoute):
    """Attention over a plane of `[B, height, width, C]` with decomposed relative positions."""

    heads = "num_attention_heads"
    relative = "use_relative_position_embeddings"
    dropout = 0.0

    def over_plane(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        size = hidden_states.shape[1], hidden_states.shape[2]
        query, key, value = self.project(hidden_states.flatten(1, 2))
        bias = None
        if getattr(self, self.relative):
            bias = self.decomposed(query.flatten(0, 1), size).unflatten(0, query.shape[:2])
        context, weights = self.merge(
            query, key, value, None, scaling=self.scale, position_bias=bias
        )
        return self.proj(context.unflatten(1, size)), weights

    def decomposed(self, query: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """The position term `[B * H, T, T]` of queries `[B * H, T, D]`: the stock adds it to scores, here to zero."""
        return self.add_decomposed_rel_pos(
            _zero(query), query, self.rel_pos_h, self.rel_pos_w, size, size
        )


def _zero(query: torch.Tensor) -> torch.Tensor:
    return query.new_zeros(query.shape[0], query.shape[1], query.shape[1])


class SegGptRoute(PlaneRoute):
    """`SegGptAttention` through the attention interface."""

    def forward(self, hidden_states, output_attentions=False):
        output, weights = self.over_plane(hidden_states)
        return output, weights if output_attentions else None


class VitDetRoute(PlaneRoute):
    """`VitDetAttention` through the attention interface."""

    def forward(self, hidden_state, output_attentions=False):
        output, weights = self.over_plane(hidden_state)
        return (output, weights) if output_attentions else (output,)

    heads = "num_heads"

    def decomposed(self, query, size):
        return add_decomposed_relative_positions(
            _zero(query), query, self.rel_pos_h, self.rel_pos_w, size, size
        )


class SamVisionRoute(PlaneRoute):
    """SAM's vision attention and its copies; weights are `[B * H, T, T]`."""

    relative = "use_rel_pos"

    def forward(self, hidden_states, output_attentions=None):
        output, weights = self.over_plane(hidden_states)
        return output, None if weights is None else weights.flatten(0, 1)

    def decomposed(self, query, size):
        return self.get_decomposed_rel_pos(
            query, self.rel_pos_h, self.rel_pos_w, size, size
        ).reshape_as(_zero(query))


ROUTES = {
    "DeepseekOcr2SamVisionAttention": SamVisionRoute,
    "GotOcr2VisionAttention": SamVisionRoute,
    "MgpstrAttention": MgpstrRoute,
    "PPFormulaNetVisionAttention": SamVisionRoute,
    "SamHQVisionAttention": SamVisionRoute,
    "SamVisionAttention": SamVisionRoute,
    "SegGptAttention": SegGptRoute,
    "TimesformerSelfAttention": TimesformerRoute,
    "UnlimitedOcrSamVisionAttention": SamVisionRoute,
    "VitDetAttention": VitDetRoute,
}
