"""The cone scores as Triton functions: the arithmetic of terms.py, tile by tile on a GPU (see engines/triton/terms.py).

Tiles with pairs whose squared distance the product loses are taken from differences. One rsqrt gives a root and its
reciprocal; floors keep both finite.
"""

# What follows is Triton's language: its unrolled loops, growing tuples and `tl.split` have no Python types.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from ...engines.triton.terms import term_of
from . import terms

SMALLEST = tl.constexpr(terms.SMALLEST)
LOWEST = tl.constexpr(terms.LOWEST)
NEAR, NEAREST, EXACT = (tl.constexpr(x) for x in (terms.NEAR, terms.NEAREST, terms.EXACT))
BLUR = tl.constexpr((terms.BLUR * 1.1920928955078125e-07) ** 2)


@triton.jit
def _product(dot, norm_q, norm_k):
    return norm_q + (norm_k - 2 * dot)


@triton.jit
def _product_of_host(dot, norm_q, stretch_q, last_q, norm_k, stretch_k, last_k):
    return norm_q + (norm_k - (dot - last_q * last_k) * stretch_k * (2 * stretch_q))


@triton.jit
def _size(norm_q, stretch_q, last_q, stretch_k, last_k):
    """What the rounding of the host's product is a share of."""
    return norm_q + tl.abs((last_q * stretch_q) * (last_k * stretch_k))


@triton.jit
def _exact(product, gap, near, size):
    """The squared distance; from differences what is below rounding is 0."""
    return tl.where(near, tl.where(gap <= BLUR * size, 0.0, gap), product)


@triton.jit
def _gap(dot, gap, near, norm_q, norm_k):
    return _exact(_product(dot, norm_q, norm_k), gap, near, norm_q)


@triton.jit
def _gap_on_product(dot, gap, near, norm_q, stretch_q, last_q, norm_k, stretch_k, last_k):
    product = _product_of_host(dot, norm_q, stretch_q, last_q, norm_k, stretch_k, last_k)
    return _exact(product, gap, near, _size(norm_q, stretch_q, last_q, stretch_k, last_k))


@triton.jit
def _too_near(product, size, weight):
    return product < size * tl.maximum(tl.minimum(EXACT * weight * size, NEAREST), NEAR)


@triton.jit
def _through_product(d_gap, dot, stretch_q, last_q, stretch_k, last_k):
    """Gradients of the product, of stretch and last coordinate of the query, and of the key."""
    inner = (dot - last_q * last_k) * (-2 * d_gap)
    d_dot = d_gap * stretch_k * (-2 * stretch_q)
    return d_dot, inner * stretch_k, -(d_dot * last_k), inner * stretch_q, -(d_dot * last_q)


@triton.jit
def _umbral(gap, hq, hk):
    u = hq - hk
    square = tl.maximum(gap, u * u + SMALLEST * SMALLEST)
    return -(hq + (hk + square * tl.rsqrt(square)))


@triton.jit
def _umbral_pull(grad, gap, hq, hk):
    """Gradients of the gap and of both heights; u / |u| is 0 at ties."""
    u = hq - hk
    least = u * u + SMALLEST * SMALLEST
    apart = gap > least
    d_w = -grad * tl.rsqrt(tl.maximum(gap, least))
    d_u = tl.where(apart, 0.0, d_w * u)
    return tl.where(apart, 0.5 * d_w, 0.0), d_u - grad, -(d_u + grad)


@triton.jit
def _inside(gap, a, b):
    """1/D, (a + b - D) / 2 and min(a, b); D is 0 at ties, and 1/D never more than 1/SMALLEST."""
    root = tl.rsqrt(tl.maximum(gap, SMALLEST * SMALLEST))
    half = 0.5 * (a + b - tl.maximum(gap, 0.0) * root)
    return root, half, tl.minimum(a, b)


@triton.jit
def _ratio(root, pq, pk):
    """(p_k - p_q) / D², which is between -1 and 1 where no cone holds the other's point."""
    return tl.minimum(tl.maximum((pk - pq) * (root * root), -1.0), 1.0)


@triton.jit
def _height2(gap, pq, a, pk, b, r2):
    """H² from squared heights p, half widths a and b, and r². One cone may hold the other's point: the higher one's."""
    root, half, least = _inside(gap, a, b)
    outside = 0.25 * (gap + 2 * (pq + pk) + (pk - pq) * _ratio(root, pq, pk))
    return tl.where(half < 0, outside, tl.where(half < least, r2 - half * half, tl.maximum(pq, pk)))


