"""Hyperbolic-distance scores as engines compute them: one dot product, then a few operations a pair.

With a the half radius of a point and G the squared distance of two directions, G = 2 - 2 cos θ, half the hyperbolic
law of cosines is

    w = sinh²(√c d / 2) = X² + p_q p_k G        X = sinh(a_q - a_k) = sinh a_q cosh a_k - cosh a_q sinh a_k
                                                p = sinh a cosh a

and the logits are -β arcosh(1 + 2w), β = 1/(τ√c), or -β w, β = 4/(cτ). Row and column statistics are (sinh a, cosh a);
the `_on_product` terms read the host's product instead of the directions', cos θ = inverse_q · inverse_k · product,
with the inverse norms as a third statistic.

From the product, w is off by some eps · p_q p_k, which spoils it where θ is small and the points are far out or close
together: the terms ask for such pairs from differences, see `inexact`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...engines.score import Term, register_term

HEADER = Path(__file__).with_name("hyperbolic.h")
NOISE = 4.0  # |error of w| <= NOISE · eps · p_q p_k by the product
BLUR = 16.0  # and from differences w means nothing below (BLUR · eps)² p_q p_k
EXACT = 2e-4  # the error of a logit above which differences are asked for
STEEP = 2048.0  # and where w is less than this many times its noise, for the sake of the gradient
RELATIVE = 1e-5  # the error of a squared Lorentz distance that is always allowed, relative to it


class HyperbolicTerm(Term):
    """What both terms share: w, and the gradients that flow through it."""

    heads = 1
    steep = True  # whether the slope by w is infinite where points coincide

    def __init__(self, name: str, on_product: bool):
        self.name, self.on_product = name, on_product
        self.rows = self.columns = 3 if on_product else 2
        self.cpp = HEADER, f"hyperbolic::{type(self).__name__}<{on_product:d}>"

    def cosine(self, dot, row, column):
        """cos θ, [..., R, C], up to rounding."""
        return torch.mul(dot, column[2]).mul_(row[2]) if self.on_product else dot

    def opening(self, dot, row, column):
        """G = 2 - 2 cos θ from the product, [..., R, C], never negative."""
        return torch.rsub(self.cosine(dot, row, column), 2.0, alpha=2.0).clamp_min_(0.0)

    def separation(self, opening, row, column):
        """w, and X, each [..., R, C]."""
        (sinh_q, cosh_q), (sinh_k, cosh_k) = row[:2], column[:2]
        # not addcmul, which rounds once and would leave something of sinh a cosh a - cosh a sinh a
        x = torch.mul(sinh_q, cosh_k).sub_(torch.mul(cosh_q, sinh_k))
        w = torch.mul(opening, sinh_k * cosh_k).mul_(sinh_q * cosh_q).addcmul_(x, x)
        return w, x

    def noise(self, dot, row, column, differences=False):
        """What rounding may add to w or take from it: a factor per row and one per column."""
        eps = torch.finfo(dot.dtype).eps
        scale = (BLUR * eps) ** 2 if differences else NOISE * eps
        return scale * (row[0] * row[1]), column[0] * column[1]

    def inexact(self, dot, row, column, head):
        """The pairs for which the product form is too inexact, bool [..., R, C]; None where it is good everywhere."""
        by_row, by_column = self.noise(dot, row, column)
        largest = _over(torch.amax, by_row) * _over(torch.amax, by_column)
        # w >= p_q p_k G: mostly this alone tells that there is no such pair
        p = _over(torch.amin, row[0] * row[1]) * _over(torch.amin, column[0] * column[1])
        least = p * (2 - 2 * _over(torch.amax, self.cosine(dot, row, column))).clamp_min(0.0)
        if not self.uncertain(least, largest, head).any():
            return None
        w, _ = self.separation(self.opening(dot, row, column), row, column)
        if not self.uncertain(_over(torch.amin, w), largest, head).any():
            return None
        return self.uncertain(w, by_row * by_column, head)

    def uncertain(self, w, noise, head):
        """Where an error of `noise` in w matters; no less likely for smaller w or larger noise."""
        raise NotImplementedError

    def logits(self, dot, row, column, head, gap=None):
        return self.vjp(dot, row, column, head, gap)[0]

    def vjp(self, dot, row, column, head, gap=None):
        opening, near = self.opening(dot, row, column), None
        if gap is not None:
            exact = dot.dtype == torch.float64  # accuracy is what the caller wants
            pairs = None if exact else self.inexact(dot, row, column, head)
            if exact or pairs is not None:
                found = gap(pairs)
                near = ~found.isnan()
                opening = torch.where(near, found, opening)
        w, x = self.separation(opening, row, column)
        logits, pull = self.score(w, head)

        def pullback(grad):
            d_w, d_head = pull(grad)
            if self.steep or near is not None:
                # what rounding leaves of the distance of coinciding points must not steer a gradient
                by_row, by_column = self.noise(dot, row, column, differences=near is not None)
                if (_over(torch.amin, w) <= _over(torch.amax, by_row) * _over(torch.amax, by_column)).any():
                    d_w.masked_fill_(w <= by_row * by_column, 0.0)
            d_gap = ()
            if near is not None:
                p = (row[0] * row[1]) * (column[0] * column[1])
                d_gap = (torch.where(near, d_w * p, 0.0),)
            return *self.through_separation(d_w, dot, opening, x, row, column, near), d_head, *d_gap

        return logits, pullback

    def through_separation(self, d_w, dot, opening, x, row, column, near):
        """Gradients of the product and of the statistics from that of w; `near` are pairs that read no product."""
        (sinh_q, cosh_q), (sinh_k, cosh_k) = row[:2], column[:2]
        p_q, p_k = sinh_q * cosh_q, sinh_k * cosh_k
        d_x = torch.mul(d_w, x).mul_(2.0)
        inner = torch.mul(d_w, opening)
        by_row, by_column = inner @ p_k.mT, p_q.mT @ inner
        d_row = (d_x @ cosh_k.mT + cosh_q * by_row, sinh_q * by_row - d_x @ sinh_k.mT)
        d_column = (cosh_k * by_column - cosh_q.mT @ d_x, sinh_q.mT @ d_x + sinh_k * by_column)
        d_dot = d_w.mul_(-2.0).mul_(p_k).mul_(p_q)
        if near is not None:
            d_dot.masked_fill_(near, 0.0)
        if self.on_product:
            turned = torch.mul(d_dot, dot)
            d_dot = d_dot.mul_(column[2]).mul_(row[2])
            d_row, d_column = (*d_row, turned @ column[2].mT), (*d_column, row[2].mT @ turned)
        return d_dot, d_row, d_column

    def score(self, w, head):
        """Logits from w, and the pullback to `(d_w, (d_beta,))`; `w` is left as it is."""
        raise NotImplementedError


class Geodesic(HyperbolicTerm):
    """S = -β arcosh(1 + 2w) = -β log(1 + 2w + 2 sqrt(w (w + 1))), a slope of -β / sqrt(w (w + 1))."""

    def score(self, w, head):
        root = torch.addcmul(w, w, w).sqrt_()
        distance = torch.add(w, root).mul_(2.0).log1p_()

        def pullback(grad):
            return torch.div(grad, root).mul_(-head[0]), (-(grad * distance),)

        return distance * -head[0], pullback

    def uncertain(self, w, noise, head):
        return (head[0] * noise > EXACT * torch.addcmul(w, w, w).sqrt()) | (w < STEEP * noise)


class SquaredLorentz(HyperbolicTerm):
    """S = -β w."""

    steep = False

    def score(self, w, head):
        return w * -head[0], lambda grad: (grad * -head[0], (-(grad * w),))

    def uncertain(self, w, noise, head):
        return (head[0] * noise > EXACT) & (noise > RELATIVE * w)


def _over(extreme, x):
    """The extreme number of each head's tile, [..., 1, 1]; 0 where rows see no key at all."""
    if not x.numel():
        return x.new_zeros(*x.shape[:-2], 1, 1)
    return extreme(x, (-1, -2), keepdim=True)


for _on_product in (False, True):
    _suffix = "_on_product" if _on_product else ""
    register_term(Geodesic("geodesic" + _suffix, _on_product))
    register_term(SquaredLorentz("squared_lorentz" + _suffix, _on_product))
