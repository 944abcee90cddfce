"""HyPE as engines compute it on a tile: row and column statistics are positions, which are exact in float32."""

from __future__ import annotations

import torch

from ...engines.score import Term, register_term
from .reference import FARTHEST


class Hype(Term):
    """Reads no product. Row and column: positions; head: mu, tau."""

    rows, columns, heads = 1, 1, 2

    def __init__(self, form: str):
        self.name, self.form = f"hype_{form}", form

    def logits(self, dot, row, column, head, squared_distance=None):
        mu, tau = head
        x = (
            torch.sub(column[0], row[0]).detach().mul(mu).clamp_(-FARTHEST, FARTHEST)
        )  # positions do not learn
        if self.form == "sinh":
            return x.sinh_().mul_(tau)
        return x.mul_(0.5).sinh_().square_().mul_(-2 * tau)

    def vjp(self, dot, row, column, head, squared_distance=None):
        mu, tau = head
        distance = torch.sub(column[0], row[0])
        x = (distance * mu).clamp_(-FARTHEST, FARTHEST)
        sinh = x.sinh()
        # the bias over tau, and its slope in x over tau
        unit, slope = (
            (sinh, x.cosh()) if self.form == "sinh" else ((x / 2).sinh_().square_().mul_(-2), -sinh)
        )

        def pullback(grad):
            d_tau = (grad * unit).sum((-2, -1), keepdim=True)
            d_mu = (grad * slope.mul(distance)).sum((-2, -1), keepdim=True) * tau
            return None, (None,), (None,), (d_mu, d_tau)

        return unit * tau, pullback


SINH, COSH = (register_term(Hype(form)) for form in ("sinh", "cosh"))