@triton.jit
def _height2_pull(grad, gap, pq, a, pk, b):
    """Gradients of the gap, of h_q², a, h_k², b and r² from that of H²; equal heights share it."""
    root, half, least = _inside(gap, a, b)
    out = tl.where(half < 0, grad, 0.0)
    both = tl.where((half >= 0) & (half < least), grad, 0.0)
    one = tl.where((half >= 0) & (half >= least), grad, 0.0)
    d_half = -both * half  # of each half width; D counts as much, less
    ratio = _ratio(root, pq, pk)
    d_gap = 0.25 * out * (1 - ratio * ratio) - 0.5 * d_half * root
    # the gradient at distance 0 is 0
    d_gap = tl.where(gap > 0, d_gap, 0.0)
    larger_q = tl.where(pq > pk, 1.0, tl.where(pq < pk, 0.0, 0.5))
    d_pq = 0.5 * out * (1 - ratio) + one * larger_q
    d_pk = 0.5 * out * (1 + ratio) + one * (1 - larger_q)
    return d_gap, d_pq, d_half, d_pk, d_half, both


@triton.jit
def _penumbral(gap, pq, a, pk, b, r2, SQUARED: tl.constexpr):
    height2 = _height2(gap, pq, a, pk, b, r2)
    if SQUARED:
        return -height2
    else:
        height2 = tl.maximum(height2, LOWEST * LOWEST)
        return -(height2 * tl.rsqrt(height2))


@triton.jit
def _penumbral_pull(grad, gap, pq, a, pk, b, r2, SQUARED: tl.constexpr):
    if SQUARED:
        d_height2 = -grad
    else:
        height2 = _height2(gap, pq, a, pk, b, r2)
        d_height2 = -0.5 * grad * tl.rsqrt(tl.maximum(height2, LOWEST * LOWEST))
    d_gap, d_pq, d_a, d_pk, d_b, d_r2 = _height2_pull(d_height2, gap, pq, a, pk, b)
    return d_gap, d_pq, d_a, d_pk, d_b, d_r2


#: Distances from the product of the points, and from the host's: statistics, the squared distance, where it is too
#: near, what leads to the product's gradient, and the gradients of the product and of the statistics.
ON_HOST = "norm_q, stretch_q, last_q, norm_k, stretch_k, last_k"
SIZE = "_size(norm_q, stretch_q, last_q, stretch_k, last_k)"
DISTANCES = {
    False: (
        ("norm_{0}",),
        "_gap(dot, gap, near, norm_q, norm_k)",
        "_too_near(_product(dot, norm_q, norm_k), norm_q, weight)",
        (),
        ("-2 * d_square", "d_square", "d_square"),
    ),
    True: (
        ("norm_{0}", "stretch_{0}", "last_{0}"),
        f"_gap_on_product(dot, gap, near, {ON_HOST})",
        f"_too_near(_product_of_host(dot, {ON_HOST}), {SIZE}, weight)",
        ("d_dot, d_sq, d_lq, d_sk, d_lk = _through_product(d_square, dot, stretch_q, last_q, stretch_k, last_k)",),
        ("d_dot", "d_square, d_sq, d_lq", "d_square, d_sk, d_lk"),
    ),
}


def cone_terms(name: str, function: str, query: tuple, key: tuple, parameters: tuple, flag: str = "", **more):
    """The forms of a score that reads these statistics of queries and keys, and these parameters, beside distances."""
    forms, arguments = {}, ", ".join((*query, *key, *parameters, *filter(None, [flag])))
    for on_product, (statistics, square, inexact, through, (d_dot, d_row, d_column)) in DISTANCES.items():
        q, k = ([s.format(side) for s in statistics] for side in "qk")
        numbers = (*query, *q, *key, *k, *parameters, "weight")
        slopes, n = [f"d_{name}" for name in (*query, *key, *parameters)], len(query)
        gradients = (
            d_dot,
            *slopes[:n],
            d_row,
            *slopes[n : 2 * n],
            d_column,
            *slopes[2 * n :],
            "d_gap * square",
        )
        pull = [
            f"square = {square}",
            f"d_gap, {', '.join(slopes)} = {function}_pull(grad, square * weight, {arguments})",
            "d_square = d_gap * weight",
            *through,
            f"return {', '.join(gradients)}",
        ]
        full, value = name + "_on_product" * on_product, f"{function}({square} * weight, {arguments})"
        forms[full] = term_of(full, globals(), numbers, value, pull, inexact, **more)
    return forms


PENUMBRAL = (("pq", "a"), ("pk", "b"), ("r2",))
TRITON_TERMS = {
    **cone_terms("umbral", "_umbral", ("hq",), ("hk",), ()),
    **cone_terms("penumbral_squared", "_penumbral", *PENUMBRAL, "True", long=True),
    **cone_terms("penumbral", "_penumbral", *PENUMBRAL, "False", long=True),
}
