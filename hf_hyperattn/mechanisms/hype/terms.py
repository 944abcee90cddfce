"""Compute the HyPE bias on tiles.

Here you learn how engines evaluate and differentiate the bias. Row and column statistics are
positions, which are exact in float32.
"""

from __future__ import annotations

import torch

from ...engines.score import SeparableTerm, register_term
from .reference import FARTHEST, FORMS

#: Largest |μ · offset| of a line near its anchor, and of a line on the other side. Together they
#: stay below FARTHEST, where the definition cuts.
NEAR = 1.0
FAR = FARTHEST - 2 * NEAR
#: Largest bias between a line and its anchor. The products of pairs near the anchor are about this
#: large and cancel. Each is rounded by up to 4e-6, half a float32 unit in the last place. The error
#: of the bias stays below 1e-5 (tests/mechanisms/hype/test_hype_long.py).
LARGEST_NEAR = 64.0


class Hype(SeparableTerm):
    """The HyPE bias of a pair. It reads positions, mu and tau, but no product.

    Args:
        form: "sinh" or "cosh".
    """

    heads = 2

    def __init__(self, form: str):
        self.name, self.form = f"hype_{form}", form

    def logits(self, dot, row, column, head, squared_distance=None):
        mu, tau = head
        # Detached, because positions get no gradient.
        distance = torch.sub(column[0], row[0]).detach()
        x = distance.mul(mu).clamp_(-FARTHEST, FARTHEST)
        if self.form == "sinh":
            return x.sinh_().mul_(tau)
        # 1 - cosh x = -2 sinh²(x / 2), without the cancellation near 0.
        return x.mul_(0.5).sinh_().square_().mul_(-2 * tau)

    def vjp(self, dot, row, column, head, squared_distance=None):
        mu, tau = head
        distance = torch.sub(column[0], row[0])
        x = (distance * mu).clamp_(-FARTHEST, FARTHEST)
        sinh = x.sinh()
        # The bias divided by tau, and its slope in x divided by tau.
        if self.form == "sinh":
            unit, slope = sinh, x.cosh()
        else:
            unit, slope = (x / 2).sinh_().square_().mul_(-2), -sinh

        def pull_back(grad):
            d_tau = (grad * unit).sum((-2, -1), keepdim=True)
            d_mu = (grad * slope.mul(distance)).sum((-2, -1), keepdim=True) * tau
            return None, (None,), (None,), (d_mu, d_tau)

        return unit * tau, pull_back

    # Addition theorems, as in columns.py. There one middle serves the whole sequence, and the error
    # grows with τ·sinh(μ·length). Here the anchor lies in the block of queries or of keys: one factor
    # of each product then stays small (see the constants above), and the sum is no larger than the
    # bias itself or LARGEST_NEAR. That holds at any distance, so long positions lose no digits.
    def split_row(self, offset, head):
        mu, tau = head
        x = offset * mu
        sinh, cosh = x.sinh(), x.cosh()
        if self.form == "sinh":
            # sinh(y - x) = cosh x sinh y - sinh x cosh y.
            return cosh * tau, -sinh * tau
        # 1 - cosh(y - x) = (1 - cosh x) + sinh x sinh y - cosh x (cosh y - 1).
        return -subtract_one(sinh, cosh) * tau, sinh * tau, -cosh * tau

    def split_column(self, offset, head):
        y = offset * head[0]
        sinh, cosh = y.sinh(), y.cosh()
        if self.form == "sinh":
            return sinh, cosh
        return 1.0, sinh, subtract_one(sinh, cosh)

    def split_margins(self, offset, head):
        mu, tau = head
        size = (offset * mu).abs()
        # sinh x <= 1.2 x up to 1.
        near = torch.minimum(NEAR - size, LARGEST_NEAR - 1.2 * size * tau.abs())
        return near, FAR - size


def subtract_one(sinh, cosh):
    """Return cosh - 1 without its cancellation near 0."""
    return sinh * (sinh / (cosh + 1))


for _form in FORMS:
    register_term(Hype(_form))
