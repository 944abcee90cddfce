"""The backward kernels: one for queries, one for keys and values. Each computes its tiles again from q, k and the
log-sum-exp and adds them up by itself, in a fixed order and without atomic operations, so that gradients are the same
from run to run.

In a row the gradients of the logits add up to 0, but for rounding. Where the slopes of the logits by a parameter or a
row's statistic are large and nearly the same along a row, that residue times their size is all that one would see. So
the residue times the row's mean slope is taken off, as if the mean had been taken off all slopes, which changes nothing
else; and the second kernel, for the statistics of keys, has it taken off the gradients of the logits.
"""

# What follows is Triton's language: its growing tuples have no Python types.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import LOG2E
from .forward import LENGTHS, reach, rows_of
from .tile import (
    head_of,
    kept,
    less,
    load_parameters,
    load_records,
    load_statistics,
    load_vectors,
    logits,
    multiplied,
    nothing_to_do,
    product,
    sums,
    tell,
    weights,
    zeros,
)


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
    """The gradients of B vectors `x` from `start` on, of `lines`, whose line 0 is number `place`: D_X [.., D]; those of
    their COUNT statistics and, with D_FACTORS, of what they are multiplied with: D_NUMBERS [.., COUNT + D_FACTORS].
    """
    line, width = start + tl.arange(0, B), tl.arange(0, BD)[None, :]
    there, place = line < lines, place + line
    for index in tl.static_range(COUNT):
        tl.store(D_NUMBERS + place * (COUNT + D_FACTORS) + index, by_number[index], mask=there)
    d_x = multiplied(d_x, scale, None, None)
    if D_FACTORS:
        tl.store(
            D_NUMBERS + place * (COUNT + 1) + COUNT, tl.sum(d_x * x, 1), mask=there
        )  # x has zeros beyond W
    d_x = tl.where(width < W, multiplied(d_x, factor, None, None), 0.0)
    tl.store(D_X + place[:, None] * D + width, d_x, mask=there[:, None] & (width < D))


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
    CAREFUL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    FACTORS: tl.constexpr,
    FUSED: tl.constexpr,
    D_ROWS: tl.constexpr,
    D_HEADS: tl.constexpr,
    D_FACTORS: tl.constexpr,
    PACK: tl.constexpr,
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
    """D_Q [B, H, N, D], D_ROW [B, H, N, D_ROWS + D_FACTORS], D_HEAD [D_HEADS, B, H, N] (by rows, to be summed);
    float32, D_Q as Q. For the other kernel the last numbers of RECORD [B, H, N, ROWS + FACTORS + 2 or 3]: LSE, with
    FUSED to base 2, the sums of GRAD · OUT with that residue, and without FUSED what weights are multiplied with. Other
    arguments are as in the forward kernel.
    """
    if nothing_to_do(DOUBT, CAREFUL):
        return
    b, kv, h, i, inside, first, last = rows_of(tl.program_id(0), n, heads, GROUP, False, BM)
    bh = (b * heads + h).to(tl.int64)
    width, width_v = tl.arange(0, BD), tl.arange(0, BDV)
    ROW, COLUMN, HEAD = NUMBERS

    queries = head_of(Q, b, h)
    q = load_vectors(queries, i, width[None, :], n, W, W < BD, True)
    row = load_statistics(ROW, bh * n + i, ROWS + FACTORS)
    factor_q = row[ROWS] if FACTORS else None
    grad = load_vectors(head_of(GRAD, b, h), i, width_v[None, :], n, DV, DV < BDV, True)
    out = load_vectors((OUT + bh * n * DV, DV), i, width_v[None, :], n, DV, DV < BDV, True)
    delta = tl.sum(grad.to(tl.float32) * out, 1)[:, None]
    lse = tl.load(LSE + bh * n + i) * (LOG2E if FUSED else 1.0)
    record = RECORD + (bh * n + i) * (ROWS + FACTORS + (2 if FUSED else 3)) + ROWS + FACTORS
    tl.store(record, lse, mask=inside)
    share = None if FUSED else tl.load(LSE + row_step.to(tl.int64) + bh * n + i)
    if share is not None:
        tl.store(record + 2, share, mask=inside)
    head = load_parameters(HEAD, h, heads, HEADS)
    keys, values = head_of(K, b, kv), head_of(V, b, kv)
    column_start = COLUMN + (b * column_heads + h // (heads // column_heads)).to(tl.int64) * m * (
        COLUMNS + FACTORS
    )

    d_q = tl.zeros([BM, BD], tl.float32)
    d_rows, d_heads, means, row_means = (
        zeros(BM, D_ROWS),
        zeros(BM, D_HEADS),
        zeros(BM, D_HEADS),
        zeros(BM, D_ROWS),
    )
    residue = tl.zeros([BM], tl.float32)
    closest = tl.full([BM], float("inf"), tl.float32)
    low, high, clean = reach(first + offset, last + offset, m, window, CAUSAL, WINDOWED, BN)
    for EDGE in tl.static_range(2):
        for start in range(low if EDGE == 0 else clean, clean if EDGE == 0 else high, BN):
            line = start + tl.arange(0, BN)[None, :]
            j = line if EDGE == 0 else tl.minimum(line, m - 1)
            k = load_vectors(keys, line, width[:, None], m, D, D < BD, EDGE == 0)
            v = load_vectors(values, line, width_v[:, None], m, DV, DV < BDV, EDGE == 0)
            column = load_records(column_start, j, BN, COLUMNS + FACTORS, PACK)
            factor_k = column[COLUMNS] if FACTORS else None
            dot = multiplied(product(q, k), scale, factor_k, factor_q)
            s, square, margin = logits(
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
            p = weights(s, lse, FUSED)
            if share is not None:
                p *= share
            d_p = product(grad, v)
            if SEED is not None:
                d_p *= kept(SEED, bh, i, j, dropout) * (1 / (1 - dropout))
            d_s = p * (d_p - delta)
            by_dot, by_row, _, by_head = SLOPES(dot, square, row, column, head, softcap)
            if D_ROWS:
                d_rows = sums(d_rows, by_row, d_s, D_ROWS)
                row_means = sums(row_means, by_row, p, D_ROWS)
            if D_HEADS:
                d_heads = sums(d_heads, by_head, d_s, D_HEADS)
                means = sums(means, by_head, p, D_HEADS)
            residue += tl.sum(d_s, 1)
            if by_dot is not None:
                d_dot = multiplied(d_s, by_dot, factor_k, None)
                d_q += product(d_dot.to(k.dtype), tl.trans(k))

    if DOUBT is not None:
        closest = closest[:, None] - BOUND(SLACK, row, head)
    tell(DOUBT, closest, CAREFUL)
    own = first + tl.arange(0, BM)
    if SINKS is not None:  # a sink is a pair of its row, with a slope of 0
        sink = weights(tl.load(SINKS + h).to(tl.float32), lse, FUSED)
        if share is not None:
            sink *= share
        residue -= tl.sum(sink * delta, 1)
    tl.store(
        record + 1, delta + residue[:, None], mask=inside
    )  # so that nothing is left for the other kernel
    d_rows, d_heads = (
        less(d_rows, row_means, residue, D_ROWS),
        less(d_heads, means, residue, D_HEADS),
    )
    for index in tl.static_range(D_HEADS):
        tl.store(
            D_HEAD + index * row_step.to(tl.int64) + bh * n + own, d_heads[index], mask=own < n
        )
    store_vectors(
        D_Q,
        D_ROW,
        d_q,
        q,
        d_rows,
        scale,
        factor_q,
        first,
        n,
        bh * n,
        D_ROWS,
        D_FACTORS,
        W,
        D,
        BM,
        BD,
    )


@triton.jit
def queries_in_reach(
    first, last, n, offset, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BM: tl.constexpr
):
    """Of queries: the first and the end that can see some of the keys `first` to `last` by position, the first cut to
    a multiple of BM; and the start, such a multiple, of those that see all of them.
    """
    low, high, clean = 0, n, 0
    if CAUSAL:
        low = tl.maximum(first - offset, 0) // BM * BM
        clean = tl.cdiv(tl.maximum(last - offset, 0), BM) * BM
    if WINDOWED:
        if not CAUSAL:
            low = tl.maximum(first - window - offset + 1, 0) // BM * BM
        high = tl.maximum(tl.minimum(n, last + window - offset), 0)
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
    CAREFUL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    FACTORS: tl.constexpr,
    FUSED: tl.constexpr,
    D_COLUMNS: tl.constexpr,
    D_FACTORS: tl.constexpr,
    PACK: tl.constexpr,
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
    """D_K [B, H, M, D], D_V [B, H, M, DV], D_COLUMN [B, H, M, D_COLUMNS + D_FACTORS]: for shared keys one for each
    query head, to be summed. RECORD is what the other kernel left. Tiles lie with keys down and queries across, as the
    products that follow need them.
    """
    if nothing_to_do(DOUBT, CAREFUL):
        return
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
    keys = head_of(K, b, kv)
    k = load_vectors(keys, j, width[None, :], m, W, W < BD, True)
    v = load_vectors(head_of(V, b, kv), j, width_v[None, :], m, DV, DV < BDV, True)
    head = load_parameters(HEAD, h, heads, HEADS)
    column_line = (b * column_heads + h // (heads // column_heads)).to(tl.int64) * m
    column = load_statistics(COLUMN, column_line + j, COLUMNS + FACTORS)
    factor_k = column[COLUMNS] if FACTORS else None
    queries, grads = head_of(Q, b, h), head_of(GRAD, b, h)

    d_k, d_v = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BDV], tl.float32)
    d_columns = zeros(BN, D_COLUMNS)
    closest = tl.full([BN], float("inf"), tl.float32)
    first, last = block * BN, tl.minimum(block * BN + BN, m) - 1
    low, high, clean = queries_in_reach(first, last, n, offset, window, CAUSAL, WINDOWED, BM)
    for EDGE in tl.static_range(2):
        if EDGE == 0 or CAUSAL or WINDOWED:
            for start in range(clean if EDGE == 0 else low, high if EDGE == 0 else clean, BM):
                line = start + tl.arange(0, BM)[None, :]
                there, i = line < n, tl.minimum(line, n - 1)
                q = load_vectors(queries, line, width[:, None], n, D, D < BD, False)
                grad = load_vectors(grads, line, width_v[:, None], n, DV, DV < BDV, False)
                records = RECORD + bh * n * (ROWS + FACTORS + (2 if FUSED else 3))
                row = load_records(records, i, BM, ROWS + FACTORS + (2 if FUSED else 3), PACK)
                factor_q = row[ROWS] if FACTORS else None
                lse, delta = (
                    tl.where(there, row[ROWS + FACTORS], float("inf")),
                    row[ROWS + FACTORS + 1],
                )
                dot = multiplied(product(k, q), scale, factor_q, factor_k)
                s, square, margin = logits(
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
                    inside & there,
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
                    # Queries lie across here, so their bounds are taken off pair by pair.
                    closest = tl.minimum(closest, tl.min(margin - BOUND(SLACK, row, head), 1))
                p = weights(s, lse, FUSED)
                if not FUSED:
                    p *= row[ROWS + FACTORS + 2]
                d_p, dropped = product(v, grad), p
                if SEED is not None:
                    factor = kept(SEED, bh, i, j, dropout) * (1 / (1 - dropout))
                    d_p, dropped = d_p * factor, p * factor
                d_v += product(dropped.to(v.dtype), tl.trans(grad))
                d_s = p * (d_p - delta)
                by_dot, _, by_column, _ = SLOPES(dot, square, row, column, head, softcap)
                d_columns = sums(d_columns, by_column, d_s, D_COLUMNS)
                if by_dot is not None:
                    d_dot = multiplied(d_s, by_dot, factor_q, None)
                    d_k += product(d_dot.to(q.dtype), tl.trans(q))

    tell(DOUBT, closest[:, None], CAREFUL)
    store_vectors(
        D_K,
        D_COLUMN,
        d_k,
        k,
        d_columns,
        scale,
        factor_k,
        block * BN,
        m,
        bh * m,
        D_COLUMNS,
        D_FACTORS,
        W,
        D,
        BN,
        BD,
    )
    store_vectors(
        D_V, D_COLUMN, d_v, v, (), None, None, block * BN, m, bh * m, 0, 0, DV, DV, BN, BDV
    )
