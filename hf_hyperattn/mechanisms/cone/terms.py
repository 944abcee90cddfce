"""Cone scores as engines compute them: one dot product, then a few operations a pair.

With h scaled by gamma / 2, w = (gamma / (2 sinh r))² (both made outside the tile, where automatic differentiation takes
their gradients to gamma and r), and u = h_q - h_k, the umbral score is

    S = -(h_q + h_k + sqrt(max(D², u²)))          D² = w · (|X_q|² + |X_k|² - 2 X_q·X_k)

For the penumbral score, distances and radius are scaled alike, so that gamma disappears, and outside the cones

    H² = (D² + 2 (h_q² + h_k²) + (h_k² - h_q²)² / D²) / 4

needs no root. Row and column statistics are (h, |X|²), for penumbral (h², sqrt(r² - h²), |X|²). The `_on_product`
terms read the host's product instead: X_q·X_k = stretch_q · stretch_k · (q·k - q_d k_d), with the stretch and the last
coordinate as two more statistics. The last parameter is w: points are not scaled themselves, since the rounding of that
would show in differences of near ones.

From the product, D² is off by some eps · w|X|², and its root and the gradient by far more where points nearly coincide.
The terms ask for such pairs from differences: where D² is below NEAR · w|X|², or as much more, up to NEAREST · w|X|²,
as keeps the error of D below 2e-4 where that is large.
"""

from __future__ import annotations

from typing import Any

import torch

from ...engines.score import DerivedDistanceTerm, register_term

SMALLEST = 1e-15  # of a distance that is divided by
LOWEST = 1e-6  # of a height
NEAR, NEAREST, EXACT = 1e-3, 1 / 16, 1.42e-6  # EXACT: (2 eps / 2e-4)² of float32
TIE = 8.0  # two heights are equal where they differ by less than TIE · eps of them, as those of equal vectors may


class ConeTerm(DerivedDistanceTerm):
    """What all cone terms share: |X_q - X_k|², D² from it, and the gradients that flow through both."""

    before = 1  # statistics of the score itself, before those of the distance
    heads = 1

    def __init__(self, name: str, on_product: bool):
        self.name, self.on_product, self.left_out = name, on_product, int(on_product)
        self.rows = self.columns = self.before + (3 if on_product else 1)

    def by_product(self, dot, row, column, head):
        row, column = row[self.before :], column[self.before :]
        if not self.on_product:
            return torch.sub(column[0], dot, alpha=2).add_(row[0])
        (norm_q, stretch_q, last_q), (norm_k, stretch_k, last_k) = row, column
        square = torch.addcmul(dot, last_q, last_k, value=-1).mul_(stretch_k).mul_(stretch_q)
        return square.mul_(-2).add_(norm_k).add_(norm_q)

    def is_inexact(self, squared_distance, row, column, head):
        size, weight = row[self.before], head[-1]
        if self.on_product:
            (stretch_q, last_q), (stretch_k, last_k) = (
                row[self.before + 1 :],
                column[self.before + 1 :],
            )
            size = torch.mul((stretch_q * last_q).abs(), (stretch_k * last_k).abs()).add_(size)
        return squared_distance < size * (EXACT * weight * size).clamp_(NEAR, NEAREST)

    def factors(self, row, column, head):
        return (row[self.before + 1], column[self.before + 1]) if self.on_product else (1.0, 1.0)

    def score(self, dot, row, column, head, squared_distance):
        u = row[0] - column[0]
        # what rounding leaves must not steer a gradient
        u = torch.where(tied(u * u, row[0], column[0]), u.detach(), u)
        heights = row[: self.before], column[: self.before]
        return self.height(squared_distance * head[-1], u, *heights, head)[0]

    def logits(self, dot, row, column, head, squared_distance=None):
        squared, _ = self.squared_distances(dot, row, column, head, squared_distance)
        heights = row[: self.before], column[: self.before]
        return self.height(squared.mul_(head[-1]), row[0] - column[0], *heights, head)[
            0
        ]  # in its place

    def derive(self, row, column, head, squared_distance):
        weight, heights = head[-1], (row[: self.before], column[: self.before])
        logits, pull = self.height(squared_distance * weight, row[0] - column[0], *heights, head)

        def pullback(grad):
            d_square, d_row, d_column, d_head = pull(grad)
            d_square.masked_fill_(squared_distance <= 0, 0.0)
            d_weight = d_square * squared_distance
            return d_square.mul_(weight), d_row, d_column, (*d_head, d_weight)

        return logits, pullback

    def through_product(self, d_squared, dot, row, column):
        by_row, by_column = d_squared.sum(-1, keepdim=True), d_squared.sum(-2, keepdim=True)
        if not self.on_product:
            return d_squared.mul_(-2), (by_row,), (by_column,)
        _, stretch_q, last_q = row[self.before :]
        _, stretch_k, last_k = column[self.before :]
        inner = (
            torch.addcmul(dot, last_q, last_k, value=-1).mul_(d_squared).mul_(-2)
        )  # times that by the stretches
        d_dot = d_squared.mul_(-2).mul_(stretch_k).mul_(stretch_q)
        rows = (by_row, inner @ stretch_k.mT, -(d_dot @ last_k.mT))
        columns = (by_column, stretch_q.mT @ inner, -(last_q.mT @ d_dot))
        return d_dot, rows, columns

    def height(self, gap, u, row, column, head):
        """Logits from D², the difference of the first statistics, and the score's own statistics; and the pullback.
        `gap` is left as it is.
        """
        raise NotImplementedError


