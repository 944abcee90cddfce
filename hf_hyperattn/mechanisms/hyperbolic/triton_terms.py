"""The hyperbolic scores as Triton functions: the arithmetic of terms.py, tile by tile on a GPU (see
engines/triton/terms.py).
"""

# What follows is Triton's language: its unrolled loops, growing tuples and `tl.split` have no Python types.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from ...engines.triton.terms import term_of
from . import terms

TINY = tl.constexpr(1e-30)  # of w (w + 1) under a root that is divided by
BLUR = tl.constexpr((terms.BLUR * 1.1920928955078125e-07) ** 2)
EXACT = tl.constexpr(terms.EXACT)
STEEP = tl.constexpr(terms.STEEP)
RELATIVE = tl.constexpr(terms.RELATIVE)


@triton.jit
def _opening(cosine, gap, near):
    return tl.where(near, gap, tl.maximum(2 - 2 * cosine, 0.0))


@triton.jit
def _apart(sinh_q, cosh_q, sinh_k, cosh_k):
    """sinh(a_q - a_k), exactly 0 for equal points: a difference of products with the rounding of the second one added
    back (Kahan), since a compiler may fuse one of two products with their difference and not the other.
    """
    second = cosh_q * sinh_k
    lost = tl.fma(-cosh_q, sinh_k, second)
    return tl.fma(sinh_q, cosh_k, -second) + lost


@triton.jit
def _separation(opening, x, p_q, p_k):
    return opening * p_k * p_q + x * x


@triton.jit
def _pull(d_w, opening, x, near, noise, w, sinh_q, cosh_q, sinh_k, cosh_k):
    """Gradients of the cosine and of sinh and cosh of both sides; what rounding leaves of the distance of coinciding
    points must not steer one.
    """
    p_q, p_k = sinh_q * cosh_q, sinh_k * cosh_k
    d_w = tl.where(w <= tl.where(near, BLUR, noise) * p_q * p_k, 0.0, d_w)
    d_x, inner = 2 * d_w * x, d_w * opening
    by_q, by_k = inner * p_k, inner * p_q
    d_sinh_q, d_cosh_q = d_x * cosh_k + cosh_q * by_q, sinh_q * by_q - d_x * sinh_k
    d_sinh_k, d_cosh_k = cosh_k * by_k - cosh_q * d_x, sinh_q * d_x + sinh_k * by_k
    return -2 * d_w * p_k * p_q, d_sinh_q, d_cosh_q, d_sinh_k, d_cosh_k


@triton.jit
def _geodesic(w):
    """arcosh(1 + 2w)"""
    square = tl.maximum(w * w + w, TINY)
    return tl.log(1 + 2 * (w + square * tl.rsqrt(square)))


@triton.jit
def _geodesic_uncertain(w, error, beta):
    square = w * w + w
    return (beta * error * (beta * error) > (EXACT * EXACT) * square) | (w < STEEP * error)


@triton.jit
def _squared_uncertain(w, error, beta):
    return (beta * error > EXACT) & (error > RELATIVE * w)


@triton.jit
def _numbers(cosine, gap, near, sinh_q, cosh_q, sinh_k, cosh_k):
    """The opening, X and w."""
    opening = _opening(cosine, gap, near)
    x = _apart(sinh_q, cosh_q, sinh_k, cosh_k)
    return opening, x, _separation(opening, x, sinh_q * cosh_q, sinh_k * cosh_k)


@triton.jit
def _geodesic_value(cosine, gap, near, sinh_q, cosh_q, sinh_k, cosh_k, beta):
    _, _, w = _numbers(cosine, gap, near, sinh_q, cosh_q, sinh_k, cosh_k)
    return -beta * _geodesic(w)


@triton.jit
def _squared_value(cosine, gap, near, sinh_q, cosh_q, sinh_k, cosh_k, beta):
    _, _, w = _numbers(cosine, gap, near, sinh_q, cosh_q, sinh_k, cosh_k)
    return -beta * w


