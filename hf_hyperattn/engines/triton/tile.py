"""What all kernels do with one tile of pairs, as Triton functions.

Nothing here knows which way a tile lies: `i` are the queries' numbers and `j` the keys', [R, 1] and [1, C] where
queries run down the tile, [1, R] and [C, 1] where keys do. Statistics are loaded in the same shapes. Where a tile ends
beyond the last line, that one's are loaded again: of numbers that no line has a score might make infinity or NaN, which
a weight of 0 does not take off.
"""

# What follows is Triton's language: its unrolled loops, growing tuples and `tl.split` have no Python types.
# mypy: disable-error-code="assignment"
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import INTERPRETED, LOG2E

#: Rounds of Philox; seven pass all tests of randomness (Salmon et al., Parallel random numbers, 2011).
ROUNDS = tl.constexpr(7)


@triton.jit
def product(a, b):
    """a · b with float32 sums; float32 factors keep their digits (three TF32 products on tensor cores)."""
    if INTERPRETED:  # the interpreter multiplies the bit patterns of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    if a.dtype == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b)


@triton.jit
def head_of(vectors, b, h):
    """Of (pointer, strides) of [batch, heads, length, width]: where a head begins, and the stride of its vectors."""
    start, strides = vectors
    return start + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1], strides[2]


@triton.jit
def load_vectors(
    vectors, line, width, lines, WIDTH: tl.constexpr, PADDED: tl.constexpr, INSIDE: tl.constexpr
):
    """Vectors number `line` of `lines`, whose components number `width` run along the other axis.

    vectors: as of `head_of`. PADDED: there are more columns than WIDTH. INSIDE: all lines are there.
    """
    start, stride = vectors
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
def load_statistics(start, line, COUNT: tl.constexpr):
    """The COUNT numbers of each line, which lie side by side, as a tuple of what has the shape of `line`."""
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (tl.load(start + line.to(tl.int64) * COUNT + index),)
    return values


