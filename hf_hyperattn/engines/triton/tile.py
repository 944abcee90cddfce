"""Compute one tile of attention in Triton: load, score, mask, weights.

The kernels in forward.py and backward.py loop over tiles and call these functions. Here you learn
what happens inside one tile, whichever way it lies.
"""

# These functions are in Triton's language. Python has no types for its loops, tuples and
# `tl.split`.
# mypy: disable-error-code="assignment"
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import INTERPRETED, LOG2E

# Shapes and units of a tile with R queries and C keys of one head. A kernel for queries lays
# queries along the first axis, the kernel for keys lays keys along the first axis; the functions
# below only rely on broadcasting.
#
#   name          queries first   keys first   content
#   i             [R, 1]          [1, R]       int, index of each query in its sequence (tokens)
#   j             [1, C]          [C, 1]       int, index of each key in its sequence (tokens)
#   row           [R, 1] each     [1, R] each  tuple of float32, the statistics of the queries, and
#                                              their numbers of a separable term (score.py)
#   column        [1, C] each     [C, 1] each  tuple of float32, the same of the keys
#   head          scalars         scalars      tuple of float32, the parameters of the head
#   dot           [R, C]          [C, R]       float32, dot products times scale and factors
#   square        [R, C]          [C, R]       float32, squared distances
#   s             [R, C]          [C, R]       float32, logits in nats; -inf where a pair is hidden
#   lse           [R, 1]          [1, R]       float32, log-sum-exp: bits with FUSED, else nats
#   p             [R, C]          [C, R]       float32, weights e^(s - lse)
#
# The last tile of a sequence may reach beyond its end. There `i` and `j` repeat the last query or
# key, so statistics are always real numbers. From a filler such as 0 a score could make NaN, and a
# weight of 0 does not remove a NaN.

#: Rounds of Philox; 7 pass all tests of randomness (Salmon et al., Parallel random numbers, 2011).
ROUNDS = tl.constexpr(7)


@triton.jit
def multiply_tiles(a, b):
    """Return the matrix product of two tiles with float32 sums.

    float32 factors keep their digits: tensor cores compute three TF32 products.
    """
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    if a.dtype == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b)


@triton.jit
def locate_head(vectors, b, h):
    """Return the pointer to the vectors of one head, and the stride between them.

    Args:
        vectors: (pointer, strides) of a tensor [batch, heads, length, width].
        b, h: Indices of the batch element and of the head.
    """
    start, strides = vectors
    # int64: offsets in a large batch overflow int32.
    return start + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1], strides[2]