@triton.jit
def _geodesic_pull(grad, cosine, gap, near, noise, sinh_q, cosh_q, sinh_k, cosh_k, beta):
    opening, x, w = _numbers(cosine, gap, near, sinh_q, cosh_q, sinh_k, cosh_k)
    d_w = -beta * grad * tl.rsqrt(tl.maximum(w * w + w, TINY))
    d_cosine, d_sq, d_cq, d_sk, d_ck = _pull(d_w, opening, x, near, noise, w, sinh_q, cosh_q, sinh_k, cosh_k)
    return d_cosine, d_sq, d_cq, d_sk, d_ck, -grad * _geodesic(w)


@triton.jit
def _squared_pull(grad, cosine, gap, near, noise, sinh_q, cosh_q, sinh_k, cosh_k, beta):
    opening, x, w = _numbers(cosine, gap, near, sinh_q, cosh_q, sinh_k, cosh_k)
    # by the product nothing is left out (no w is below -1): the slope by w is the same everywhere
    d_cosine, d_sq, d_cq, d_sk, d_ck = _pull(-beta * grad, opening, x, near, -1.0, w, sinh_q, cosh_q, sinh_k, cosh_k)
    return d_cosine, d_sq, d_cq, d_sk, d_ck, -grad * w


@triton.jit
def _doubt(cosine, noise, sinh_q, cosh_q, sinh_k, cosh_k):
    """w by the product, and what rounding may add to it or take from it."""
    p_q, p_k = sinh_q * cosh_q, sinh_k * cosh_k
    x = _apart(sinh_q, cosh_q, sinh_k, cosh_k)
    return _separation(tl.maximum(2 - 2 * cosine, 0.0), x, p_q, p_k), noise * p_q * p_k


@triton.jit
def _geodesic_inexact(cosine, noise, sinh_q, cosh_q, sinh_k, cosh_k, beta):
    w, error = _doubt(cosine, noise, sinh_q, cosh_q, sinh_k, cosh_k)
    return _geodesic_uncertain(w, error, beta)


@triton.jit
def _squared_inexact(cosine, noise, sinh_q, cosh_q, sinh_k, cosh_k, beta):
    w, error = _doubt(cosine, noise, sinh_q, cosh_q, sinh_k, cosh_k)
    return _squared_uncertain(w, error, beta)


def hyperbolic_terms(name: str, function: str) -> dict:
    """The forms of a distance: from the product of directions, and from the host's."""
    forms, arguments = {}, "sinh_q, cosh_q, sinh_k, cosh_k, beta"
    for on_product in (False, True):
        inverse = ("inverse_q",), ("inverse_k",)
        query, key = inverse if on_product else ((), ())
        cosine = "dot * inverse_k * inverse_q" if on_product else "dot"
        pull = [
            f"cosine = {cosine}",
            f"d_dot, d_sq, d_cq, d_sk, d_ck, d_beta = {function}_pull(grad, cosine, gap, near, noise, {arguments})",
        ]
        if on_product:
            pull += [
                "turned = d_dot * dot",
                "d_dot = d_dot * inverse_k * inverse_q",
                "return d_dot, d_sq, d_cq, turned * inverse_k, d_sk, d_ck, turned * inverse_q, d_beta",
            ]
        else:
            pull.append("return d_dot, d_sq, d_cq, d_sk, d_ck, d_beta")
        full, numbers = (
            name + "_on_product" * on_product,
            ("sinh_q", "cosh_q", *query, "sinh_k", "cosh_k", *key, "beta"),
        )
        value, inexact = (
            f"{function}_value({cosine}, gap, near, {arguments})",
            f"{function}_inexact({cosine}, noise, {arguments})",
        )
        forms[full] = term_of(full, globals(), numbers, value, pull, inexact)
    return forms


TRITON_TERMS = {
    **hyperbolic_terms("geodesic", "_geodesic"),
    **hyperbolic_terms("squared_lorentz", "_squared"),
}
