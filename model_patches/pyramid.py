"""Pyramid encoders: pvt, pvt_v2, glpn, cvt. Keys and values come from a smaller image than queries.

What differs. Attention is from all pixels to a reduced image: a strided convolution, or for pvt_v2 with
`linear_attention` an adaptive pooling to 7 x 7. Queries and keys differ in number and share no position. No
mask.

How it is routed. The reduction stays as it is; the product, softmax and sum go through the interface.
"""

from __future__ import annotations

import torch

from .layouts import ProjectedRoute


class PyramidRoute(ProjectedRoute):
    """Attention to a reduced image; `ratio` and `reducer` name the stock's attributes."""

    ratio = "sequences_reduction_ratio"
    reducer = "sequence_reduction"

    def forward(self, hidden_states, height, width, output_attentions=False):
        reduced = self.reduced(hidden_states, height, width)
        context, weights = self.merge(*self.project(hidden_states, reduced), None)
        context = self.after(context)
        return (context, weights) if output_attentions else (context,)

    def reduced(self, states: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """`[B, T, C]` of the image that keys and values are taken from."""
        if getattr(self, self.ratio) == 1:
            return states
        image = states.transpose(1, 2).unflatten(-1, (height, width))
        return self.layer_norm(getattr(self, self.reducer)(image).flatten(2).transpose(1, 2))

    def after(self, context: torch.Tensor) -> torch.Tensor:
        """What follows inside the module."""
        return context


class GLPNRoute(PyramidRoute):
    """`GLPNEfficientSelfAttention` through the attention interface."""

    ratio, reducer = "sr_ratio", "sr"


class PvtV2Route(PyramidRoute):
    """`PvtV2SelfAttention` through the attention interface."""

    ratio, reducer, dropouts = "spatial_reduction_ratio", "spatial_reduction", "attn_drop"

    def reduced(self, states, height, width):
        if not self.linear_attention:
            return super().reduced(states, height, width)
        image = self.pool(states.transpose(1, 2).unflatten(-1, (height, width)))
        return self.act(self.layer_norm(self.spatial_reduction(image).flatten(2).transpose(1, 2)))

    def after(self, context):
        return self.proj_drop(self.proj(context))


class CvtRoute(ProjectedRoute):
    """`CvtSelfAttention` through the attention interface."""

    projections = ("projection_query", "projection_key", "projection_value")
    heads = "num_heads"

    def forward(self, hidden_state, height, width):
        leading, pixels = hidden_state.split(
            [hidden_state.shape[1] - height * width, height * width], dim=1
        )
        image = pixels.transpose(1, 2).unflatten(-1, (height, width))
        states = []
        for name, projection in zip(("query", "key", "value"), self.projections, strict=True):
            convolved = getattr(self, f"convolution_projection_{name}")(image)
            states.append(
                self.split(getattr(self, projection)(torch.cat((leading, convolved), dim=1)))
            )
        query, key, value = states
        return self.merge(query, key, value, None, scaling=self.scale)[0]


ROUTES = {
    "CvtSelfAttention": CvtRoute,
    "GLPNEfficientSelfAttention": GLPNRoute,
    "PvtEfficientSelfAttention": PyramidRoute,
    "PvtV2SelfAttention": PvtV2Route,
}
