"""What all kernels do with one tile of pairs, as Triton functions.

Nothing here knows which way a tile lies: `i` are the queries' numbers and `j` the keys', [R, 1] and [1, C] where
queries run down the tile, [1, R] and [C, 1] where keys do. Statistics are loaded in the same shapes.
"""

# What follows is Triton's language: its unrolled loops, growing tuples and `tl.split` have no Python types.
# mypy: disable-error-code="assignment"
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

#: Triton's interpreter multiplies the bit patterns of bfloat16, so products are of float32 there.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(1.4426950408889634)
#: Rounds of Philox; seven pass all tests of randomness (Salmon et al., Parallel random numbers, 2011).
ROUNDS = tl.constexpr(7)


@triton.jit
def product(a, b):
    """a · b with float32 sums; float32 factors keep their digits (three TF32 products on tensor cores)."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    if a.dtype == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b)


@triton.jit
def load_vectors(start, line, width, stride, lines, WIDTH: tl.constexpr, PADDED: tl.constexpr, INSIDE: tl.constexpr):
    """Vectors number `line` of `lines`, whose components number `width` run along the other axis.

    PADDED: there are more columns than WIDTH. INSIDE: all lines are there.
    """
    pointers = start + line.to(tl.int64) * stride + width
    if INSIDE and not PADDED:
        return tl.load(pointers)
    elif INSIDE:
        return tl.load(pointers, mask=(width < WIDTH) & (line >= 0), other=0.0)
    elif PADDED:
        return tl.load(pointers, mask=(width < WIDTH) & (line < lines), other=0.0)
    else:
        return tl.load(pointers, mask=(line < lines) & (width >= 0), other=0.0)


@triton.jit
def load_statistics(pointers, there, COUNT: tl.constexpr):
    """A tuple of the COUNT numbers that lie side by side from each pointer on."""
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (tl.load(pointers + index, mask=there, other=0.0),)
    return values


@triton.jit
def split_in_2(t, N: tl.constexpr):
    """The columns of [N, 2], each [N]."""
    return tl.split(tl.reshape(t, (N, 2)))


@triton.jit
def split_in_4(t, N: tl.constexpr):
    """As split_in_2."""
    even, odd = tl.split(tl.reshape(t, (N, 2, 2)))
    a, c = split_in_2(even, N)
    b, d = split_in_2(odd, N)
    return a, b, c, d


@triton.jit
def split_in_8(t, N: tl.constexpr):
    """As split_in_2."""
    even, odd = tl.split(tl.reshape(t, (N, 4, 2)))
    a, c, e, g = split_in_4(even, N)
    b, d, f, h = split_in_4(odd, N)
    return a, b, c, d, e, f, g, h


@triton.jit
def split_in_16(t, N: tl.constexpr):
    """As split_in_2."""
    even, odd = tl.split(tl.reshape(t, (N, 8, 2)))
    a, c, e, g, i, k, m, o = split_in_8(even, N)
    b, d, f, h, j, l, n, p = split_in_8(odd, N)  # noqa: E741
    return a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p


@triton.jit
def load_records(start, first, lines, INSIDE: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr, PACK: tl.constexpr):
    """The COUNT numbers that belong to each of the N lines from `first` on, as a tuple of [1, N].

    They are read as one tile [N, PACK], PACK a power of two, or 1: number by number. Then the compiler has every thread
    copy all that it will need, for each number as many words as the tile has columns in a thread: a third of all
    instructions.
    """
    line = first + tl.arange(0, N)
    there = (line < lines) | INSIDE
    values = ()
    if PACK == 1:
        for index in tl.static_range(COUNT):
            number = tl.load(start + line.to(tl.int64) * COUNT + index, mask=there, other=0.0)
            values = values + (number[None, :],)
    else:
        place = tl.arange(0, PACK)[None, :]
        pointers = start + line.to(tl.int64)[:, None] * COUNT + place
        tile = tl.load(pointers, mask=there[:, None] & (place < COUNT), other=0.0)
        if PACK == 2:
            parts = split_in_2(tile, N)
        elif PACK == 4:
            parts = split_in_4(tile, N)
        elif PACK == 8:
            parts = split_in_8(tile, N)
        else:
            parts = split_in_16(tile, N)
        for index in tl.static_range(COUNT):
            values = values + (parts[index][None, :],)
    return values


@triton.jit
def load_parameters(HEAD, h, heads, COUNT: tl.constexpr):
    """The parameters of head `h`, of [COUNT, heads]."""
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (tl.load(HEAD + index * heads + h),)
    return values


@triton.jit
def zeros(SIZE: tl.constexpr, COUNT: tl.constexpr):
    """A tuple of COUNT empty sums, [SIZE] each."""
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (tl.zeros([SIZE], tl.float32),)
    return values


@triton.jit
def sums(total, tiles, COUNT: tl.constexpr):
    """The totals with the sums of the tiles along their second axis added."""
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (total[index] + tl.sum(tiles[index], 1),)
    return values


@triton.jit
def multiplied(x, scale, first, second):
    """`x` times each of the others that is not None."""
    if scale is not None:
        x *= scale
    if first is not None:
        x *= first
    if second is not None:
        x *= second
    return x


@triton.jit
def any_of(x):
    """Whether any of a tile is true; axis by axis, since a reduction of both at once moves the whole tile."""
    return tl.max(tl.max(x.to(tl.int32), 1), 0) > 0


@triton.jit
def differences(POINTS_Q, POINTS_K, i, j, n, m, like, WIDTH: tl.constexpr):
    """Squared distances of points from differences."""
    gap = tl.zeros_like(like)
    for c in range(WIDTH):
        q = tl.load(POINTS_Q + i.to(tl.int64) * WIDTH + c, mask=i < n, other=0.0)
        k = tl.load(POINTS_K + j.to(tl.int64) * WIDTH + c, mask=j < m, other=0.0)
        gap += (q - k) * (q - k)
    return gap


@triton.jit
def added(s, pointers, strides, b, h, i, j, inside, TRUTH: tl.constexpr):
    """Logits with a mask or bias: added, or where it is one of truth values, -inf where it is 0."""
    offsets = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    offsets += i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]
    if TRUTH:
        seen = tl.load(pointers + offsets, mask=inside, other=0)
        return tl.where(seen != 0, s, float("-inf"))
    else:
        return s + tl.load(pointers + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def in_reach(i, j, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Whether causality and the window let query `i`, counted among the keys, see key `j`."""
    seen = j >= 0
    if CAUSAL:
        seen = seen & (j <= i)
    if WINDOWED:
        seen = seen & (i - j < window)
        if not CAUSAL:
            seen = seen & (j - i < window)
    return seen