@triton.jit
def halves(tiles, N: tl.constexpr, WIDTH: tl.constexpr):
    """Each tile [N, WIDTH] of a tuple split into its even columns and its odd ones: first the former of all tiles."""
    even, odd = (), ()
    for index in tl.static_range(len(tiles)):
        a, b = tl.split(
            tiles[index] if WIDTH == 2 else tl.reshape(tiles[index], (N, WIDTH // 2, 2))
        )
        even, odd = even + (a,), odd + (b,)
    return even + odd


@triton.jit
def load_records(start, line, N: tl.constexpr, COUNT: tl.constexpr, PACK: tl.constexpr):
    """As `load_statistics` of lines [1, N].

    They are read as one tile [N, PACK], PACK a power of two up to 16, or 1: number by number. Then the compiler has
    every thread copy all that it will need, for each number as many words as the tile has columns in a thread: a third
    of all instructions.
    """
    if PACK == 1:
        return load_statistics(start, line, COUNT)
    else:
        place = tl.arange(0, PACK)[None, :]
        pointers = start + tl.trans(line).to(tl.int64) * COUNT + place
        # splitting halves of halves leaves the columns in their order
        parts = halves(
            (tl.load(pointers, mask=(place < COUNT) & (tl.trans(line) >= 0), other=0.0),), N, PACK
        )
        if PACK >= 4:
            parts = halves(parts, N, PACK // 2)
        if PACK >= 8:
            parts = halves(parts, N, PACK // 4)
        if PACK == 16:
            parts = halves(parts, N, PACK // 8)
        values = ()
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
def sums(total, tiles, factor, COUNT: tl.constexpr):
    """The totals with the sums of the tiles, times a factor where that is not None, along their second axis added."""
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (total[index] + tl.sum(multiplied(tiles[index], factor, None, None), 1),)
    return values


@triton.jit
def less(total, means, residue, COUNT: tl.constexpr):
    """The sums without what is left of them by rounding: the residue times the mean slopes."""
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (total[index] - residue * means[index],)
    return values


@triton.jit
def multiplied(x, first, second, third):
    """`x` times each of the others that is not None."""
    if first is not None:
        x = x * first
    if second is not None:
        x = x * second
    if third is not None:
        x = x * third
    return x


@triton.jit
def any_of(x):
    """Whether any of a tile is true; axis by axis, since a reduction of both at once moves the whole tile."""
    return tl.max(tl.max(x.to(tl.int32), 1), 0) > 0


@triton.jit
def differences(queries, keys, i, j, by_query, by_key, like, WIDTH: tl.constexpr):
    """Squared distances of queries times `by_query` and keys times `by_key` from differences of their first WIDTH
    components; 0 where they coincide but for rounding, which is to steer no gradient.
    """
    square, size = tl.zeros_like(like), tl.zeros_like(i.to(tl.float32))
    for c in range(WIDTH):
        q = tl.load(queries[0] + i.to(tl.int64) * queries[1] + c).to(tl.float32) * by_query
        k = tl.load(keys[0] + j.to(tl.int64) * keys[1] + c).to(tl.float32) * by_key
        square += (q - k) * (q - k)
        size += q * q
    return tl.where(square <= size * 2.2737367544323206e-13, 0.0, square)  # (4 eps)²


@triton.jit
def logits(
    dot,
    row,
    column,
    head,
    softcap,
    masks,
    queries,
    keys,
    scale,
    factor_q,
    factor_k,
    b,
    h,
    i,
    j,
    there,
    offset,
    window,
    SCORE: tl.constexpr,
    DISTANCE: tl.constexpr,
    INEXACT: tl.constexpr,
    MARGIN: tl.constexpr,
    POINTS: tl.constexpr,
    SLACK: tl.constexpr,
    P: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    TRUTH: tl.constexpr,
    CAREFUL: tl.constexpr,
    EDGE: tl.constexpr,
):
    """The logits of a tile from its product, -inf where pairs are hidden, the squared distances that they read, and the
    margin of each pair (see `Emitted`). The last two say nothing where no distances are read, and margins nothing in a
    CAREFUL run.

    CAREFUL, a tile with such a pair is taken from differences. A term's own bounds allow for an error of 4 units in the
    last place, the product leaves SLACK times as much.

    Args:
        masks: (mask, bias), each (pointer or None, strides); with TRUTH the mask hides where it is 0.
        queries, keys: as of `head_of`.
        scale, factor_q, factor_k: what all products, the queries and the keys are multiplied with, or None.
        there: which pairs there are.
        POINTS: from numbers to what vectors are multiplied with beside that where differences are taken.
        EDGE: whether causality or the window may hide some.
    """
    square, margin = dot, dot
    if DISTANCE is not None:
        square = DISTANCE(dot, row, column, head)
    if INEXACT is not None:
        if not CAREFUL:
            margin = MARGIN(square, SLACK, row, column, head)
        else:
            inexact = INEXACT(square * (1 / SLACK), row, column, head) & there
            by_query, by_key = POINTS(row, column, head)
            by_query = multiplied(by_query, scale, factor_q, None)
            by_key = multiplied(by_key, factor_k, None, None)
            if any_of(inexact):
                square = differences(queries, keys, i, j, by_query, by_key, dot, P)
    s = SCORE(dot, square, row, column, head, softcap)
    mask, bias = masks
    if bias[0] is not None:
        s += load_pairs(bias, b, h, i, j).to(tl.float32)
    if mask[0] is not None:
        seen = load_pairs(mask, b, h, i, j)
        s = tl.where(seen != 0, s, float("-inf")) if TRUTH else s + seen.to(tl.float32)
    if EDGE:
        s = tl.where(there & in_reach(i + offset, j, window, CAUSAL, WINDOWED), s, float("-inf"))
    return s, square, margin


@triton.jit
def nothing_to_do(DOUBT, CAREFUL: tl.constexpr):
    """Whether a careful program is not needed.

    A loop that may branch has its loads and products in no pipeline, and pairs so near that the product form of their
    distance is too inexact are rare. So every kernel runs twice where it reads distances: first without regard to that,
    noting in DOUBT, one number a program, whether there was such a pair; then CAREFUL, the programs that had one. None:
    it runs once.
    """
    nothing = tl.program_id(0) < 0
    if DOUBT is not None:
        if CAREFUL:
            nothing = tl.load(DOUBT + tl.program_id(0)) == 0
    return nothing


@triton.jit
def tell(DOUBT, closest, CAREFUL: tl.constexpr):
    """See `nothing_to_do`. `closest` [B, 1]: the smallest margin of each line's pairs, less its bound."""
    if DOUBT is not None:
        if not CAREFUL:
            tl.store(DOUBT + tl.program_id(0), any_of(closest < 0).to(tl.int32))


@triton.jit
def load_pairs(of_pairs, b, h, i, j):
    """A tile of a mask or bias."""
    pointers, strides = of_pairs
    offsets = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    offsets += i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]
    return tl.load(pointers + offsets)


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
    bits, _, _, _ = tl.philox(
        tl.load(seed), i + zero, j + zero, bh.to(tl.int32) + zero, zero, ROUNDS
    )
    return ((bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08 >= dropout).to(
        tl.float32
    )


@triton.jit
def weights(s, lse, FUSED: tl.constexpr):
    """exp(s - lse), of FUSED the lse is one to base 2; 0 in rows that see nothing, whose `lse` is +inf.

    FUSED is one operation less for each pair, but has no answer where all that a row sees is -3.4e38, as additive masks
    may have it.
    """
    return tl.exp2(s * LOG2E - lse) if FUSED else tl.exp2((s - lse) * LOG2E)
