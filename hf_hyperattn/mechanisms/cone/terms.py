"""Compute cone scores on tiles: one dot product, then a few operations per pair.

Here you learn how the published formulas (reference.py) become cheap arithmetic on a tile.

The heights h are scaled by gamma / 2, and w = (gamma / (2 sinh r))². Both are computed outside the
tile, where automatic differentiation passes their gradients on to gamma and r. With u = h_q - h_k,
the umbral score is

    S = -(h_q + h_k + sqrt(max(D², u²)))          D² = w · (|X_q|² + |X_k|² - 2 X_q·X_k)

In the penumbral score, distances and radius are scaled alike, so that gamma disappears. Outside the
cones, this needs no root:

    H² = (D² + 2 (h_q² + h_k²) + (h_k² - h_q²)² / D²) / 4

Row and column statistics are (h, |X|²), or (h², sqrt(r² - h²), |X|²) for penumbral scores. The
`_on_product` terms read the dot product of the attention layer instead:

    X_q·X_k = stretch_q · stretch_k · (q·k - q_d k_d)

The stretch and the last coordinate are two more statistics there. The last head parameter is w. The
points themselves are not scaled, because the rounding would show in differences of near points.

The product form loses the digits of D² if points nearly coincide. `loses_digits` (engines/score.py)
says which pairs are computed from differences.
"""

from __future__ import annotations

from typing import Any

import torch

from ...engines.score import DerivedDistanceTerm, loses_digits, register_term

#: Lower bound of a distance in a denominator.
SMALLEST = 1e-15
#: Lower bound of a height under a root, whose slope is infinite at 0.
LOWEST = 1e-6
#: Heights tie if they differ by less than TIE · eps times their size. Rounding can make the heights
#: of equal vectors differ by that much.
TIE = 8.0


class ConeTerm(DerivedDistanceTerm):
    """Base class of all cone terms: |X_q - X_k|², D², and the gradients of both.

    Args:
        name: Registered name of the term.
        on_product: Whether `dot` is the product of the layer's vectors q·k. If not, `dot` is the
            product of the horizontal parts X_q·X_k.
    """

    #: Number of statistics that the score itself reads. The statistics of the distance follow them.
    before = 1
    heads = 1

    def __init__(self, name: str, on_product: bool):
        self.name = name
        self.on_product = on_product
        # The last coordinate gives the height, so it is not part of the horizontal point.
        self.left_out = int(on_product)
        self.rows = self.columns = self.before + (3 if on_product else 1)

    def by_product(self, dot, row, column, head):
        row, column = row[self.before :], column[self.before :]
        if not self.on_product:
            return torch.sub(column[0], dot, alpha=2).add_(row[0])
        norm_q, stretch_q, last_q = row
        norm_k, stretch_k, last_k = column
        square = torch.addcmul(dot, last_q, last_k, value=-1).mul_(stretch_k).mul_(stretch_q)
        return square.mul_(-2).add_(norm_k).add_(norm_q)

    def is_inexact(self, squared_distance, row, column, head):
        size = row[self.before]
        if self.on_product:
            stretch_q, last_q = row[self.before + 1 :]
            stretch_k, last_k = column[self.before + 1 :]
            # Subtracting q_d k_d rounds too: its error grows with that product.
            size = torch.mul((stretch_q * last_q).abs(), (stretch_k * last_k).abs()).add_(size)
        return loses_digits(squared_distance, size, head[-1])

    def factors(self, row, column, head):
        return (row[self.before + 1], column[self.before + 1]) if self.on_product else (1.0, 1.0)

    def score(self, dot, row, column, head, squared_distance):
        u = row[0] - column[0]
        # Heights that tie differ only by rounding, and rounding must not steer a gradient.
        u = torch.where(are_tied(u * u, row[0], column[0]), u.detach(), u)
        heights = row[: self.before], column[: self.before]
        return self.derive_heights(squared_distance * head[-1], u, *heights, head)[0]

    def logits(self, dot, row, column, head, squared_distance=None):
        squared, _ = self.squared_distances(dot, row, column, head, squared_distance)
        heights = row[: self.before], column[: self.before]
        u = row[0] - column[0]
        # In place, because nothing reads the unscaled distances after this.
        return self.derive_heights(squared.mul_(head[-1]), u, *heights, head)[0]

    # This derivative is written by hand because it is faster in blocks than the derivative of the
    # traced graph. Without it, `blockwise` trains 1.6 to 1.8 times as long with umbral scores, 1.7 to
    # 2.6 with squared penumbral ones and 2.3 to 2.9 with the others. Four runs of
    # benchmarks/hand_derivatives.py on one core of an AMD EPYC (Zen 4).
    def derive(self, row, column, head, squared_distance):
        weight = head[-1]
        heights = row[: self.before], column[: self.before]
        u = row[0] - column[0]
        logits, pull = self.derive_heights(squared_distance * weight, u, *heights, head)

        def pull_back(grad):
            d_square, d_row, d_column, d_head = pull(grad)
            # Rounding can make a squared distance negative. It then acts as 0, with slope 0.
            d_square.masked_fill_(squared_distance <= 0, 0.0)
            d_weight = d_square * squared_distance
            return d_square.mul_(weight), d_row, d_column, (*d_head, d_weight)

        return logits, pull_back

    def through_product(self, d_squared, dot, row, column):
        # |X_q|² and |X_k|² enter the squared distance with slope 1.
        by_row = d_squared.sum(-1, keepdim=True)
        by_column = d_squared.sum(-2, keepdim=True)
        if not self.on_product:
            return d_squared.mul_(-2), (by_row,), (by_column,)
        _, stretch_q, last_q = row[self.before :]
        _, stretch_k, last_k = column[self.before :]
        # Gradient of stretch_q · stretch_k. It must come first, since `d_dot` overwrites `d_squared`.
        inner = torch.addcmul(dot, last_q, last_k, value=-1).mul_(d_squared).mul_(-2)
        d_dot = d_squared.mul_(-2).mul_(stretch_k).mul_(stretch_q)
        rows = (by_row, inner @ stretch_k.mT, -(d_dot @ last_k.mT))
        columns = (by_column, stretch_q.mT @ inner, -(last_q.mT @ d_dot))
        return d_dot, rows, columns

    def derive_heights(self, gap, u, row, column, head):
        """Return the logits and their derivative for given heights.

        Args:
            gap: D² [..., R, C]; not overwritten.
            u: Difference of the first row and column statistic, [..., R, C].
            row, column: The first `before` statistics.
            head: Head parameters.

        Returns:
            The logits, and a function from their gradient to `(d_gap, d_rows, d_columns, d_heads)`.
        """
        raise NotImplementedError


