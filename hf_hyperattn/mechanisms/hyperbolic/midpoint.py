"""Compute the Einstein midpoint of values (arXiv 1805.09786, section 4).

Here you learn how a midpoint becomes columns that an engine averages, and one division afterwards.

Values are lifted into the ball like keys. In Klein coordinates a value is k = tanh(2a) v̂ / √c, with
Lorentz factor γ = cosh(2a). The midpoint is Σ w γ k / Σ w γ. In the Lorentz form, it is Σ w x, scaled
back onto the sheet. It is mapped to the tangent space at the origin and divided by the scale.

Engines average γ√c k = sinh(2a) v̂ (d columns), sinh(2a), exp(-2a) and 1. sinh(2a) and exp(-2a) add up
to γ. γ as one column would lose the digits of points far from the origin: the radius of the midpoint is

    artanh(|X| / T)        X = Σ w γ√c k        T = Σ w γ

and T - |X| is the sum of exp(-2a), plus the length that different directions take from |X|.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines.options import Aggregation
from ...engines.score import READERS, Reader, repeat_heads, working_dtype
from ...geometry.scalars import at_least
from ...utils.readable import is_transformed
from .reference import direction_and_norm, half_radii, measure_norms, read_norm, shortest

#: Columns that follow the d columns of the value itself.
EXTRA = 3
#: Differences below SLACK · eps · Σ w sinh(2a) are rounding, not a difference of directions.
SLACK = 4.0


def midpoint_columns(value: Tensor, curvature: Tensor, scale: float) -> Tensor:
    """Return lifted values as columns to average.

    Args:
        value: Values [B, Hkv, M, dv].
        curvature: c, [H] or [1]. With [H], the heads of the result are repeated to H.
        scale: Factor of values before they are lifted.

    Returns:
        [B, Hkv or H, M, dv + 3] in the working dtype: sinh(2a) v̂, sinh(2a), exp(-2a), 1.
    """
    dtype = working_dtype(value)
    # Plain operators for autograd, the compiler and torch.func, which cannot write into a tensor.
    learns = torch.is_grad_enabled() and (value.requires_grad or curvature.requires_grad)
    if not torch.compiler.is_compiling() and not learns and not is_transformed():
        return _make_columns_at_once(value, curvature.to(dtype), scale)
    direction, norm = direction_and_norm(value.to(dtype), scale)
    r = 2 * half_radii(norm, curvature.to(dtype))[..., None]
    sinh = torch.sinh(r)
    direction = repeat_heads(direction, r.shape[1])
    return torch.cat([sinh * direction, sinh, torch.exp(-r), torch.ones_like(r)], dim=-1)


def _make_columns_at_once(value: Tensor, curvature: Tensor, scale: float) -> Tensor:
    """Return the columns of `midpoint_columns` without a backward pass.

    It reads and writes the values only once, because each generated token needs it.
    """
    norm = measure_norms(value, curvature.dtype, scale)
    r = 2 * half_radii(norm, curvature)
    value, norm = (repeat_heads(x, r.shape[1]) for x in (value, norm))
    sinh = torch.sinh(r)
    width = value.shape[-1]
    columns = value.new_empty(*value.shape[:3], width + EXTRA, dtype=curvature.dtype)
    torch.mul(value, (sinh * (scale / norm))[..., None], out=columns[..., :width])
    further: tuple[Tensor | float, ...] = (sinh, torch.exp(-r), 1.0)
    for i, column in enumerate(further):
        columns[..., width + i] = column
    return columns


def midpoint(sums: Tensor, curvature: Tensor, scale: float, sinks: bool = False) -> Tensor:
    """Return the midpoints of averaged columns, as tangent vectors at the origin over `scale`.

    Args:
        sums: Columns of `midpoint_columns` times the weights, [B, H, N, dv + 3].
        curvature, scale: As in `midpoint_columns`.
        sinks: Whether weights may add up to less than 1. The rest of the weight then lies at the
            origin, as in a mean.

    Returns:
        Midpoints [B, H, N, dv]. A query that sees no key gets zeros.
    """
    x, sinh, decay, total = sums.split([sums.shape[-1] - EXTRA, 1, 1, 1], dim=-1)
    if sinks:
        decay = decay + at_least(1 - total, 0.0)
    size = x.detach().abs().amax(-1, keepdim=True).clamp_min(shortest(x.dtype))
    length = size * at_least(torch.linalg.vector_norm(x / size, dim=-1, keepdim=True), 1.0)
    slope = compute_slope(length, sinh, decay, total, torch.finfo(x.dtype).eps)
    c = curvature.to(x.dtype)[:, None, None]
    return x * slope / (c.sqrt() * scale)


def compute_slope(length, sinh, decay, total, eps: float):
    """Return artanh(|X| / T) / (2 |X|), the half radius of a midpoint over |X|.

    Args:
        length: |X|, above 0.
        sinh, decay: Averages of sinh(2a) and exp(-2a), with all weight that lies at the origin.
        total: Sum of the weights.
        eps: Rounding step of the dtype.
    """
    rounding = SLACK * eps * sinh
    # T - |X|
    rest = decay + at_least(sinh - length - rounding, 0.0)
    # Without a key all sums are 0, and 0 / 0 would be NaN.
    rest = torch.where(total > 0, rest, 1.0)
    return torch.log1p(2 * length / rest) / 4 / length


def make_aggregation(
    curvature: Tensor | float, scale: float, gate: Tensor | None = None
) -> Aggregation:
    """Return the midpoint as engines see it.

    Args:
        curvature: c, a number, or a tensor [H] or [1].
        scale: Factor of values before they are lifted.
        gate: As in `Aggregation`.
    """

    def read_curvature(like: Tensor) -> Tensor:
        return torch.as_tensor(curvature, dtype=like.dtype, device=like.device).reshape(-1)

    def make_columns(value: Tensor) -> Tensor:
        return midpoint_columns(value, read_curvature(value), scale)

    def finish_midpoint(sums: Tensor, sinks: bool) -> Tensor:
        return midpoint(sums, read_curvature(sums), scale, sinks)

    return Aggregation(
        name="midpoint",
        columns=make_columns,
        finish=finish_midpoint,
        parameters=(curvature, scale),
        gate=gate,
    )


def read_lift(row, column, head):
    """Return the factor of a value, with sinh(2a) and exp(-2a), see `Aggregation`.

    Args:
        row: Unused.
        column, head: As in `read_norm`.
    """
    _, scale = head
    norm, a = read_norm(column, head)
    r = 2 * a
    sinh = torch.sinh(r)
    return scale * sinh / norm, (sinh, torch.exp(-r))


def read_land(row, column, head):
    """Return the factor of an averaged value, see `Aggregation`; `midpoint` has the formula.

    Args:
        row: Unused.
        column: Sum of squares of the averaged value, averages of sinh(2a) and exp(-2a), and the sum
            of the weights.
        head: The curvature and the scale.
    """
    square, sinh, decay, total = column
    curvature, scale = head
    length = at_least(square.sqrt(), shortest(torch.float32))
    # The rest of the weight lies at the origin.
    decay = decay + at_least(1 - total, 0.0)
    slope = compute_slope(length, sinh, decay, total, torch.finfo(torch.float32).eps)
    return slope / (curvature.sqrt() * scale), ()


READERS["midpoint lift"] = Reader("midpoint lift", read_lift, 2)
READERS["midpoint land"] = Reader("midpoint land", read_land, 2, columns=4)
