"""HyPE as Triton functions: the arithmetic of term.py, tile by tile on a GPU (see engines/triton/terms.py).

Up to |μ (j - i)| = 1, the whole range of the default μ = 1/max_length, sinh is an odd polynomial; tiles that reach
further, which their positions tell, take the exponential.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...engines.triton.terms import TritonTerm
from .reference import FARTHEST

LARGEST = tl.constexpr(FARTHEST)
LOG2E = tl.constexpr(1.4426950408889634)
LN2_SHORT = tl.constexpr(0.693359375)  # times a number of up to 15 bits it is exact in float32
LN2_REST = tl.constexpr(-2.1219444005469057e-4)
# x (1 + y (C1 + y (C2 + y C3))), y = x²: minimax on |x| <= 1, within 9e-8 of sinh relatively
C1, C2, C3 = tl.constexpr(0.166666753966), tl.constexpr(0.00833176273368), tl.constexpr(0.00020258884903)


@triton.jit
def _exp(x):
    """e^x in all digits: a product x · log2(e) would lose those that its integer part takes."""
    n = tl.floor(x * LOG2E + 0.5)
    rest = (x - n * LN2_SHORT) - n * LN2_REST
    return tl.exp2(rest * LOG2E) * tl.exp2(n)


@triton.jit
def _far(i, j, mu):
    """Whether some pair of the tile is beyond the polynomial's range; reduced axis by axis, which moves the least."""
    reach = tl.abs(mu) * tl.maximum(_most(j) + _most(-i), _most(i) + _most(-j))
    if len(reach.shape) > 0:  # the rows are of several heads
        reach = _most(reach)
    return reach > 1


@triton.jit
def _most(x):
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def _sinh(x, far):
    y = x * x
    sinh = x * (1 + y * (C1 + y * (C2 + y * C3)))
    if far:
        e = _exp(tl.abs(x))
        large = 0.5 * (e - 1 / e)
        sinh = tl.where(y <= 1, sinh, tl.where(x < 0, -large, large))
    return sinh


@triton.jit
def _argument(dot, i, j, mu):
    """The zero that is added lays the tile out over threads as the product is: without it the compiler takes another
    way before the branch of `_sinh`, and moves every tile through shared memory after it.
    """
    zero = tl.minimum(tl.abs(dot), 0.0)
    return tl.minimum(tl.maximum((j - i) * mu + zero, -LARGEST), LARGEST)


@triton.jit
def _cosh(sinh):
    """cosh x from sinh x."""
    square = 1 + sinh * sinh
    return tl.where(tl.abs(sinh) > 1e4, tl.abs(sinh), square * tl.rsqrt(square))


@triton.jit
def hype_sinh(dot, gap, near, noise, i, j, mu, tau):
    """τ sinh(μ (j - i))"""
    return tau * _sinh(_argument(dot, i, j, mu), _far(i, j, mu))


@triton.jit
def hype_sinh_pull(grad, dot, gap, near, noise, i, j, mu, tau):
    """μ, τ"""
    sinh = _sinh(_argument(dot, i, j, mu), _far(i, j, mu))
    return grad * _cosh(sinh) * (j - i) * tau, grad * sinh


@triton.jit
def hype_cosh(dot, gap, near, noise, i, j, mu, tau):
    """-2 τ sinh²(μ (j - i) / 2)"""
    half = _sinh(0.5 * _argument(dot, i, j, mu), _far(i, j, 0.5 * mu))
    return -2 * tau * half * half


@triton.jit
def hype_cosh_pull(grad, dot, gap, near, noise, i, j, mu, tau):
    """μ, τ"""
    half = _sinh(0.5 * _argument(dot, i, j, mu), _far(i, j, 0.5 * mu))
    return -2 * grad * half * _cosh(half) * (j - i) * tau, -2 * grad * half * half


TRITON_TERMS = {
    "hype_sinh": TritonTerm(hype_sinh, hype_sinh_pull, dot=False, rows=(), columns=()),
    "hype_cosh": TritonTerm(hype_cosh, hype_cosh_pull, dot=False, rows=(), columns=()),
}
