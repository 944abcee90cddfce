"""The backward kernels, one for queries and one for keys and values.

Here you learn how both compute the weights again from q, k and the log-sum-exp, and how they sum
gradients.
"""

# These functions are in Triton's language. Python's types do not cover its growing tuples.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import LOG2E
from .forward import LENGTHS, find_keys_in_reach, locate_rows
from .tile import (
    add_axis,
    add_tiles,
    append_numbers,
    can_skip_program,
    choose_anchor,
    compute_logits,
    compute_split,
    compute_weights,
    draw_dropout,
    finish_sums,
    load_parameters,
    load_positions,
    load_records,
    load_statistics,
    load_vectors,
    locate_head,
    make_sums,
    multiply_by,
    multiply_tiles,
    slice_tile,
    store_doubt,
    subtract_residue,
    sum_slices,
)

# Each program owns its gradients and sums them in a fixed order, without atomic operations. So
# gradients do not change from run to run.
#
# The residue of a row: the gradients d_s of a row's logits sum to 0, except for rounding. The
# gradient of a parameter, or of a statistic of the row, is the sum of d_s * slope. If slopes are
# large and nearly equal along the row, that sum is mostly residue * slope, which is noise. So
# residue * (mean slope of the row) is subtracted, as if the mean had been subtracted from all
# slopes; without rounding this changes nothing. For the statistics of keys, the second kernel
# subtracts the residue from d_s itself, through `delta`.
#
# Tiles of the query kernel (BM queries, BN keys; BD and BDV are D and DV padded):
#   q [BM, BD], k [BD, BN], grad [BM, BDV], v [BDV, BN]     in the dtype of the caller's tensors
#   s, p, d_p, d_s, d_dot   [BM, BN]    float32: logits (nats) and weights; gradients of weights,
#                                       logits and products
#   lse, delta              [BM, 1]     float32: log-sum-exp (bits with FUSED, else nats); sum of
#                                       GRAD * OUT
#   d_q                     [BM, BD]    float32, sum over keys
# Tiles of the key kernel: keys lie along the first axis, since its products sum over queries:
#   k [BN, BD], v [BN, BDV], q [BD, BM], grad [BDV, BM]     in the dtype of the caller's tensors
#   s, p, d_p, d_dot        [BN, BM]    float32
#   d_k [BN, BD], d_v [BN, BDV]         float32, sums over queries


@triton.jit
def store_vectors(
    D_X,
    D_NUMBERS,
    d_x,
    x,
    by_number,
    scale,
    factor,
    start,
    lines,
    place,
    COUNT: tl.constexpr,
    D_FACTORS: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    BD: tl.constexpr,
):
    """Store the gradients of B vectors, of their statistics and of their factors.

    Args:
        D_X: Written, [.., D]: gradients of vectors.
        D_NUMBERS: Written, float32 [.., COUNT + D_FACTORS]: gradients of the statistics, then of
            the factor.
        d_x: Sums over the tiles, before the scale and the factor, [B, BD].
        x: The vectors, [B, BD], 0 beyond W.
        by_number: Gradients of the statistics, a tuple of COUNT tensors [B].
        scale, factor: Factor of all products, and the factors of the vectors; each may be None.
        start, lines: First vector, and number of vectors of the sequence.
        place: Index of vector 0 of the sequence in D_X.
        D_FACTORS: 1 if gradients of the factors are stored, else 0.
        W, D: Components that the product uses, and components of a vector.
    """
    line, width = start + tl.arange(0, B), tl.arange(0, BD)[None, :]
    valid, place = line < lines, place + line
    for index in tl.static_range(COUNT):
        tl.store(D_NUMBERS + place * (COUNT + D_FACTORS) + index, by_number[index], mask=valid)
    d_x = multiply_by(d_x, scale, None, None)
    if D_FACTORS:
        # The sum stops at W, because x is 0 beyond.
        tl.store(D_NUMBERS + place * (COUNT + 1) + COUNT, tl.sum(d_x * x, 1), mask=valid)
    d_x = tl.where(width < W, multiply_by(d_x, factor, None, None), 0.0)
    tl.store(D_X + place[:, None] * D + width, d_x, mask=valid[:, None] & (width < D))


