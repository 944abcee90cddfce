"""Cone scores as engines compute them: one dot product, then a few operations a pair.

With X scaled by gamma / (2 sinh r) and h by gamma / 2 (outside the tile, so that automatic differentiation gives the
gradients of gamma and r), and u = h_q - h_k, the umbral score is

    S = -(h_q + h_k + sqrt(max(D², u²)))          D² = |X_q|² + |X_k|² - 2 X_q·X_k

For the penumbral score, points and radius are scaled alike, so that gamma disappears, and outside the cones

    H² = (D² + 2 (h_q² + h_k²) + (h_k² - h_q²)² / D²) / 4

needs no root. Row and column statistics are (h, |X|²), for penumbral (h², sqrt(r² - h²), |X|²). The `_on_product`
terms read the host's product instead: X_q·X_k = stretch_q · stretch_k · (q·k - q_d k_d), with the stretch and the last
coordinate as two more statistics.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...engines.score import Term, register_term

SMALLEST = 1e-6  # of a distance that is divided by
NOISE = 8  # · eps: what rounding leaves of a product, as a share of |X|²
HEADER = Path(__file__).with_name("cone.h")


class ConeTerm(Term):
    """What all cone terms share: the squared distance, and the gradients that flow through it."""

    own = 1  # statistics of the score itself, before those of the distance

    def __init__(self, name: str, on_product: bool):
        self.name, self.on_product = name, on_product
        self.rows = self.columns = self.own + (3 if on_product else 1)

    def gap(self, dot, row, column):
        """D² expanded through the product, less its noise, [..., R, C]: where points coincide it is 0 or negative."""
        noise = NOISE * torch.finfo(dot.dtype).eps
        if not self.on_product:
            return torch.sub(column[self.own], dot, alpha=2).add_(row[self.own] * (1 - noise))
        norm_q, stretch_q, last_q = row[self.own :]
        norm_k, stretch_k, last_k = column[self.own :]
        product = (
            torch.addcmul(dot, last_q * (1 - noise / 2), last_k, value=-1).mul_(stretch_k).mul_(stretch_q)
        )
        return product.mul_(-2).add_(norm_k).add_(norm_q * (1 - noise))

    def logits(self, dot, row, column, head, gap=None):
        return self.vjp(dot, row, column, head, gap)[0]

    def vjp(self, dot, row, column, head, gap=None):
        # what expansion leaves of the distance of coinciding points is noise; it must not steer a gradient
        noise = torch.finfo(dot.dtype).eps * row[self.own] if gap is None else 0.0
        gap = self.gap(dot, row, column) if gap is None else gap
        logits, pull = self.score(gap, row[: self.own], column[: self.own], head)

        def pullback(grad):
            d_gap, d_row, d_column, d_head = pull(grad)
            d_gap.masked_fill_(gap <= noise, 0.0)
            d_dot, dist_row, dist_column = self.through_distance(d_gap, dot, row, column)
            return d_dot, (*d_row, *dist_row), (*d_column, *dist_column), d_head

        return logits, pullback

    def through_distance(self, d_gap, dot, row, column):
        """Gradients of the product and of the distance's statistics from that of D²."""
        by_row, by_column = d_gap.sum(-1, keepdim=True), d_gap.sum(-2, keepdim=True)
        if not self.on_product:
            return d_gap.mul_(-2), (by_row,), (by_column,)
        _, stretch_q, last_q = row[self.own :]
        _, stretch_k, last_k = column[self.own :]
        inner = (
            torch.addcmul(dot, last_q, last_k, value=-1).mul_(d_gap).mul_(-2)
        )  # d_gap · d gap / d(stretches)
        d_dot = d_gap.mul_(-2).mul_(stretch_k).mul_(stretch_q)
        rows = (by_row, inner @ stretch_k.mT, -(d_dot @ last_k.mT))
        columns = (by_column, stretch_q.mT @ inner, -(last_q.mT @ d_dot))
        return d_dot, rows, columns

    def score(self, gap, row, column, head):
        """Logits from D² and the score's own statistics, and the pullback; `gap` is left as it is."""
        raise NotImplementedError


class Umbral(ConeTerm):
    """S = -(h_q + h_k + sqrt(max(D², u²))), u = h_q - h_k; sign(0) = 0 at ties."""

    def __init__(self, name: str, on_product: bool):
        super().__init__(name, on_product)
        self.cpp = HEADER, f"cone::Umbral<{on_product:d}>"

    def score(self, gap, row, column, head):
        (hq,), (hk,) = row, column
        u = hq - hk
        square = u * u
        apart = gap > square
        w = torch.maximum(gap, square, out=square).sqrt_()
        logits = torch.sub(-hk, w).sub_(hq)

        def pullback(grad):
            d_gap = torch.where(apart, grad / w.clamp_min(SMALLEST), 0.0).mul_(-0.5)
            d_u = torch.where(apart, 0.0, grad).mul_(u.sign()).neg_()
            return d_gap, ((d_u - grad).sum(-1, keepdim=True),), (-(d_u + grad).sum(-2, keepdim=True),), ()

        return logits, pullback


class Penumbral(ConeTerm):
    """S = -H² or -H from squared heights, half widths and r²; everything scaled so that gamma is 1."""

    own = 2
    heads = 1

    def __init__(self, name: str, on_product: bool, squared: bool):
        super().__init__(name, on_product)
        self.squared = squared
        self.cpp = HEADER, f"cone::Penumbral<{on_product:d}, {squared:d}>"

    def score(self, gap, row, column, head):
        (pq, a), (pk, b), (r2,) = row, column, head
        tie, gap = (
            gap <= 0,
            gap.clamp_min(SMALLEST**2),
        )  # a copy: the caller still reads the distance as it was
        distance = gap.sqrt()
        difference = pk - pq
        half = (a + b - distance.masked_fill(tie, 0.0)).mul_(0.5)
        outside = half < 0
        between = ~(half >= torch.minimum(a, b)) & ~outside  # NaN is between
        apart = 0.25 * (gap + 2 * (pq + pk) + difference.square() / gap)
        inside = torch.where(between, r2 - half.square(), torch.maximum(pq, pk))
        height2 = torch.where(outside, apart, inside)
        root = None if self.squared else height2.clamp_min(SMALLEST**2).sqrt()

        def pullback(grad):
            d_h2 = -grad if self.squared else grad / (-2 * root)
            out, both = torch.where(outside, d_h2, 0.0), torch.where(between, d_h2, 0.0)
            higher, ratio = d_h2 - out - both, difference / gap
            by_q = higher * (0.5 * (1 - difference.sign()))  # equal heights share it evenly
            d_half = -both * half  # of each half width; the distance counts as much, less
            d_gap = 0.25 * out * (1 - ratio.square()) - d_half * (0.5 / distance)
            d_row = 0.5 * out * (1 - ratio) + by_q, d_half
            d_column = 0.5 * out * (1 + ratio) + higher - by_q, d_half
            return d_gap, d_row, d_column, (both,)

        return -(height2 if self.squared else root), pullback


for _on_product in (False, True):
    _suffix = "_on_product" if _on_product else ""
    register_term(Umbral("umbral" + _suffix, _on_product))
    register_term(Penumbral("penumbral_squared" + _suffix, _on_product, squared=True))
    register_term(Penumbral("penumbral" + _suffix, _on_product, squared=False))
