"""Hyperbolic attention as a module of its own, for models whose hidden states are points of the Poincaré ball."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...geometry import poincare
from ..checks import check_dropout
from .functional import hyperbolic_attention


class HyperbolicAttention(nn.Module):
    """Multi-head attention from points of the Poincaré ball to points of the Poincaré ball.

    Points are mapped to the tangent space at the origin, where the linear projections act. Each head lifts its
    queries, keys and values into a ball of its own curvature -c_h, attends with softmax(-d(q, k) / τ_h), d the
    geodesic distance, and takes the Einstein midpoint of its values (Hyperbolic Attention Networks, arXiv 1805.09786).
    The midpoints, back in the tangent space, are concatenated and projected, and the result is mapped into the ball.
    With one head, projections that are the identity and τ = 1 it is softmax(-d(x_i, x_j)) over the points themselves.

    Args:
        dim: dimension of the points.
        heads: number of heads; divides `dim`, which leaves at least 2 dimensions a head.
        curvature: c > 0: points come and go in the ball of curvature -c, √c|x| < 1.
        temperature: τ > 0, where the temperature of every head starts; it is learned.
        learn_curvature: whether each head learns its c_h, which starts at c. The ball of the points stays as it is, so
            modules can follow one another.
        bias: whether the projections have biases.
        dropout: probability that a weight is dropped in training, in [0, 1).
        backend: "auto" or the name of an engine.

    Parameters: `query`, `key`, `value`, `out`, linear maps of tangent vectors; `log_temperature` and, where learned,
    `log_curvature`, [heads], the logarithms of τ_h / τ and c_h / c.

    Raises:
        ValueError: an argument out of its range; the message names it, its value and what is allowed.
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
        self.dim, self.heads, self.dropout, self.backend = dim, heads, dropout, backend
        self.curvature, self.temperature = (
            _positive("curvature", curvature),
            _positive("temperature", temperature),
        )
        self.query, self.key, self.value, self.out = (
            nn.Linear(dim, dim, bias=bias) for _ in range(4)
        )
        self.log_temperature = nn.Parameter(torch.zeros(heads))
        self.log_curvature = nn.Parameter(torch.zeros(heads)) if learn_curvature else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Projections that keep the length of tangent vectors on average, no bias, configured τ and c."""
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
        """Attend.

        Args:
            points: [B, N, dim], points of the ball; what lies on the rim or beyond counts as just inside.
            context: [B, M, dim], the points attended to; None: `points` themselves.
            attn_mask: bool (True = take part) or additive, broadcastable to [B, heads, N, M]. A point that sees no
                point attends to the origin.
            is_causal: point i sees points j <= i; intersects with `attn_mask`.

        Returns:
            [B, N, dim], points of the ball, in the dtype of `points`. Half precisions resolve the ball coarsely and
            are kept one rounding step inside; prefer float32 for points.
        """
        context = points if context is None else context
        tangent = self._tangent("points", points)
        other = tangent if context is points else self._tangent("context", context)
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, x in ((self.query, tangent), (self.key, other), (self.value, other))
        )
        out = hyperbolic_attention(
            q,
            k,
            v,
            attn_mask,
            self.dropout if self.training else 0.0,
            is_causal,
            scale=1.0,
            curvature=self.curvature
            if self.log_curvature is None
            else _grown(self.curvature, self.log_curvature),
            temperature=_grown(self.temperature, self.log_temperature),
            backend=self.backend,
        )
        return self._points(self.out(out.transpose(1, 2).flatten(2)), points.dtype)

    def _tangent(self, name: str, points: Tensor) -> Tensor:
        if points.dim() != 3 or points.shape[-1] != self.dim or not points.is_floating_point():
            raise ValueError(
                f"{name} has shape {tuple(points.shape)} and dtype {points.dtype}; allowed: "
                f"[batch, length, {self.dim}], floating point"
            )
        return poincare.logmap0(points, self.curvature).to(self.query.weight.dtype)

    def _points(self, tangent: Tensor, dtype: torch.dtype) -> Tensor:
        points = poincare.expmap0(tangent, self.curvature)
        limit = 1 - torch.finfo(dtype).eps
        return (
            poincare.project(points, self.curvature, limit) if limit < poincare.LIMIT else points
        ).to(dtype)

    def extra_repr(self) -> str:
        """What `print` says of it."""
        return f"dim={self.dim}, heads={self.heads}, curvature={self.curvature}"


def _grown(start: float, log: Tensor) -> Tensor:
    return start * torch.exp(log if log.dtype == torch.float64 else log.float())


def _check_heads(dim: int, heads: int) -> None:
    if not isinstance(dim, int) or dim < 2:
        raise ValueError(f"dim={dim!r} is not allowed; allowed: integers from 2")
    if not isinstance(heads, int) or heads < 1 or dim % heads or dim // heads < 2:
        raise ValueError(
            f"heads={heads!r} is not allowed with dim={dim}; allowed: divisors of dim that leave 2 or more a head"
        )


def _positive(name: str, value: float) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name}={value!r} is not allowed; allowed: finite numbers above 0")
    return float(value)