@triton.jit
def kept(seed, bh, i, j, dropout):
    """1 where dropout leaves a pair, else 0: a function of the pair's place alone, whatever the tiles."""
    zero = (i + j) * 0
    bits, _, _, _ = tl.philox(seed, i + zero, j + zero, bh + zero, zero, ROUNDS)
    return ((bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08 >= dropout).to(tl.float32)


@triton.jit
def tanh(x):
    """Hyperbolic tangent; near 0 by its series, whose digits the quotient would lose."""
    y = x * x
    series = x * (1 - y * (0.3333333333 - y * (0.1333333333 - y * 0.0539682540)))
    far = 1 - 2 / (tl.exp2(tl.minimum(tl.abs(x), 20.0) * (2 * LOG2E)) + 1)
    return tl.where(tl.abs(x) < 0.15, series, tl.where(x < 0, -far, far))


@triton.jit
def weights(s, lse, FUSED: tl.constexpr):
    """exp(s - lse), of FUSED the lse is one to base 2; 0 in rows that see nothing, whose `lse` is +inf.

    FUSED is one operation less for each pair, but has no answer where all that a row sees is -3.4e38, as additive masks
    may have it.
    """
    return tl.exp2(s * LOG2E - lse) if FUSED else tl.exp2((s - lse) * LOG2E)
