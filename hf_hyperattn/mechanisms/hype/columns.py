"""Write HyPE as a product of a few numbers per query with a few per key.

Here you learn which numbers engines/sdpa.py appends to Q and K. Positions i and j count from their
middle. With x = μ i and y = μ j, the addition theorems give

    sinh(y - x)     = cosh x sinh y - sinh x (cosh y - 1)  - sinh x
    1 - cosh(x - y) = sinh x sinh y - cosh x (cosh y - 1)  + (1 - cosh x)

The last part is one number per row. The other parts are smaller than the exponentials in them, and so
are the rounding errors of their sum. Factors are float64: engines round or split them to their dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Largest sum of columns. float32 rounds it by at most 5e-4, so the error of a logit is below 2e-3.
LARGEST_SUM = 2.0**13


def make_factors(
    query_positions: Tensor, key_positions: Tensor, mu: Tensor, tau: Tensor, form: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors of the bias in float64, see `ScoreTerm.low_rank_factors`.

    Arguments are as in `definition` (reference.py). Positions count from the smallest one.

    Returns:
        Factors of queries [B, H, N, 2] and of keys [B, H or 1, M, 2], and one number per row [B, H,
        N].
    """
    mu = mu.double()[:, None]
    tau = tau.double()[:, None]
    i = query_positions.double()
    j = key_positions.double()
    # The smallest position is 0.
    middle = torch.maximum(i.amax(-1, keepdim=True), j.amax(-1, keepdim=True)) / 2
    x = mu * (i - middle)
    y = mu * (j - middle)
    sinh = torch.sinh(x)
    cosh = torch.cosh(x)
    # cosh y - 1 and 1 - cosh x are written without the cancellation near 0.
    right = torch.stack([torch.sinh(y), 2 * torch.sinh(y / 2) ** 2], -1)
    if form == "sinh":
        left = torch.stack([cosh, -sinh], -1)
        row = -sinh
    else:
        left = torch.stack([sinh, -cosh], -1)
        row = -2 * torch.sinh(x / 2) ** 2
    return tau[..., None] * left, right, tau * row


def are_sums_exact(mu: Tensor, tau: Tensor, reach: float, form: str) -> bool:
    """Return whether float32 sums of the columns are exact enough for every head.

    Args:
        mu: μ, [H] or [1].
        tau: τ, or τ times the gate, [H] or [1].
        reach: Largest distance between two positions.
        form: "sinh" or "cosh".
    """
    # The largest sum is half the largest bias.
    x = mu.detach().double() * reach
    largest = torch.sinh(x) if form == "sinh" else torch.cosh(x) - 1
    return bool((tau.detach().double().abs() * largest / 2 <= LARGEST_SUM).all())
