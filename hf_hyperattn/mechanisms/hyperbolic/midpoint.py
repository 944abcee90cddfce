"""The Einstein midpoint of values (Hyperbolic Attention Networks, arXiv 1805.09786, section 4), as columns that an
engine averages and one division after it.

Values are lifted into the ball like keys. In Klein coordinates a value is k = tanh(2a) v̂ / √c with Lorentz factor
γ = cosh(2a), and the midpoint Σ w γ k / Σ w γ; in the Lorentz form, Σ w x brought back onto the sheet. It is mapped to
the tangent space at the origin and divided by the scale. Engines average γ√c k = sinh(2a) v̂ (d columns), sinh(2a) and
exp(-2a), of which the last two add up to γ.

Two columns instead of γ alone keep points far out: the radius of the midpoint is artanh(|X| / T), X = Σ w γ√c k,
T = Σ w γ, and T - |X| is the sum of exp(-2a), plus what different directions take away from |X|.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines.cpu import norms
from ...engines.options import Aggregation
from ...engines.score import READERS, Reader, repeat_heads, working_dtype
from ...geometry.scalars import at_least
from ...readable import is_transformed
from .reference import direction_and_norm, half_radius, shortest

#: Columns beside the d of the value itself.
EXTRA = 3
SLACK = 4.0  # · eps · Σ w sinh(2a): less than this is rounding, not a difference of directions


def midpoint_columns(value: Tensor, curvature: Tensor, scale: float) -> Tensor:
    """Lifted values as columns to average.

    Args:
        value: [B, Hkv, M, dv].
        curvature: c, [H] or [1]; with [H] the heads of the result are repeated to H.
        scale: what values are multiplied with before they are lifted.

    Returns:
        [B, Hkv or H, M, dv + 3] in the working dtype: sinh(2a) v̂, sinh(2a), exp(-2a), 1.
    """
    dtype = working_dtype(value)
    learns = torch.is_grad_enabled() and (value.requires_grad or curvature.requires_grad)
    if not torch.compiler.is_compiling() and not learns and not is_transformed():
        return _columns_at_once(value, curvature.to(dtype), scale)
    direction, norm = direction_and_norm(value.to(dtype), scale)
    if curvature.shape[0] > 1:
        direction, norm = (repeat_heads(x, curvature.shape[0]) for x in (direction, norm))
    r = 2 * half_radius(norm, curvature.to(dtype)[:, None])[..., None]
    sinh = torch.sinh(r)
    return torch.cat([sinh * direction, sinh, torch.exp(-r), torch.ones_like(r)], dim=-1)


def _columns_at_once(value: Tensor, curvature: Tensor, scale: float) -> Tensor:
    """The same in one reading and one writing of the values, as a generated token needs it: nothing of them is kept for
    a backward pass.
    """
    norm = at_least(scale * norms(value, curvature.dtype), shortest(curvature.dtype))
    if curvature.shape[0] > 1:
        value, norm = (repeat_heads(x, curvature.shape[0]) for x in (value, norm))
    r = 2 * half_radius(norm, curvature[:, None])
    sinh, width = torch.sinh(r), value.shape[-1]
    columns = value.new_empty(*value.shape[:3], width + EXTRA, dtype=curvature.dtype)
    torch.mul(value, (sinh * (scale / norm))[..., None], out=columns[..., :width])
    further: tuple[Tensor | float, ...] = (sinh, torch.exp(-r), 1.0)
    for i, column in enumerate(further):
        columns[..., width + i] = column
    return columns


def midpoint(sums: Tensor, curvature: Tensor, scale: float, sinks: bool = False) -> Tensor:
    """The midpoints from the averaged columns, as tangent vectors at the origin over `scale`.

    Args:
        sums: [B, H, N, dv + 3], the columns of `midpoint_columns` times the weights.
        curvature, scale: as there.
        sinks: weights may add up to less than 1, and what is missing lies at the origin, as it does for a mean.

    Returns:
        [B, H, N, dv]. A query that sees no key gets zeros.
    """
    x, sinh, decay, total = sums.split([sums.shape[-1] - EXTRA, 1, 1, 1], dim=-1)
    if sinks:
        decay = decay + at_least(1 - total, 0.0)
    size = x.detach().abs().amax(-1, keepdim=True).clamp_min(shortest(x.dtype))
    length = size * at_least(torch.linalg.vector_norm(x / size, dim=-1, keepdim=True), 1.0)
    rounding = SLACK * torch.finfo(x.dtype).eps * sinh
    rest = decay + at_least(sinh - length - rounding, 0.0)  # T - |X|
    rest = torch.where(total > 0, rest, torch.ones_like(rest))
    half = torch.log1p(2 * length / rest) / 4  # half of artanh(|X| / T)
    c = curvature.to(x.dtype)[:, None, None]
    return x * (half / length) / (c.sqrt() * scale)


def einstein(curvature: Tensor | float, scale: float, gate: Tensor | None = None) -> Aggregation:
    """The midpoint as engines see it; curvature is a number, or a tensor [H] or [1]."""

    def numbers(like: Tensor) -> Tensor:
        return torch.as_tensor(curvature, dtype=like.dtype, device=like.device).reshape(-1)

    def columns(value: Tensor) -> Tensor:
        return midpoint_columns(value, numbers(value), scale)

    def finish(sums: Tensor, sinks: bool) -> Tensor:
        return midpoint(sums, numbers(sums), scale, sinks)

    return Aggregation("midpoint", columns, finish, (curvature, scale), gate)


def lift(row, column, head):
    """See `Aggregation`: sinh(2a) and exp(-2a). Parameters: the curvature, and what values are scaled with."""
    (_, square), (curvature, scale) = column, head
    norm = at_least(scale * square.sqrt(), shortest(torch.float32))
    r = 2 * half_radius(norm, curvature)
    sinh = torch.sinh(r)
    return scale * sinh / norm, (sinh, torch.exp(-r))


def land(row, column, head):
    """See `Aggregation` and `midpoint`."""
    (square, sinh, decay, total), (curvature, scale) = column, head
    length = at_least(square.sqrt(), shortest(torch.float32))
    rounding = SLACK * torch.finfo(torch.float32).eps * sinh
    rest = decay + at_least(1 - total, 0.0) + at_least(sinh - length - rounding, 0.0)
    half = torch.log1p(2 * length / torch.where(total > 0, rest, 1.0)) / 4
    return half / length / (curvature.sqrt() * scale), ()


READERS["midpoint lift"] = Reader("midpoint lift", lift, 2)
READERS["midpoint land"] = Reader("midpoint land", land, 2, columns=4)
