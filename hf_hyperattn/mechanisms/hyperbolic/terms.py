"""Hyperbolic-distance scores as engines compute them: one dot product, then a few operations a pair.

With a the half radius of a point and G the squared distance of two directions, G = 2 - 2 cos θ, half the hyperbolic
law of cosines is

    w = sinh²(√c d / 2) = X² + p_q p_k G        X = sinh(a_q - a_k) = sinh a_q cosh a_k - cosh a_q sinh a_k
                                                p = sinh a cosh a

and the logits are -β arcosh(1 + 2w), β = 1/(τ√c), or -β w, β = 4/(cτ). Row and column statistics are (sinh a, cosh a);
the `_on_product` terms read the host's product instead of the directions', cos θ = inverse_q · inverse_k · product,
with the inverse norms as a third statistic.

From the product, w is off by some eps · p_q p_k, which spoils it where θ is small and the points are far out or close
together: the terms ask for such pairs from differences, see `is_inexact`.
"""

from __future__ import annotations

import torch

from ...engines.score import DerivedDistanceTerm, register_term

EPS = (
    2.0**-23
)  # of float32, in which kernels compute; in float64 blocks take as many pairs from differences
NOISE = 4.0  # |error of w| <= NOISE · eps · p_q p_k by the product
BLUR = 16.0  # and from differences w means nothing below (BLUR · eps)² p_q p_k
EXACT = 2e-4  # the error of a logit above which differences are asked for
STEEP = 2048.0  # and where w is less than this many times its noise, for the sake of the gradient
RELATIVE = 1e-5  # the error of a squared Lorentz distance that is always allowed, relative to it


