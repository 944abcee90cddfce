"""Functions of one number that Triton lacks or computes with too few digits.

Here you learn how they keep a relative error of a few units in the last place of float32. The
scores that engines/emit_triton.py writes call them by name.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

#: Triton's interpreter has no machine instructions, and multiplies the bit patterns of bfloat16.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# log 2 in two parts (Cody and Waite). The first is short: its product with up to 15 bits is exact.
LN2_SHORT = tl.constexpr(0.693359375)
LN2_REST = tl.constexpr(-2.1219444005469057e-4)


@triton.jit
def larger(a, b):
    """Return the maximum; NaN if either number is NaN, as in torch."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """Return the minimum; NaN if either number is NaN, as in torch."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exp(x):
    """Return e^x."""
    # Beyond 150 the result is 0 or infinity in float32 anyway. The bounds keep n small enough for
    # exact products.
    x = tl.minimum(
        tl.maximum(x, -150.0, propagate_nan=tl.PropagateNan.ALL),
        150.0,
        propagate_nan=tl.PropagateNan.ALL,
    )
    # x = n log 2 + rest. In a plain 2^(x log2 e), the integer part n takes digits from the rest.
    n = tl.floor(x * LOG2E + 0.5)
    rest = (x - n * LN2_SHORT) - n * LN2_REST
    # 2^n in two factors: by itself it overflows or underflows earlier than e^x does.
    half = tl.floor(n * 0.5)
    return tl.exp2(rest * LOG2E) * tl.exp2(half) * tl.exp2(n - half)


@triton.jit
def tanh(x):
    """Return tanh(x)."""
    # Near 0 the quotient is 1 minus nearly 1, which loses digits. There the series is used.
    y = x * x
    series = x * (1 - y * (0.3333333333 - y * (0.1333333333 - y * 0.0539682540)))
    far = 1 - 2 / (tl.exp2(tl.minimum(tl.abs(x), 20.0) * (2 * LOG2E)) + 1)
    return tl.where(tl.abs(x) < 0.15, series, tl.where(x < 0, -far, far))


@triton.jit
def expm1(x):
    """Return e^x - 1."""
    # e^x - 1 = 2 t / (1 - t) with t = tanh(x / 2): near 0 it keeps the digits that e^x - 1 loses.
    half = tanh(0.5 * x)
    return tl.where(tl.abs(x) < 1, 2 * half / (1 - half), exp(x) - 1)


# On NVIDIA's chips `tl.log` takes some 20 instructions and `/` 8, to be right below 1.2e-38 too.
# These functions take one or two, and count such numbers as 0.


@triton.jit
def log(x):
    """Return log(x), with an error of 2^-22 of the result or of 1, whichever is larger."""
    if INTERPRETED:
        return tl.log(x)
    elif is_cuda():
        return LN2 * tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log(x)


@triton.jit
def divide(a, b):
    """Return a / b."""
    if INTERPRETED:
        return a / b
    elif is_cuda():
        return a * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a / b


@triton.jit
def log1p(x):
    """Return log(1 + x), with an error of 2^-22 of the result or of 1, whichever is larger.

    Logits need no more: softmax only sees their differences.
    """
    return log(1 + x)


@triton.jit
def sinh(x):
    """Return sinh(x)."""
    y = x * x
    # For |x| <= 1, where e^x - e^-x would lose digits: an odd minimax polynomial, error below 9e-8.
    near = x * (1 + y * (0.166666753966 + y * (0.00833176273368 + y * 0.00020258884903)))
    e = exp(tl.abs(x))
    far = 0.5 * (e - 1 / e)
    return tl.where(y <= 1, near, tl.where(x < 0, -far, far))


@triton.jit
def cosh(x):
    """Return cosh(x)."""
    e = exp(tl.abs(x))
    # The same quotient as in `sinh`, so that the compiler computes it once for both.
    return 0.5 * (e + 1 / e)


@triton.jit
def cosh_of_sinh(x):
    """Return cosh(a) for x = sinh(a), which is sqrt(1 + x²)."""
    # Beyond 1e9 the 1 is below the last place, and x² might overflow.
    size = tl.minimum(tl.abs(x), 1e9)
    return tl.where(tl.abs(x) > 1e9, tl.abs(x), tl.sqrt(1 + size * size))


def compile_function(owner: str, name: str, text: str) -> Callable:
    """Return a `@triton.jit` function from its source text.

    Args:
        owner: Whose function it is, for error messages.
        name: Name of the function.
        text: Its source, which may call the functions above.
    """
    # Triton reads the source of its functions through `linecache`. The text is put there directly:
    # nothing is written to a disk, where another process could change it before it runs.
    file = f"<hf_hyperattn {name} of {owner}>"
    text = f"@triton.jit\n{text}"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = dict(globals())
    # Safe: we wrote the text, from the names and numbers of a graph.
    exec(compile(text, file, "exec"), space)  # noqa: S102
    return space[name]
