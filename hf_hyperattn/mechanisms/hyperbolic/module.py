"""Provide hyperbolic attention as a module for models in hyperbolic space.

Here you learn how hidden states that are points of the Poincaré ball attend to each other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...config.fields import SMALLEST
from ...geometry import poincare
from ..checks import check_dropout, check_number
from .functional import hyperbolic_attention


class HyperbolicAttention(nn.Module):
    """Multi-head attention from points to points of the Poincaré ball.

    Points are mapped to the tangent space at the origin, where the linear projections act. Each head
    lifts its queries, keys and values into a ball of its own curvature -c_h. It attends with
    softmax(-d(q, k) / τ_h), where d is the geodesic distance. It averages its values by the Einstein
    midpoint (Hyperbolic Attention Networks, arXiv 1805.09786). The midpoints are mapped back to the
    tangent space, concatenated and projected. The result is mapped into the ball.

    With one head, identity projections and τ = 1, it is softmax(-d(x_i, x_j)) over the points.

    Args:
        dim: Dimension of the points.
        heads: Number of heads. It divides `dim`, with at least 2 dimensions per head.
        curvature: c > 0. Inputs and outputs are points of the ball of curvature -c, √c|x| < 1.
        temperature: τ > 0, the starting temperature of every head. It is learned.
        learn_curvature: Whether each head learns its c_h, from c. The ball of the points keeps its
            curvature, so modules can follow one another.
        bias: Whether the projections have biases.
        dropout: Probability that a weight is dropped in training, in [0, 1).
        backend: "auto" (default), or the name of an engine.

    Parameters: `query`, `key`, `value` and `out` are linear maps of tangent vectors.
    `log_temperature` [heads] is the logarithm of τ_h / τ. `log_curvature` [heads] is the logarithm
    of c_h / c; it is None unless learned.

    Raises:
        ValueError: An argument is out of range. The message names it, its value and the allowed
            values.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        curvature: float = 1.0,
        *,
        temperature: float = 1.0,
        learn_curvature: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        backend: str = "auto",
    ):
        super().__init__()
        _check_heads(dim, heads)
        check_dropout(dropout)
        self.dim = dim
        self.heads = heads
        self.dropout = dropout
        self.backend = backend
        check_number("curvature", curvature, least=SMALLEST)
        check_number("temperature", temperature, least=SMALLEST)
        self.curvature = float(curvature)
        self.temperature = float(temperature)
        self.query = nn.Linear(dim, dim, bias=bias)
        self.key = nn.Linear(dim, dim, bias=bias)
        self.value = nn.Linear(dim, dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)
        self.log_temperature = nn.Parameter(torch.zeros(heads))
        self.log_curvature = nn.Parameter(torch.zeros(heads)) if learn_curvature else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to their starting values: bias 0, and the configured τ and c."""
        # Xavier's initialisation keeps the length of tangent vectors on average.
        for projection in (self.query, self.key, self.value, self.out):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        for log in (self.log_temperature, self.log_curvature):
            if log is not None:
                nn.init.zeros_(log)

    def forward(
        self,
        points: Tensor,
        context: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend from points to points.

        Args:
            points: Points of the ball [B, N, dim]. A point on the rim or beyond counts as just
                inside.
            context: Attended points [B, M, dim]. None (default): `points`.
            attn_mask: Bool (True = visible) or additive, broadcastable to [B, heads, N, M]. A point
                that sees no point attends to the origin.
            is_causal: Let point i see only points j <= i. Combined with `attn_mask`, both apply.

        Returns:
            Points of the ball [B, N, dim], in the dtype of `points`. Half precision resolves the
            ball coarsely, and its points stay one rounding step inside. Prefer float32 for points.
        """
        context = points if context is None else context
        tangent = self._map_to_tangent("points", points)
        other = tangent if context is points else self._map_to_tangent("context", context)
        projected = self.query(tangent), self.key(other), self.value(other)
        query, key, value = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in projected)
        out = hyperbolic_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            # The vectors are tangent vectors already.
            scale=1.0,
            curvature=_compute_number(self.curvature, self.log_curvature),
            temperature=_compute_number(self.temperature, self.log_temperature),
            backend=self.backend,
        )
        return self._map_to_ball(self.out(out.transpose(1, 2).flatten(2)), points.dtype)

    def _map_to_tangent(self, name: str, points: Tensor) -> Tensor:
        if points.dim() != 3 or points.shape[-1] != self.dim or not points.is_floating_point():
            raise ValueError(
                f"{name} has shape {tuple(points.shape)} and dtype {points.dtype}; allowed: "
                f"[batch, length, {self.dim}], floating point"
            )
        return poincare.logmap0(points, self.curvature).to(self.query.weight.dtype)

    def _map_to_ball(self, tangent: Tensor, dtype: torch.dtype) -> Tensor:
        points = poincare.expmap0(tangent, self.curvature)
        limit = 1 - torch.finfo(dtype).eps
        # Half precision would round points near the rim onto the rim.
        if limit < poincare.LIMIT:
            points = poincare.project(points, self.curvature, limit)
        return points.to(dtype)

    def extra_repr(self) -> str:
        """Return the sizes for `print`."""
        return f"dim={self.dim}, heads={self.heads}, curvature={self.curvature}"


def _compute_number(start: float, log: Tensor | None) -> Tensor | float:
    """Return the current value of a number, from its start and its learned logarithm."""
    if log is None:
        return start
    return start * torch.exp(log if log.dtype == torch.float64 else log.float())


def _check_heads(dim: int, heads: int) -> None:
    if not isinstance(dim, int) or dim < 2:
        raise ValueError(f"dim={dim!r} is not allowed; allowed: integers from 2")
    if not isinstance(heads, int) or heads < 1 or dim % heads or dim // heads < 2:
        raise ValueError(
            f"heads={heads!r} is not allowed with dim={dim}; allowed: divisors of dim that leave 2 or more a head"
        )