class HyperbolicTerm(DerivedDistanceTerm):
    """What both terms share: G, w, and the gradients that flow through them. The squared distance is G."""

    heads = 1

    def __init__(self, name: str, on_product: bool):
        self.name, self.on_product = name, on_product
        self.rows = self.columns = 3 if on_product else 2

    def by_product(self, dot, row, column, head):
        cosine = torch.mul(dot, column[2]).mul_(row[2]) if self.on_product else dot
        opening = torch.rsub(cosine, 2.0, alpha=2.0)
        return opening - opening.detach().clamp_max(
            0.0
        )  # the slope stays where rounding makes it negative

    def is_inexact(self, squared_distance, row, column, head):
        w, _ = self.separation(squared_distance, row, column)
        return self.uncertain(w, NOISE * EPS * (row[0] * row[1]) * (column[0] * column[1]), head)

    def factors(self, row, column, head):
        return (row[2], column[2]) if self.on_product else (1.0, 1.0)

    def squared_distances(self, dot, row, column, head, squared_distance=None):
        if squared_distance is not None and not self.may_be_inexact(dot, row, column, head):
            squared_distance = None
        return super().squared_distances(dot, row, column, head, squared_distance)

    def may_be_inexact(self, dot, row, column, head) -> bool:
        """Whether some pair may be: w >= p_q p_k G, of which the extremes mostly tell enough."""
        by_row, by_column = row[0] * row[1], column[0] * column[1]
        cosine = torch.mul(dot, column[2]).mul_(row[2]) if self.on_product else dot
        p = _over(torch.amin, by_row) * _over(torch.amin, by_column)
        least = p * (2 - 2 * _over(torch.amax, cosine)).clamp_min(0.0)
        noise = NOISE * EPS * _over(torch.amax, by_row) * _over(torch.amax, by_column)
        return bool(self.uncertain(least, noise, head).any())

    def separation(self, opening, row, column):
        """w, and X, each [..., R, C]."""
        (sinh_q, cosh_q), (sinh_k, cosh_k) = row[:2], column[:2]
        # in a form that is exactly 0 for equal radii, however products are rounded and fused
        x = (sinh_q - sinh_k).mul_(cosh_k).addcmul_(cosh_q - cosh_k, sinh_k, value=-1)
        w = torch.mul(opening, sinh_k * cosh_k).mul_(sinh_q * cosh_q).addcmul_(x, x)
        return w, x

    def uncertain(self, w, noise, head):
        """Where an error of `noise` in w matters; no less likely for smaller w or larger noise."""
        raise NotImplementedError

    def blur(self, row, column):
        """What rounding leaves of the w of points that coincide, as a factor per row and one per column."""
        return (BLUR * torch.finfo(row[0].dtype).eps) ** 2 * (row[0] * row[1]), column[0] * column[
            1
        ]

    def score(self, dot, row, column, head, squared_distance):
        w, _ = self.separation(squared_distance, row, column)
        by_row, by_column = self.blur(row, column)
        w = torch.where(w <= by_row * by_column, w.detach(), w)  # blur must not steer a gradient
        return self.of_separation(w, head)[0]

    def derive(self, row, column, head, squared_distance):
        w, x = self.separation(squared_distance, row, column)
        logits, pull = self.of_separation(w, head)

        def pullback(grad):
            d_w, d_head = pull(grad)
            by_row, by_column = self.blur(row, column)
            if (
                _over(torch.amin, w) <= _over(torch.amax, by_row) * _over(torch.amax, by_column)
            ).any():
                d_w.masked_fill_(w <= by_row * by_column, 0.0)
            (sinh_q, cosh_q), (sinh_k, cosh_k) = row[:2], column[:2]
            p_q, p_k = sinh_q * cosh_q, sinh_k * cosh_k
            d_x, inner = torch.mul(d_w, x).mul_(2.0), torch.mul(d_w, squared_distance)
            by_row, by_column = inner @ p_k.mT, p_q.mT @ inner
            d_row = (d_x @ cosh_k.mT + cosh_q * by_row, sinh_q * by_row - d_x @ sinh_k.mT)
            d_column = (cosh_k * by_column - cosh_q.mT @ d_x, sinh_q.mT @ d_x + sinh_k * by_column)
            return d_w.mul_(p_k).mul_(p_q), d_row, d_column, d_head

        return logits, pullback

    def through_product(self, d_squared, dot, row, column):
        d_cosine = d_squared.mul_(-2.0)
        if not self.on_product:
            return d_cosine, (), ()
        turned = torch.mul(d_cosine, dot)
        return (
            d_cosine.mul_(column[2]).mul_(row[2]),
            (turned @ column[2].mT,),
            (row[2].mT @ turned,),
        )

    def of_separation(self, w, head):
        """Logits from w, and the pullback to `(d_w, (d_beta,))`; `w` is left as it is."""
        raise NotImplementedError


class Geodesic(HyperbolicTerm):
    """S = -β arcosh(1 + 2w) = -β log(1 + y + sqrt(y (y + 2))), y = 2w; a slope by w of -2β / sqrt(y (y + 2))."""

    def of_separation(self, w, head):
        y = 2 * w
        root = torch.add(y, 2).mul_(y).sqrt_()
        distance = torch.add(y, root).log1p_()

        def pullback(grad):
            return torch.div(grad, root).mul_(-2 * head[0]), (-(grad * distance),)

        return distance * -head[0], pullback

    def uncertain(self, w, noise, head):
        return ((head[0] * noise / EXACT).square() > torch.addcmul(w, w, w)) | (w < STEEP * noise)


class SquaredLorentz(HyperbolicTerm):
    """S = -β w."""

    def of_separation(self, w, head):
        return w * -head[0], lambda grad: (grad * -head[0], (-(grad * w),))

    def uncertain(self, w, noise, head):
        return (w < STEEP * noise) | ((head[0] * noise > EXACT) & (noise > RELATIVE * w))


def _over(extreme, x):
    """The extreme number of each head's tile, [..., 1, 1]; 0 where rows see no key at all."""
    if not x.numel():
        return x.new_zeros(*x.shape[:-2], 1, 1)
    return extreme(x, (-1, -2), keepdim=True)


for _on_product in (False, True):
    _suffix = "_on_product" if _on_product else ""
    register_term(Geodesic("geodesic" + _suffix, _on_product))
    register_term(SquaredLorentz("squared_lorentz" + _suffix, _on_product))