def are_tied(square, row, column):
    """Return which heights, or squared heights, are equal up to rounding, bool [..., R, C].

    Args:
        square: Their squared difference, [..., R, C].
        row, column: The heights, or the squared heights.
    """
    return square <= (TIE * torch.finfo(row.dtype).eps) ** 2 * row * column


class Umbral(ConeTerm):
    """S = -(h_q + h_k + sqrt(max(D², u²))) with u = h_q - h_k. The sign of u is 0 at ties."""

    def derive_heights(self, gap, u, row, column, head):
        (hq,), (hk,) = row, column
        square = u * u
        # False for NaN, so that NaN reaches the logits.
        level = gap <= square
        w = torch.where(level, square, gap).sqrt_()
        logits = torch.sub(-hk, w).sub_(hq)

        def pull_back(grad):
            d_gap = torch.where(level, 0.0, grad / w.clamp_min(SMALLEST)).mul_(-0.5)
            d_u = torch.where(level & ~are_tied(square, hq, hk), grad, 0.0).mul_(u.sign()).neg_()
            d_row = (d_u - grad).sum(-1, keepdim=True)
            d_column = -(d_u + grad).sum(-2, keepdim=True)
            return d_gap, (d_row,), (d_column,), ()

        return logits, pull_back


class Penumbral(ConeTerm):
    """S = -H² or -H, from squared heights, half widths and r².

    All lengths are scaled so that gamma is 1.

    Args:
        name: Registered name of the term.
        on_product: As in `ConeTerm`.
        squared: Whether the score is -H² instead of -H.
    """

    before = 2
    heads = 2

    def __init__(self, name: str, on_product: bool, squared: bool):
        super().__init__(name, on_product)
        self.squared = squared

    def derive_heights(self, gap, u, row, column, head):
        # Squared heights pq and pk, half widths a and b.
        pq, a = row
        pk, b = column
        r2 = head[0]
        tie = gap <= 0
        # Not in place: the caller still reads the unclamped distance.
        gap = gap.clamp_min(SMALLEST**2)
        distance = gap.sqrt()
        half = (a + b).sub_(distance).mul_(0.5)
        outside = half < 0
        # One cone contains the other point. False for NaN, so that NaN reaches the logits.
        inside = tie | (distance <= (a - b).abs_())
        ratio = u / gap
        mean = (pq + pk).mul_(0.5)
        # max(pq, pk), in a form whose slope is shared evenly at ties.
        larger = u.abs().mul_(0.5).add_(mean)
        apart = mean.add_(torch.addcmul(gap, u, ratio).mul_(0.25))
        # Three cases: one cone inside the other, cones that overlap, and cones that do not.
        height2 = torch.where(inside, larger, torch.addcmul(r2, half, half, value=-1))
        height2 = torch.where(outside, apart, height2)
        root: Any = None if self.squared else height2.clamp_min(LOWEST**2).sqrt()

        def pull_back(grad):
            d_h2 = -grad if self.squared else grad / (-2 * root)
            # Split the gradient by the three cases: `out`, `both` (overlap) and `higher` (inside).
            out = torch.where(outside, d_h2, 0.0)
            both = torch.where(inside | outside, 0.0, d_h2)
            higher = d_h2 - out - both
            # Tied heights get one half each.
            by_q = higher * (0.5 * (1 + u.sign().masked_fill_(are_tied(u * u, pq, pk), 0.0)))
            # Gradient of each half width. The distance gets the same with the other sign.
            d_half = -both * half
            # Outside the cones |ratio| <= 1 already. Elsewhere its square may be infinite, and infinity
            # times the zeros of `out` would be NaN.
            ratio.clamp_(-1, 1)
            d_gap = 0.25 * out * (1 - ratio.square()) - d_half * (0.5 / distance)
            d_row = 0.5 * out * (1 + ratio) + by_q, d_half
            d_column = 0.5 * out * (1 - ratio) + higher - by_q, d_half
            return d_gap, d_row, d_column, (both,)

        return -(height2 if self.squared else root), pull_back


for _on_product in (False, True):
    _suffix = "_on_product" if _on_product else ""
    register_term(Umbral("umbral" + _suffix, _on_product))
    register_term(Penumbral("penumbral_squared" + _suffix, _on_product, squared=True))
    register_term(Penumbral("penumbral" + _suffix, _on_product, squared=False))