@triton.jit
def load_vectors(
    vectors, line, width, lines, WIDTH: tl.constexpr, PADDED: tl.constexpr, INSIDE: tl.constexpr
):
    """Load a tile of vectors; numbers beyond WIDTH and `lines` are 0.

    Args:
        vectors: (pointer, stride) from `locate_head`.
        line: Indices of the vectors, along one axis of the tile.
        width: Indices of the components, along the other axis.
        lines: Number of vectors in the sequence.
        WIDTH: Number of components that are read.
        PADDED: Whether the tile is wider than WIDTH.
        INSIDE: Whether every index in `line` is below `lines`.
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
    """Load the COUNT numbers of each line, stored side by side.

    Returns:
        A tuple of COUNT tensors in the shape of `line`.
    """
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (tl.load(start + line.to(tl.int64) * COUNT + index),)
    return values


@triton.jit
def split_columns(tiles, N: tl.constexpr, WIDTH: tl.constexpr):
    """Split each tile [N, WIDTH] of a tuple into its even and its odd columns.

    Returns:
        A tuple of tiles [N, WIDTH // 2], or [N] if WIDTH is 2: the even columns of all tiles, then
        the odd ones.
    """
    even, odd = (), ()
    for index in tl.static_range(len(tiles)):
        a, b = tl.split(
            tiles[index] if WIDTH == 2 else tl.reshape(tiles[index], (N, WIDTH // 2, 2))
        )
        even, odd = even + (a,), odd + (b,)
    return even + odd


@triton.jit
def load_records(start, line, N: tl.constexpr, COUNT: tl.constexpr, PACK: tl.constexpr):
    """Load the same tuple as `load_statistics`, but all numbers in one tile.

    Args:
        start: Pointer to the numbers.
        line: Indices of the lines, [1, N].
        N: Number of lines.
        COUNT: Numbers of a line.
        PACK: Width of the tile, a power of two from 2 to 16. With 1, numbers are loaded one by one.
    """
    # Why one tile: if numbers are loaded one by one, the compiler makes every thread copy each
    # number for all columns that the thread holds. That was a third of all instructions.
    if PACK == 1:
        return load_statistics(start, line, COUNT)
    else:
        place = tl.arange(0, PACK)[None, :]
        pointers = start + tl.trans(line).to(tl.int64) * COUNT + place
        mask = (place < COUNT) & (tl.trans(line) >= 0)
        return take_columns(tl.load(pointers, mask=mask, other=0.0), N, COUNT, PACK)


@triton.jit
def choose_anchor(position):
    """Return the middle of a block's positions."""
    # The middle of whole numbers below 2^23 is exact, and so are differences from it. Other positions
    # round here as they do in the difference of a pair.
    return 0.5 * (tl.max(tl.max(position, 1), 0) + tl.min(tl.min(position, 1), 0))


@triton.jit
def load_positions(start, first, lines, N: tl.constexpr, STRIDE: tl.constexpr, PACK: tl.constexpr):
    """Load the positions of N lines for `compute_split`, [N, PACK].

    Args:
        start: Pointer to the position of line 0.
        first: Index of the first line.
        lines: Number of lines; the last one stands for all beyond.
        STRIDE: Numbers between two positions.
    """
    line = tl.minimum(first + tl.arange(0, N), lines - 1)[:, None].to(tl.int64)
    return tl.load(start + line * STRIDE + tl.arange(0, PACK)[None, :] * 0)


@triton.jit
def compute_split(
    position, anchor, head, FUNCTION, N: tl.constexpr, COUNT: tl.constexpr, PACK: tl.constexpr
):
    """Compute the numbers of lines of a separable term.

    Args:
        position: Positions of the lines, from `load_positions`.
        anchor: Position from which they are counted.
        head: Parameters of the head.
        FUNCTION: `split_row` or `split_column` of `Emitted`.
        N: Number of lines.
        COUNT: Numbers of a line, at most PACK.
        PACK: Width of the tile that holds them, a power of two from 2 to 16.

    Returns:
        A tuple of COUNT tensors [1, N], and the margins of the lines, [N, PACK].
    """
    # As one tile, like statistics in `load_records`: each thread computes one line. If the numbers
    # were computed apart, every thread would compute those of all lines of its pairs.
    place = tl.arange(0, PACK)[None, :]
    numbers, _, margin = FUNCTION(position, anchor, head)
    tile = numbers[0]
    for index in tl.static_range(1, COUNT):
        tile = tl.where(place == index, numbers[index], tile)
    return take_columns(tile, N, COUNT, PACK), margin


@triton.jit
def take_columns(tile, N: tl.constexpr, COUNT: tl.constexpr, PACK: tl.constexpr):
    """Return the first COUNT columns of a tile [N, PACK], each as [1, N]."""
    # Each split lists the even columns of all tiles first, so the columns end in their order.
    parts = split_columns((tile,), N, PACK)
    if PACK >= 4:
        parts = split_columns(parts, N, PACK // 2)
    if PACK >= 8:
        parts = split_columns(parts, N, PACK // 4)
    if PACK == 16:
        parts = split_columns(parts, N, PACK // 8)
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (parts[index][None, :],)
    return values


@triton.jit
def append_numbers(values, more, COUNT: tl.constexpr):
    """Return the first COUNT numbers of a tuple, and a second tuple behind them."""
    found = ()
    for index in tl.static_range(COUNT):
        found = found + (values[index],)
    return found + more


@triton.jit
def load_parameters(HEAD, h, heads, COUNT: tl.constexpr):
    """Load the parameters of head `h` from HEAD [COUNT, heads]."""
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (tl.load(HEAD + index * heads + h),)
    return values


@triton.jit
def make_sums(SIZE: tl.constexpr, COUNT: tl.constexpr):
    """Return a tuple of COUNT sums [SIZE, 4] that start at 0; see `add_tiles`."""
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (tl.zeros([SIZE, 4], tl.float32),)
    return values


@triton.jit
def slice_tile(x):
    """Return a tile [SIZE, N] as a tuple of N // 4 tiles [SIZE, 4]."""
    # A product leaves columns 2t and 2t + 1 of every 8 in thread t of four. Cut like this, no
    # number leaves its thread.
    SIZE: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1] // 4
    x = tl.permute(tl.reshape(x, (SIZE, WIDTH // 2, 4, 2)), (0, 2, 1, 3))
    slices = (tl.reshape(x, (SIZE, 4, WIDTH)),)
    slices = halve_tiles(slices, SIZE, WIDTH)
    if WIDTH >= 4:
        slices = halve_tiles(slices, SIZE, WIDTH // 2)
    if WIDTH >= 8:
        slices = halve_tiles(slices, SIZE, WIDTH // 4)
    if WIDTH >= 16:
        slices = halve_tiles(slices, SIZE, WIDTH // 8)
    if WIDTH >= 32:
        slices = halve_tiles(slices, SIZE, WIDTH // 16)
    return slices


@triton.jit
def halve_tiles(tiles, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Split each tile [SIZE, 4, WIDTH] in two, along its last axis; the axis ends at width 2."""
    even, odd = (), ()
    for index in tl.static_range(len(tiles)):
        a, b = tl.split(
            tiles[index] if WIDTH == 2 else tl.reshape(tiles[index], (SIZE, 4, WIDTH // 2, 2))
        )
        even, odd = even + (a,), odd + (b,)
    return even + odd


@triton.jit
def add_tiles(total, tiles, factor, slices, COUNT: tl.constexpr):
    """Add the sums of each tile along its second axis to a total [SIZE, 4].

    Args:
        total: A tuple of COUNT sums.
        tiles: A tuple of tiles, or of lines or numbers that broadcast to tiles.
        factor: Factor of all tiles, a tile.
        slices: The same tile from `slice_tile`.
    """
    values = ()
    for index in tl.static_range(COUNT):
        found = total[index]
        others = slice_tile(tl.broadcast_to(tiles[index], factor.shape))
        # One instruction for each pair. A reduction of the product would take two, and pass every
        # tile's sums from thread to thread.
        for place in tl.static_range(len(slices)):
            found += slices[place] * others[place]
        values = values + (found,)
    return values


@triton.jit
def sum_slices(total, slices):
    """Return a total [SIZE, 4] plus the slices of a tile."""
    for place in tl.static_range(len(slices)):
        total += slices[place]
    return total


@triton.jit
def finish_sums(total, COUNT: tl.constexpr):
    """Return the sums [SIZE] of totals [SIZE, 4]."""
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (tl.sum(total[index], 1),)
    return values


@triton.jit
def add_axis(total, COUNT: tl.constexpr):
    """Return COUNT tensors [SIZE] as columns [SIZE, 1]."""
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (total[index][:, None],)
    return values


@triton.jit
def subtract_residue(total, means, residue, COUNT: tl.constexpr):
    """Subtract from each sum its mean slope times the residue; see backward.py."""
    values = ()
    for index in tl.static_range(COUNT):
        values = values + (total[index] - residue * means[index],)
    return values


@triton.jit
def multiply_by(x, first, second, third):
    """Return `x` times each of the factors that is not None."""
    if first is not None:
        x = x * first
    if second is not None:
        x = x * second
    if third is not None:
        x = x * third
    return x


@triton.jit
def is_any_true(x):
    """Return whether any element of a tile is true."""
    # Axis by axis: a reduction of both axes at once moves the whole tile.
    return tl.max(tl.max(x.to(tl.int32), 1), 0) > 0


@triton.jit
def measure_distances(queries, keys, i, j, by_query, by_key, like, WIDTH: tl.constexpr):
    """Return squared distances, from the differences of the first WIDTH components.

    Queries are multiplied by `by_query` and keys by `by_key` first. The result has the shape of
    `like`. It is 0 where the vectors coincide up to rounding, so that the rounding of equal vectors
    steers no gradient.
    """
    square, size = tl.zeros_like(like), tl.zeros_like(i.to(tl.float32))
    for c in range(WIDTH):
        q = tl.load(queries[0] + i.to(tl.int64) * queries[1] + c).to(tl.float32) * by_query
        k = tl.load(keys[0] + j.to(tl.int64) * keys[1] + c).to(tl.float32) * by_key
        square += (q - k) * (q - k)
        size += q * q
    # The threshold is (4 eps)^2, relative to |q|^2.
    return tl.where(square <= size * 2.2737367544323206e-13, 0.0, square)


@triton.jit
def compute_logits(
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
    valid,
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
    """Compute the logits of a tile from its dot products, and mask them.

    Args:
        dot, row, column, head, i, j: As in the table at the top.
        softcap: Cap of the logits; the score decides whether it uses it.
        masks: (mask, bias), each (pointer or None, strides).
        queries, keys: (pointer, stride) from `locate_head`.
        scale: Factor of all dot products, or None.
        factor_q, factor_k: Factors of the queries and of the keys, or None.
        b, h: Indices of the batch element and of the query head.
        valid: Bool, the pairs whose query and key exist.
        offset: Position of query 0 among the keys.
        window: Width of the sliding window, used if WINDOWED.
        SCORE, DISTANCE, INEXACT, MARGIN, POINTS: Functions of the score, written by
            engines/emit_triton.py (see `Emitted`). POINTS returns further factors of both vectors,
            for distances from differences. Those that a score does not need are None.
        SLACK: Error of the product form, in shares of the error that INEXACT allows for.
        P: Number of components that a distance is computed from.
        TRUTH: Whether the mask hides pairs where it is 0. Otherwise it is added to the logits.
        CAREFUL: Whether to compute inexact distances again; see `can_skip_program`.
        EDGE: Whether some pairs of the tile may be invalid, or hidden by causality or the window.

    Returns:
        s: Logits, -inf where a pair is hidden.
        square: Squared distances; the dot products if the score reads none.
        margin: Float32, less than the score's bound for pairs whose distance the product form gives
            too roughly; the dot products if the score reads none, or if CAREFUL.
    """
    # Scores: squared distances first, since the score reads them.
    square, margin = dot, dot
    if DISTANCE is not None:
        square = DISTANCE(dot, row, column, head)
    if INEXACT is not None:
        # INEXACT allows for an error of 4 units in the last place; the product leaves SLACK times
        # that.
        if not CAREFUL:
            margin = MARGIN(square, SLACK, row, column, head)
        else:
            inexact = INEXACT(square * (1 / SLACK), row, column, head) & valid
            by_query, by_key = POINTS(row, column, head)
            by_query = multiply_by(by_query, scale, factor_q, None)
            by_key = multiply_by(by_key, factor_k, None, None)
            # Differences cost far more than the product, so tiles without such a pair skip them.
            if is_any_true(inexact):
                square = measure_distances(queries, keys, i, j, by_query, by_key, dot, P)
    s = SCORE(dot, square, row, column, head, softcap)

    # Mask: the bias is added after the softcap, as in the other engines.
    mask, bias = masks
    if bias[0] is not None:
        s += load_pairs(bias, b, h, i, j).to(tl.float32)
    if mask[0] is not None:
        seen = load_pairs(mask, b, h, i, j)
        s = tl.where(seen != 0, s, float("-inf")) if TRUTH else s + seen.to(tl.float32)
    if EDGE:
        visible = is_in_reach(i + offset, j, window, CAUSAL, WINDOWED)
        s = tl.where(valid & visible, s, float("-inf"))
    return s, square, margin


@triton.jit
def can_skip_program(DOUBT, CAREFUL: tl.constexpr):
    """Return whether a careful program has nothing to do.

    A kernel that reads distances runs twice, and so does one with a separable term. The first run
    ignores inexact distances and products, but stores in DOUBT, one number per program, whether it
    met one. The second run is CAREFUL: programs that met one compute their tiles again. If DOUBT is
    None, the kernel runs once.
    """
    # Why two runs: the compiler pipelines no loads or products of a loop that may branch, and
    # inexact pairs are rare.
    nothing = tl.program_id(0) < 0
    if DOUBT is not None:
        if CAREFUL:
            nothing = tl.load(DOUBT + tl.program_id(0)) == 0
    return nothing


@triton.jit
def store_doubt(DOUBT, closest, near, far, CAREFUL: tl.constexpr):
    """Store whether this program met an inexact pair; see `can_skip_program`.

    Args:
        DOUBT: Pointer to one int32 per program, or None.
        closest: [R, 1], the smallest margin of each line's pairs, less the line's bound; None
            without distances.
        near, far: Margins of the program's lines and of those that it walked over, [R, 1] and
            [1, C] or the other way round; None without a separable term.
        CAREFUL: Whether this is the second run, which stores nothing.
    """
    if DOUBT is not None:
        if not CAREFUL:
            doubt = tl.program_id(0) < 0
            if closest is not None:
                doubt = is_any_true(closest < 0)
            if near is not None:
                doubt = doubt | is_any_true(near < 0) | is_any_true(far < 0)
            tl.store(DOUBT + tl.program_id(0), doubt.to(tl.int32))


@triton.jit
def load_pairs(of_pairs, b, h, i, j):
    """Load the tile of a mask or bias [B, H, N, M], given as (pointer, strides)."""
    pointers, strides = of_pairs
    offsets = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    offsets += i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]
    return tl.load(pointers + offsets)


@triton.jit
def is_in_reach(i, j, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Return whether the query at key position `i` may see key `j` by position."""
    seen = j >= 0
    if CAUSAL:
        seen = seen & (j <= i)
    if WINDOWED:
        seen = seen & (i - j < window)
        if not CAUSAL:
            # A bidirectional window reaches equally far to both sides.
            seen = seen & (j - i < window)
    return seen


@triton.jit
def draw_dropout(seed, bh, i, j, dropout):
    """Return 1 where dropout keeps a pair, else 0."""
    # The random number depends on the indices of the pair only. So all kernels, whatever their
    # tiles, drop the same pairs.
    zero = (i + j) * 0
    bits, _, _, _ = tl.philox(
        tl.load(seed), i + zero, j + zero, bh.to(tl.int32) + zero, zero, ROUNDS
    )
    # 24 random bits times 2^-24: a uniform number in [0, 1) that float32 holds exactly.
    return ((bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08 >= dropout).to(
        tl.float32
    )


@triton.jit
def compute_weights(s, lse, FUSED: tl.constexpr):
    """Return e^(s - lse); 0 in rows that see nothing, whose `lse` is +inf.

    With FUSED, `lse` is a logarithm to base 2.
    """
    # FUSED saves one operation per pair. It fails where a row sees only logits of about -3.4e38, as
    # additive masks may have them: there s * LOG2E is -inf.
    return tl.exp2(s * LOG2E - lse) if FUSED else tl.exp2((s - lse) * LOG2E)
