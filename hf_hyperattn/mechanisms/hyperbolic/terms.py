"""Compute hyperbolic-distance scores on tiles: one dot product, then a few operations per pair.

Here you learn how the published distance (reference.py) becomes cheap arithmetic on a tile.

Let a be the half radius of a point, and G = 2 - 2 cos θ the squared distance of two directions.
Half the hyperbolic law of cosines is

    w = sinh²(√c d / 2) = X² + p_q p_k G        X = sinh(a_q - a_k) = sinh a_q cosh a_k - cosh a_q sinh a_k
                                                p = sinh a cosh a

The logits are -β arcosh(1 + 2w) with β = 1/(τ√c), or -β w with β = 4/(cτ). Row and column statistics
are (sinh a, cosh a). The `_on_product` terms read the dot product of the attention layer instead of
the product of the directions: cos θ = inverse_q · inverse_k · product. The inverse norms are a third
statistic there.

The product form gives w with an error of about eps · p_q p_k. That is too much if θ is small and the
points are far out or close together. These pairs are computed from differences, see `is_inexact`.
"""

from __future__ import annotations

import torch

from ...engines.score import DerivedDistanceTerm, register_term

#: Rounding step of float32, in which kernels compute. Blocks in float64 use it too, so that all
#: engines take the same pairs from differences.
EPS = 2.0**-23
#: In the product form, |error of w| <= NOISE · eps · p_q p_k.
NOISE = 4.0
#: From differences, w is only rounding below (BLUR · eps)² p_q p_k.
BLUR = 16.0
#: Error of a logit above which a pair is computed from differences.
EXACT = 2e-4
#: A pair is also computed from differences if w is less than STEEP times its error, because the
#: gradient is less exact than the logit.
STEEP = 2048.0
#: Relative error of a squared Lorentz distance that is always allowed.
RELATIVE = 1e-5


class HyperbolicTerm(DerivedDistanceTerm):
    """Base class of both terms: G, w, and their gradients. The squared distance is G.

    Args:
        name: Registered name of the term.
        on_product: Whether `dot` is the product of the layer's vectors q·k. If not, `dot` is the
            product of the directions, cos θ.
    """

    heads = 1

    def __init__(self, name: str, on_product: bool):
        self.name = name
        self.on_product = on_product
        self.rows = self.columns = 3 if on_product else 2

    def by_product(self, dot, row, column, head):
        cosine = torch.mul(dot, column[2]).mul_(row[2]) if self.on_product else dot
        opening = torch.rsub(cosine, 2.0, alpha=2.0)
        # Rounding can make it negative. Subtracting the detached negative part gives 0 there and
        # keeps the slope, which a clamp would not.
        return opening - opening.detach().clamp_max(0.0)

    def is_inexact(self, squared_distance, row, column, head):
        w, _ = self.compute_separation(squared_distance, row, column)
        noise = NOISE * EPS * (row[0] * row[1]) * (column[0] * column[1])
        return self.is_uncertain(w, noise, head)

    def factors(self, row, column, head):
        return (row[2], column[2]) if self.on_product else (1.0, 1.0)

    def squared_distances(self, dot, row, column, head, squared_distance=None):
        # A bound per tile is cheaper than `is_inexact`, which computes w of every pair.
        if squared_distance is not None and not self.may_be_inexact(dot, row, column, head):
            squared_distance = None
        return super().squared_distances(dot, row, column, head, squared_distance)

    def may_be_inexact(self, dot, row, column, head) -> bool:
        """Return whether any pair of the tile may be inexact.

        It uses the bound w >= p_q p_k G with the extremes of each factor, so it may return True
        for a tile without such a pair, but not False for a tile with one.
        """
        by_row = row[0] * row[1]
        by_column = column[0] * column[1]
        cosine = torch.mul(dot, column[2]).mul_(row[2]) if self.on_product else dot
        p = _reduce_tile(torch.amin, by_row) * _reduce_tile(torch.amin, by_column)
        least = p * (2 - 2 * _reduce_tile(torch.amax, cosine)).clamp_min(0.0)
        noise = NOISE * EPS * _reduce_tile(torch.amax, by_row) * _reduce_tile(torch.amax, by_column)
        return bool(self.is_uncertain(least, noise, head).any())

    def compute_separation(self, opening, row, column):
        """Return w and X, each [..., R, C], for given G (`opening`)."""
        (sinh_q, cosh_q), (sinh_k, cosh_k) = row[:2], column[:2]
        # X in a form that is exactly 0 for equal radii, however products are rounded and fused.
        x = (sinh_q - sinh_k).mul_(cosh_k).addcmul_(cosh_q - cosh_k, sinh_k, value=-1)
        w = torch.mul(opening, sinh_k * cosh_k).mul_(sinh_q * cosh_q).addcmul_(x, x)
        return w, x

    def is_uncertain(self, w, noise, head):
        """Return where an error of `noise` in w matters, bool.

        It must be monotonic: a smaller w or a larger noise never turns True into False.
        `may_be_inexact` relies on that.
        """
        raise NotImplementedError

    def bound_blur(self, row, column):
        """Return an upper bound of w for points that coincide up to rounding.

        It is the product of the two results: a factor per row, and a factor per column.
        """
        by_row = (BLUR * torch.finfo(row[0].dtype).eps) ** 2 * (row[0] * row[1])
        return by_row, column[0] * column[1]

    def score(self, dot, row, column, head, squared_distance):
        w, _ = self.compute_separation(squared_distance, row, column)
        by_row, by_column = self.bound_blur(row, column)
        # Below the bound, w is only rounding, which must not steer a gradient.
        w = torch.where(w <= by_row * by_column, w.detach(), w)
        return self.derive_separation(w, head)[0]

    # This derivative is written by hand because it is faster in blocks than the derivative of the
    # traced graph. Without it, `blockwise` trains 2.4 to 3.2 times as long with geodesic scores, and
    # 1.7 to 2.4 with squared Lorentz ones. Four runs of benchmarks/hand_derivatives.py on one core
    # of an AMD EPYC (Zen 4).
    def derive(self, row, column, head, squared_distance):
        w, x = self.compute_separation(squared_distance, row, column)
        logits, pull = self.derive_separation(w, head)

        def pull_back(grad):
            d_w, d_head = pull(grad)
            by_row, by_column = self.bound_blur(row, column)
            least = _reduce_tile(torch.amin, w)
            bound = _reduce_tile(torch.amax, by_row) * _reduce_tile(torch.amax, by_column)
            # Most tiles have no pair below the bound, and skip the comparison of all pairs.
            if (least <= bound).any():
                d_w.masked_fill_(w <= by_row * by_column, 0.0)
            (sinh_q, cosh_q), (sinh_k, cosh_k) = row[:2], column[:2]
            p_q = sinh_q * cosh_q
            p_k = sinh_k * cosh_k
            # w = X² + p_q p_k G: `d_x` is the gradient of X, `inner` is the gradient of p_q p_k.
            d_x = torch.mul(d_w, x).mul_(2.0)
            inner = torch.mul(d_w, squared_distance)
            by_row = inner @ p_k.mT
            by_column = p_q.mT @ inner
            # The derivative of p = sinh a cosh a adds the terms with `by_row` and `by_column`.
            d_row = (d_x @ cosh_k.mT + cosh_q * by_row, sinh_q * by_row - d_x @ sinh_k.mT)
            d_column = (cosh_k * by_column - cosh_q.mT @ d_x, sinh_q.mT @ d_x + sinh_k * by_column)
            return d_w.mul_(p_k).mul_(p_q), d_row, d_column, d_head

        return logits, pull_back

    def through_product(self, d_squared, dot, row, column):
        # G = 2 - 2 cos θ.
        d_cosine = d_squared.mul_(-2.0)
        if not self.on_product:
            return d_cosine, (), ()
        # A copy, made before `d_cosine` is overwritten.
        d_inverses = torch.mul(d_cosine, dot)
        d_dot = d_cosine.mul_(column[2]).mul_(row[2])
        return d_dot, (d_inverses @ column[2].mT,), (row[2].mT @ d_inverses,)

    def derive_separation(self, w, head):
        """Return the logits and their derivative for given w.

        Args:
            w: sinh²(√c d / 2), [..., R, C]; not overwritten.
            head: Head parameters (β,).

        Returns:
            The logits, and a function from their gradient to `(d_w, (d_beta,))`.
        """
        raise NotImplementedError