@triton.jit(do_not_specialize=LENGTHS)
def attention_backward_query(
    Q,
    K,
    V,
    NUMBERS,
    MASKS,
    SINKS,
    SEED,
    DOUBT,
    OUT,
    LSE,
    GRAD,
    RECORD,
    D_Q,
    D_ROW,
    D_HEAD,
    heads,
    n,
    m,
    column_heads,
    row_step,
    offset,
    window,
    scale,
    softcap,
    dropout,
    SCORE: tl.constexpr,
    SLOPES: tl.constexpr,
    DISTANCE: tl.constexpr,
    INEXACT: tl.constexpr,
    MARGIN: tl.constexpr,
    BOUND: tl.constexpr,
    POINTS: tl.constexpr,
    SLACK: tl.constexpr,
    SPLIT_ROW: tl.constexpr,
    SPLIT_COLUMN: tl.constexpr,
    SPLIT: tl.constexpr,
    PULL: tl.constexpr,
    CAREFUL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    FACTORS: tl.constexpr,
    FUSED: tl.constexpr,
    D_ROWS: tl.constexpr,
    D_HEADS: tl.constexpr,
    SPLIT_HEADS: tl.constexpr,
    SPLIT_SUMS: tl.constexpr,
    SPLIT_ONES: tl.constexpr,
    D_FACTORS: tl.constexpr,
    PACK: tl.constexpr,
    SPLIT_PACK: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    TRUTH: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute the gradients of queries, their statistics and parameters of heads.

    Args:
        GRAD: (pointer, strides) of the gradient of OUT, [B, H, N, DV].
        OUT, LSE: Results of the forward kernel.
        RECORD: float32 [B, H, N, ROWS + FACTORS + 2 or 3]. Begins with the numbers of ROW. This
            kernel appends, for the key kernel: the log-sum-exp (to base 2 with FUSED), the sum of
            GRAD * OUT plus the residue, and without FUSED 1 over the sum of weights.
        D_Q: Written, [B, H, N, D], in the dtype of Q.
        D_ROW: Written, float32 [B, H, N, D_ROWS + D_FACTORS].
        D_HEAD: Written, float32 [D_HEADS + SPLIT_HEADS, B, H, N]: one number per row, which the
            caller sums.
        SLOPES: The score's derivative, written by engines/emit_triton.py: the slopes of a logit by
            the product, by the statistics of row and column, and by the parameters.
        PULL: `pull_split` of `Emitted`, or None.
        D_ROWS, D_HEADS, D_FACTORS: Number of gradients that are wanted; 0 if none.
        SPLIT_HEADS, SPLIT_SUMS, SPLIT_ONES: Number of further parameters, whose gradients PULL
            returns; of the numbers of a column that they are sums of; and 1 if one of these sums is
            that of the gradients themselves. 0 if none are wanted.

    The other arguments are as in `attention_forward`.
    """
    if can_skip_program(DOUBT, CAREFUL):
        return

    # Load: the rows of this program, once.
    b, kv, h, i, inside, first, last = locate_rows(tl.program_id(0), n, heads, GROUP, False, BM)
    bh = (b * heads + h).to(tl.int64)
    width, width_v = tl.arange(0, BD), tl.arange(0, BDV)
    ROW, COLUMN, HEAD = NUMBERS

    queries = locate_head(Q, b, h)
    q = load_vectors(queries, i, width[None, :], n, W, W < BD, True)
    row = load_statistics(ROW, bh * n + i, ROWS + FACTORS)
    factor_q = row[ROWS] if FACTORS else None
    grad = load_vectors(locate_head(GRAD, b, h), i, width_v[None, :], n, DV, DV < BDV, True)
    out = load_vectors((OUT + bh * n * DV, DV), i, width_v[None, :], n, DV, DV < BDV, True)
    delta = tl.sum(grad.to(tl.float32) * out, 1)[:, None]
    lse = tl.load(LSE + bh * n + i) * (LOG2E if FUSED else 1.0)
    # The key kernel reads what this kernel knows of a row.
    record = RECORD + (bh * n + i) * (ROWS + FACTORS + (2 if FUSED else 3)) + ROWS + FACTORS
    tl.store(record, lse, mask=inside)
    share = None if FUSED else tl.load(LSE + row_step.to(tl.int64) + bh * n + i)
    if share is not None:
        tl.store(record + 2, share, mask=inside)
    head = load_parameters(HEAD, h, heads, HEADS)
    near, far = None, None
    if SPLIT_ROW is not None:
        position = row[SPLIT[0]]
        anchor = choose_anchor(position)
        own = SPLIT_ROW(position, anchor, head)
        row, near = append_numbers(row, own[0], ROWS), own[1]
        far = tl.full([BN, SPLIT_PACK], float("inf"), tl.float32)
    keys, values = locate_head(K, b, kv), locate_head(V, b, kv)
    column_start = COLUMN + (b * column_heads + h // (heads // column_heads)).to(tl.int64) * m * (
        COLUMNS + FACTORS
    )

    d_q = tl.zeros([BM, BD], tl.float32)
    d_rows, d_heads = make_sums(BM, D_ROWS), make_sums(BM, D_HEADS)
    # The mean slopes of each row, by parameter and by statistic.
    means, row_means = make_sums(BM, D_HEADS), make_sums(BM, D_ROWS)
    d_split, split_means = make_sums(BM, SPLIT_SUMS), make_sums(BM, SPLIT_SUMS)
    total = tl.zeros([BM, 4], tl.float32)
    residue = tl.zeros([BM, 4], tl.float32)
    closest = tl.full([BM], float("inf"), tl.float32)
    low, high, clean = find_keys_in_reach(
        first + offset, last + offset, m, window, CAUSAL, WINDOWED, BN
    )
    # Tiles in which every pair is visible need no mask, the others (EDGE) do.
    for EDGE in tl.static_range(2):
        if SPLIT_COLUMN is not None:
            # Loaded a tile ahead, by hand: see `compute_split`.
            positions = column_start + SPLIT[1]
            begin = low if EDGE == 0 else clean
            ahead = load_positions(positions, begin, m, BN, COLUMNS + FACTORS, SPLIT_PACK)
        for start in range(low if EDGE == 0 else clean, clean if EDGE == 0 else high, BN):
            # Load: keys, values and statistics of keys.
            line = start + tl.arange(0, BN)[None, :]
            j = line if EDGE == 0 else tl.minimum(line, m - 1)
            k = load_vectors(keys, line, width[:, None], m, D, D < BD, EDGE == 0)
            v = load_vectors(values, line, width_v[:, None], m, DV, DV < BDV, EDGE == 0)
            column = load_records(column_start, j, BN, COLUMNS + FACTORS, PACK)
            factor_k = column[COLUMNS] if FACTORS else None
            if SPLIT_COLUMN is not None:
                here = ahead
                ahead = load_positions(positions, start + BN, m, BN, COLUMNS + FACTORS, SPLIT_PACK)
                numbers, margins = compute_split(
                    here, anchor, head, SPLIT_COLUMN, BN, max(SPLIT[2], SPLIT_SUMS), SPLIT_PACK
                )
                column = append_numbers(column, numbers, COLUMNS)
                far = tl.minimum(far, margins)

            # Scores and mask.
            dot = multiply_by(multiply_tiles(q, k), scale, factor_k, factor_q)
            s, square, margin = compute_logits(
                dot,
                row,
                column,
                head,
                softcap,
                MASKS,
                queries,
                keys,
                scale,
                factor_q,
                factor_k,
                b,
                h,
                i,
                j,
                inside & (line < m),
                offset,
                window,
                SCORE,
                DISTANCE,
                INEXACT,
                MARGIN,
                POINTS,
                SLACK,
                P,
                CAUSAL,
                WINDOWED,
                TRUTH,
                CAREFUL,
                EDGE == 1,
            )
            if INEXACT is not None:
                closest = tl.minimum(closest, tl.min(margin, 1))

            # Softmax: its sums are known from the forward pass. d_s = p (d_p - delta).
            p = compute_weights(s, lse, FUSED)
            if share is not None:
                p *= share
            d_p = multiply_tiles(grad, v)
            if SEED is not None:
                d_p *= draw_dropout(SEED, bh, i, j, dropout) * (1 / (1 - dropout))
            d_s = p * (d_p - delta)

            # Accumulate.
            by_dot, by_row, _, by_head = SLOPES(dot, square, row, column, head, softcap)
            by_pair = slice_tile(d_s)
            residue = sum_slices(residue, by_pair)
            d_rows = add_tiles(d_rows, by_row, d_s, by_pair, D_ROWS)
            d_heads = add_tiles(d_heads, by_head, d_s, by_pair, D_HEADS)
            if D_ROWS or D_HEADS or SPLIT_SUMS:
                weights = slice_tile(p)
                row_means = add_tiles(row_means, by_row, p, weights, D_ROWS)
                means = add_tiles(means, by_head, p, weights, D_HEADS)
                if SPLIT_SUMS:
                    d_split = add_tiles(d_split, numbers, d_s, by_pair, SPLIT_SUMS)
                    split_means = add_tiles(split_means, numbers, p, weights, SPLIT_SUMS)
                if SPLIT_ONES:
                    total = sum_slices(total, weights)
            if by_dot is not None:
                d_dot = multiply_by(d_s, by_dot, factor_k, None)
                d_q += multiply_tiles(d_dot.to(k.dtype), tl.trans(k))

    # Subtract the residue, and store.
    d_rows, d_heads = finish_sums(d_rows, D_ROWS), finish_sums(d_heads, D_HEADS)
    means, row_means = finish_sums(means, D_HEADS), finish_sums(row_means, D_ROWS)
    d_split = finish_sums(d_split, SPLIT_SUMS)
    split_means = finish_sums(split_means, SPLIT_SUMS)
    residue = tl.sum(residue, 1)
    gradients = residue
    bounded = None
    if INEXACT is not None:
        bounded = closest[:, None] - BOUND(SLACK, row, head)
    store_doubt(DOUBT, bounded, near, far, CAREFUL)
    place = first + tl.arange(0, BM)
    if SINKS is not None:
        # A sink is a pair of its row with a value and slopes of 0: its d_s is -weight * delta.
        sink = compute_weights(tl.load(SINKS + h).to(tl.float32), lse, FUSED)
        if share is not None:
            sink *= share
        residue -= tl.sum(sink * delta, 1)
    # With this delta, the key kernel's d_s of a row sum to 0 again.
    tl.store(record + 1, delta + residue[:, None], mask=inside)
    d_rows = subtract_residue(d_rows, row_means, residue, D_ROWS)
    d_heads = subtract_residue(d_heads, means, residue, D_HEADS)
    if SPLIT_SUMS:
        d_split = subtract_residue(d_split, split_means, residue, SPLIT_SUMS)
        if SPLIT_ONES:
            # As a sum of 1 · d_s, less the residue times the mean of 1.
            d_split = (gradients - residue * tl.sum(total, 1),) + d_split
        further = PULL(add_axis(d_split, SPLIT_ONES + SPLIT_SUMS), position, anchor, head)
        for index in tl.static_range(SPLIT_HEADS):
            d_heads = d_heads + (tl.sum(further[index], 1),)
    for index in tl.static_range(D_HEADS + SPLIT_HEADS):
        tl.store(
            D_HEAD + index * row_step.to(tl.int64) + bh * n + place, d_heads[index], mask=place < n
        )
    store_vectors(
        D_Q,
        D_ROW,
        d_x=d_q,
        x=q,
        by_number=d_rows,
        scale=scale,
        factor=factor_q,
        start=first,
        lines=n,
        place=bh * n,
        COUNT=D_ROWS,
        D_FACTORS=D_FACTORS,
        W=W,
        D=D,
        B=BM,
        BD=BD,
    )


@triton.jit
def find_queries_in_reach(
    first, last, n, offset, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BM: tl.constexpr
):
    """Return the range of queries that can see keys `first` to `last` by position.

    Returns:
        low: First query that sees at least one of the keys, rounded down to a multiple of BM.
        high: End of these queries.
        clean: Start of the tiles in which every query sees every key, a multiple of BM. They end at
            `high`.
    """
    low, high, clean = 0, n, 0
    if CAUSAL:
        # Query i sees key j if j <= i + offset. From the last key on, queries see the whole block.
        low = tl.maximum(first - offset, 0) // BM * BM
        clean = tl.cdiv(tl.maximum(last - offset, 0), BM) * BM
    if WINDOWED:
        if not CAUSAL:
            low = tl.maximum(first - window - offset + 1, 0) // BM * BM
        high = tl.maximum(tl.minimum(n, last + window - offset), 0)
        # The window hides keys at both ends, so every tile is masked.
        clean = high
    return low, high, tl.minimum(tl.maximum(clean, low), tl.maximum(high, low))


@triton.jit(do_not_specialize=LENGTHS)
def attention_backward_key(
    Q,
    K,
    V,
    NUMBERS,
    MASKS,
    SEED,
    DOUBT,
    GRAD,
    RECORD,
    D_K,
    D_V,
    D_COLUMN,
    heads,
    n,
    m,
    column_heads,
    offset,
    window,
    scale,
    softcap,
    dropout,
    SCORE: tl.constexpr,
    SLOPES: tl.constexpr,
    DISTANCE: tl.constexpr,
    INEXACT: tl.constexpr,
    MARGIN: tl.constexpr,
    BOUND: tl.constexpr,
    POINTS: tl.constexpr,
    SLACK: tl.constexpr,
    SPLIT_ROW: tl.constexpr,
    SPLIT_COLUMN: tl.constexpr,
    SPLIT: tl.constexpr,
    CAREFUL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    FACTORS: tl.constexpr,
    FUSED: tl.constexpr,
    D_COLUMNS: tl.constexpr,
    D_FACTORS: tl.constexpr,
    PACK: tl.constexpr,
    SPLIT_PACK: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    TRUTH: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute the gradients of keys and values, and of the statistics of keys.

    Args:
        GRAD: (pointer, strides) of the gradient of the output, [B, H, N, DV].
        RECORD: As `attention_backward_query` left it.
        D_K, D_V, D_COLUMN: Written, [B, H, M, D], [B, H, M, DV] and float32 [B, H, M, D_COLUMNS +
            D_FACTORS]. There is one gradient per query head; the caller sums over the heads that
            share a key head.
        D_COLUMNS, D_FACTORS: Number of gradients that are wanted; 0 if none.

    The other arguments are as in `attention_forward` and `attention_backward_query`.
    """
    if can_skip_program(DOUBT, CAREFUL):
        return

    # Load: the keys of this program, once.
    blocks = tl.cdiv(m, BN)
    block = tl.program_id(0) % blocks
    number = tl.program_id(0) // blocks
    b, h = number // heads, number % heads
    kv = h // GROUP
    bh = (b * heads + h).to(tl.int64)
    lines = block * BN + tl.arange(0, BN)[:, None]
    inside, j = lines < m, tl.minimum(lines, m - 1)
    width, width_v = tl.arange(0, BD), tl.arange(0, BDV)
    COLUMN, HEAD = NUMBERS[1], NUMBERS[2]
    keys = locate_head(K, b, kv)
    k = load_vectors(keys, j, width[None, :], m, W, W < BD, True)
    v = load_vectors(locate_head(V, b, kv), j, width_v[None, :], m, DV, DV < BDV, True)
    head = load_parameters(HEAD, h, heads, HEADS)
    column_line = (b * column_heads + h // (heads // column_heads)).to(tl.int64) * m
    column = load_statistics(COLUMN, column_line + j, COLUMNS + FACTORS)
    factor_k = column[COLUMNS] if FACTORS else None
    near, far = None, None
    if SPLIT_COLUMN is not None:
        # The anchor lies among the keys here: each kernel takes it from its own lines.
        position = column[SPLIT[1]]
        anchor = choose_anchor(position)
        own = SPLIT_COLUMN(position, anchor, head)
        column, near = append_numbers(column, own[0], COLUMNS), own[1]
        far = tl.full([BM, SPLIT_PACK], float("inf"), tl.float32)
    queries, grads = locate_head(Q, b, h), locate_head(GRAD, b, h)

    d_k = tl.zeros([BN, BD], tl.float32)
    d_v = tl.zeros([BN, BDV], tl.float32)
    d_columns = make_sums(BN, D_COLUMNS)
    closest = tl.full([BN], float("inf"), tl.float32)
    first, last = block * BN, tl.minimum(block * BN + BN, m) - 1
    low, high, clean = find_queries_in_reach(first, last, n, offset, window, CAUSAL, WINDOWED, BM)
    # As in the query kernel. Without causality and window, no tile has an edge: missing queries
    # have weights of 0.
    for EDGE in tl.static_range(2):
        if EDGE == 0 or CAUSAL or WINDOWED:
            if SPLIT_ROW is not None:
                positions = RECORD + bh * n * (ROWS + FACTORS + (2 if FUSED else 3)) + SPLIT[0]
                begin = clean if EDGE == 0 else low
                ahead = load_positions(
                    positions, begin, n, BM, ROWS + FACTORS + (2 if FUSED else 3), SPLIT_PACK
                )
            for start in range(clean if EDGE == 0 else low, high if EDGE == 0 else clean, BM):
                # Load: queries, gradients and the records of rows.
                line = start + tl.arange(0, BM)[None, :]
                valid, i = line < n, tl.minimum(line, n - 1)
                q = load_vectors(queries, line, width[:, None], n, D, D < BD, False)
                grad = load_vectors(grads, line, width_v[:, None], n, DV, DV < BDV, False)
                records = RECORD + bh * n * (ROWS + FACTORS + (2 if FUSED else 3))
                record = load_records(records, i, BM, ROWS + FACTORS + (2 if FUSED else 3), PACK)
                row = record
                factor_q = record[ROWS] if FACTORS else None
                # +inf gives queries beyond the end a weight of 0.
                lse = tl.where(valid, record[ROWS + FACTORS], float("inf"))
                delta = record[ROWS + FACTORS + 1]
                if SPLIT_ROW is not None:
                    here = ahead
                    ahead = load_positions(
                        positions,
                        start + BM,
                        n,
                        BM,
                        ROWS + FACTORS + (2 if FUSED else 3),
                        SPLIT_PACK,
                    )
                    numbers, margins = compute_split(
                        here, anchor, head, SPLIT_ROW, BM, SPLIT[3], SPLIT_PACK
                    )
                    row = append_numbers(record, numbers, ROWS)
                    far = tl.minimum(far, margins)

                # Scores and mask.
                dot = multiply_by(multiply_tiles(k, q), scale, factor_q, factor_k)
                s, square, margin = compute_logits(
                    dot,
                    row,
                    column,
                    head,
                    softcap,
                    MASKS,
                    queries,
                    keys,
                    scale,
                    factor_q,
                    factor_k,
                    b,
                    h,
                    i,
                    j,
                    inside & valid,
                    offset,
                    window,
                    SCORE,
                    DISTANCE,
                    INEXACT,
                    MARGIN,
                    POINTS,
                    SLACK,
                    P,
                    CAUSAL,
                    WINDOWED,
                    TRUTH,
                    CAREFUL,
                    EDGE == 1,
                )
                if INEXACT is not None:
                    # Queries lie along the second axis here, so each pair has another bound.
                    closest = tl.minimum(closest, tl.min(margin - BOUND(SLACK, row, head), 1))

                # Softmax.
                p = compute_weights(s, lse, FUSED)
                if not FUSED:
                    p *= record[ROWS + FACTORS + 2]
                d_p, dropped = multiply_tiles(v, grad), p
                # d_v needs the weights after dropout, d_s the weights before it.
                if SEED is not None:
                    factor = draw_dropout(SEED, bh, i, j, dropout) * (1 / (1 - dropout))
                    d_p, dropped = d_p * factor, p * factor

                # Accumulate.
                d_v += multiply_tiles(dropped.to(v.dtype), tl.trans(grad))
                d_s = p * (d_p - delta)
                by_dot, _, by_column, _ = SLOPES(dot, square, row, column, head, softcap)
                if D_COLUMNS:
                    d_columns = add_tiles(d_columns, by_column, d_s, slice_tile(d_s), D_COLUMNS)
                if by_dot is not None:
                    d_dot = multiply_by(d_s, by_dot, factor_q, None)
                    d_k += multiply_tiles(d_dot.to(q.dtype), tl.trans(q))

    # Store.
    bounded = closest[:, None] if INEXACT is not None else None
    store_doubt(DOUBT, bounded, near, far, CAREFUL)
    store_vectors(
        D_K,
        D_COLUMN,
        d_x=d_k,
        x=k,
        by_number=finish_sums(d_columns, D_COLUMNS),
        scale=scale,
        factor=factor_k,
        start=block * BN,
        lines=m,
        place=bh * m,
        COUNT=D_COLUMNS,
        D_FACTORS=D_FACTORS,
        W=W,
        D=D,
        B=BN,
        BD=BD,
    )
    # Values have no statistics, scale or factors.
    store_vectors(
        D_V,
        D_COLUMN,
        d_x=d_v,
        x=v,
        by_number=(),
        scale=None,
        factor=None,
        start=block * BN,
        lines=m,
        place=bh * m,
        COUNT=0,
        D_FACTORS=0,
        W=DV,
        D=DV,
        B=BN,
        BD=BDV,
    )
