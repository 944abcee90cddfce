"""Functions of one number that Triton's language lacks, or has with fewer digits than a score needs: what written
scores call (engines/emit_triton.py). Relative errors are of some units in the last place of float32.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LN2_SHORT = tl.constexpr(0.693359375)  # times a number of up to 15 bits it is exact in float32
LN2_REST = tl.constexpr(-2.1219444005469057e-4)


@triton.jit
def larger(a, b):
    """As torch's maximum: NaN where either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """As torch's minimum."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exp(x):
    """e^x; a plain product x · log2(e) would lose the digits that its integer part takes."""
    x = tl.minimum(
        tl.maximum(x, -150.0, propagate_nan=tl.PropagateNan.ALL),
        150.0,
        propagate_nan=tl.PropagateNan.ALL,
    )
    n = tl.floor(x * LOG2E + 0.5)
    rest = (x - n * LN2_SHORT) - n * LN2_REST
    half = tl.floor(n * 0.5)  # in two steps: 2^n alone leaves the range before e^x does
    return tl.exp2(rest * LOG2E) * tl.exp2(half) * tl.exp2(n - half)


@triton.jit
def tanh(x):
    """Near 0 by its series, whose digits the quotient would lose."""
    y = x * x
    series = x * (1 - y * (0.3333333333 - y * (0.1333333333 - y * 0.0539682540)))
    far = 1 - 2 / (tl.exp2(tl.minimum(tl.abs(x), 20.0) * (2 * LOG2E)) + 1)
    return tl.where(tl.abs(x) < 0.15, series, tl.where(x < 0, -far, far))


@triton.jit
def expm1(x):
    """e^x - 1"""
    half = tanh(0.5 * x)
    return tl.where(tl.abs(x) < 1, 2 * half / (1 - half), exp(x) - 1)


#: Whether kernels run in Triton's interpreter, which has no machine instructions.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def log(x):
    """log(x), within 2^-22 of it or of its size, whichever is larger.

    NVIDIA's instruction takes the place of `tl.log`, which is a function of some 20 instructions.
    """
    if INTERPRETED:
        return tl.log(x)
    elif is_cuda():
        return LN2 * tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log(x)


@triton.jit
def log1p(x):
    """log(1 + x), within 2^-22 of it or of its size, whichever is larger."""
    return log(1 + x)


@triton.jit
def sinh(x):
    """On |x| <= 1 an odd polynomial, minimax, within 9e-8."""
    y = x * x
    near = x * (1 + y * (0.166666753966 + y * (0.00833176273368 + y * 0.00020258884903)))
    e = exp(tl.abs(x))
    far = 0.5 * (e - 1 / e)
    return tl.where(y <= 1, near, tl.where(x < 0, -far, far))


@triton.jit
def cosh(x):
    """(e^x + e^-x) / 2"""
    e = exp(tl.abs(x))
    return 0.5 * e + 0.5 / e


@triton.jit
def cosh_of_sinh(x):
    """cosh a of x = sinh a."""
    size = tl.minimum(tl.abs(x), 1e9)
    return tl.where(tl.abs(x) > 1e9, tl.abs(x), tl.sqrt(1 + size * size))


def compiled(owner: str, name: str, text: str) -> Callable:
    """The `@triton.jit` function of this name whose text is given, which may call those above.

    Triton parses the source of its functions. It is kept where Python looks for the source of what was not read from a
    file, so that nothing that lies on a disk is ever run. `owner` says whose function it is.
    """
    file, text = f"<hf_hyperattn {name} of {owner}>", f"@triton.jit\n{text}"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = dict(globals())
    exec(compile(text, file, "exec"), space)  # noqa: S102  text of ours, of names and numbers from a graph
    return space[name]