class Geodesic(HyperbolicTerm):
    """S = -β arcosh(1 + 2w) = -β log(1 + y + sqrt(y (y + 2))) with y = 2w.

    Its slope in w is -2β / sqrt(y (y + 2)).
    """

    def derive_separation(self, w, head):
        y = 2 * w
        root = torch.add(y, 2).mul_(y).sqrt_()
        distance = torch.add(y, root).log1p_()

        def pull_back(grad):
            return torch.div(grad, root).mul_(-2 * head[0]), (-(grad * distance),)

        return distance * -head[0], pull_back

    def is_uncertain(self, w, noise, head):
        # An error of w changes the logit by β · error / sqrt(w (1 + w)). The squares avoid the root.
        return ((head[0] * noise / EXACT).square() > torch.addcmul(w, w, w)) | (w < STEEP * noise)


class SquaredLorentz(HyperbolicTerm):
    """S = -β w."""

    def derive_separation(self, w, head):
        return w * -head[0], lambda grad: (grad * -head[0], (-(grad * w),))

    def is_uncertain(self, w, noise, head):
        return (w < STEEP * noise) | ((head[0] * noise > EXACT) & (noise > RELATIVE * w))


def _reduce_tile(extreme, x):
    """Return the smallest or largest number of each head's tile, [..., 1, 1].

    Args:
        extreme: `torch.amin` or `torch.amax`.
        x: Tile [..., R, C]. If it is empty, the result is 0.
    """
    # `amin` and `amax` raise for empty tensors.
    if not x.numel():
        return x.new_zeros(*x.shape[:-2], 1, 1)
    return extreme(x, (-1, -2), keepdim=True)


for _on_product in (False, True):
    _suffix = "_on_product" if _on_product else ""
    register_term(Geodesic("geodesic" + _suffix, _on_product))
    register_term(SquaredLorentz("squared_lorentz" + _suffix, _on_product))
