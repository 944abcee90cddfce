"""Compute the HyPE bias on tiles.

Here you learn how engines evaluate and differentiate the bias. Row and column statistics are
positions, which are exact in float32.
"""

from __future__ import annotations

import torch

from ...engines.score import Term, register_term
from .reference import FARTHEST, FORMS


class Hype(Term):
    """The HyPE bias of a pair. It reads positions, mu and tau, but no product.

    Args:
        form: "sinh" or "cosh".
    """

    rows, columns, heads = 1, 1, 2

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


for _form in FORMS:
    register_term(Hype(_form))
