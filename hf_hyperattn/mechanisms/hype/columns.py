"""HyPE as a product of a few numbers per query with a few per key (engines/sdpa.py puts them beside Q and K).

With positions counted from their middle, x = μ i and y = μ j, the addition theorems give

    sinh(y - x)     = cosh x sinh y - sinh x (cosh y - 1)  - sinh x
    1 - cosh(x - y) = sinh x sinh y - cosh x (cosh y - 1)  + (1 - cosh x)

The last part is one number a row. What remains is smaller than the two exponentials that each side is made of, and so
are the rounding errors of the sum. Factors are float64: engines round or split them as their dtype needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Half a float32 unit in the last place of sums up to this size is 5e-4; the error of a whole logit stays below 2e-3.
LARGEST_SUM = 2.0**13


def factors(
    query_positions: Tensor, key_positions: Tensor, mu: Tensor, tau: Tensor, form: str
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, N, 2], [B, H or 1, M, 2] and [B, H, N] in float64; arguments as in `bias.definition`."""
    mu, tau = mu.double()[:, None], tau.double()[:, None]
    i, j = query_positions.double(), key_positions.double()
    low = torch.minimum(i.amin(-1, keepdim=True), j.amin(-1, keepdim=True))
    high = torch.maximum(i.amax(-1, keepdim=True), j.amax(-1, keepdim=True))
    middle = (low + high) / 2
    x, y = mu * (i - middle), mu * (j - middle)
    sinh, cosh, less = torch.sinh(x), torch.cosh(x), -2 * torch.sinh(x / 2) ** 2  # less: 1 - cosh x
    left = (cosh, -sinh) if form == "sinh" else (sinh, -cosh)
    right = torch.stack([torch.sinh(y), 2 * torch.sinh(y / 2) ** 2], -1)
    return tau[..., None] * torch.stack(left, -1), right, tau * (-sinh if form == "sinh" else less)


def fits(mu: Tensor, tau: Tensor, reach: float, form: str) -> bool:
    """Whether float32 sums of the columns are exact enough for every head: the largest sum is τ·sinh(μ reach)/2, or for
    cosh τ·(cosh(μ reach) - 1)/2, half the largest bias.

    Args:
        mu: [H] or [1].
        tau: [H] or [1], times the gate where there is one.
        reach: the largest distance of two positions.
    """
    x = mu.detach().double() * reach
    largest = torch.sinh(x) if form == "sinh" else torch.cosh(x) - 1
    return bool((tau.detach().double().abs() * largest / 2 <= LARGEST_SUM).all())