def tied(square, row, column):
    """Whether two heights, or their squares, are equal but for rounding, from their squared difference."""
    return square <= (TIE * torch.finfo(row.dtype).eps) ** 2 * row * column


class Umbral(ConeTerm):
    """S = -(h_q + h_k + sqrt(max(D², u²))), u = h_q - h_k, whose sign is 0 at ties."""

    def height(self, gap, u, row, column, head):
        (hq,), (hk,) = row, column
        square = u * u
        level = gap <= square  # NaN is not
        w = torch.where(level, square, gap).sqrt_()
        logits = torch.sub(-hk, w).sub_(hq)

        def pullback(grad):
            d_gap = torch.where(level, 0.0, grad / w.clamp_min(SMALLEST)).mul_(-0.5)
            d_u = torch.where(level & ~tied(square, hq, hk), grad, 0.0).mul_(u.sign()).neg_()
            return (
                d_gap,
                ((d_u - grad).sum(-1, keepdim=True),),
                (-(d_u + grad).sum(-2, keepdim=True),),
                (),
            )

        return logits, pullback


class Penumbral(ConeTerm):
    """S = -H² or -H from squared heights, half widths and r²; everything scaled so that gamma is 1."""

    before = 2
    heads = 2

    def __init__(self, name: str, on_product: bool, squared: bool):
        super().__init__(name, on_product)
        self.squared = squared

    def height(self, gap, u, row, column, head):
        (pq, a), (pk, b), r2 = row, column, head[0]
        tie, gap = (
            gap <= 0,
            gap.clamp_min(SMALLEST**2),
        )  # a copy: the caller still reads the distance as it was
        distance = gap.sqrt()
        half = (a + b).sub_(distance).mul_(0.5)
        outside = half < 0
        inside = tie | (distance <= (a - b).abs_())  # one cone holds the other point; NaN is not
        ratio = u / gap
        mean = (pq + pk).mul_(0.5)
        larger = u.abs().mul_(0.5).add_(mean)  # of the two: ties share its slope evenly
        apart = mean.add_(torch.addcmul(gap, u, ratio).mul_(0.25))
        height2 = torch.where(inside, larger, torch.addcmul(r2, half, half, value=-1))
        height2 = torch.where(outside, apart, height2)
        root: Any = None if self.squared else height2.clamp_min(LOWEST**2).sqrt()

        def pullback(grad):
            d_h2 = -grad if self.squared else grad / (-2 * root)
            out, both = torch.where(outside, d_h2, 0.0), torch.where(inside | outside, 0.0, d_h2)
            higher = d_h2 - out - both
            by_q = higher * (
                0.5 * (1 + u.sign().masked_fill_(tied(u * u, pq, pk), 0.0))
            )  # equal heights share it
            d_half = -both * half  # of each half width; the distance counts as much, less
            ratio.clamp_(-1, 1)  # it is between where it counts, outside
            d_gap = 0.25 * out * (1 - ratio.square()) - d_half * (0.5 / distance)
            d_row = 0.5 * out * (1 + ratio) + by_q, d_half
            d_column = 0.5 * out * (1 - ratio) + higher - by_q, d_half
            return d_gap, d_row, d_column, (both,)

        return -(height2 if self.squared else root), pullback


for _on_product in (False, True):
    _suffix = "_on_product" if _on_product else ""
    register_term(Umbral("umbral" + _suffix, _on_product))
    register_term(Penumbral("penumbral_squared" + _suffix, _on_product, squared=True))
    register_term(Penumbral("penumbral" + _suffix, _on_product, squared=False))
