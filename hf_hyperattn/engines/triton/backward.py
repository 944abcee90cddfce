"""The backward kernels: one for queries, one for keys and values. Each computes its tiles again from q, k and the
log-sum-exp and adds them up by itself, in a fixed order and without atomic operations, so that gradients are the same
from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import LENGTHS, reach
from .tile import (
    LOG2E,
    added,
    any_of,
    differences,
    in_reach,
    kept,
    load_parameters,
    load_records,
    load_statistics,
    load_vectors,
    multiplied,
    product,
    sums,
    weights,
    zeros,
)


@triton.jit(do_not_specialize=LENGTHS)
def attention_backward_query(
    Q, K, V, ROW, COLUMN, HEAD, MASK, BIAS, SEED, POINTS_Q, POINTS_K, OUT, LSE, GRAD,
    RECORD, D_Q, D_ROW, D_HEAD,
    q_strides, k_strides, v_strides, grad_strides, mask_strides, bias_strides,
    heads, n, m, column_heads, row_step, offset, window, scale, softcap, dropout,
    SCORE: tl.constexpr, PULL: tl.constexpr, INEXACT: tl.constexpr, NOISE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, FACTORS: tl.constexpr, FUSED: tl.constexpr,
    D_ROWS: tl.constexpr, D_HEADS: tl.constexpr, D_FACTORS: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, DV: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAP: tl.constexpr, TRUTH: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """D_Q [B, H, N, D], D_ROW [B, H, N, D_ROWS + D_FACTORS], D_HEAD [D_HEADS, B, H, N] (by rows, to be summed);
    float32, D_Q as Q. For the other kernel the last two numbers of RECORD [B, H, N, ROWS + FACTORS + 2]: LSE, with
    FUSED to base 2, and the sums of GRAD · OUT. ROW and COLUMN are as in the forward kernel.
    """
    blocks = tl.cdiv(n, BM)
    number = tl.program_id(0)
    block = blocks - 1 - number % blocks
    number = number // blocks
    b, h = number // heads, number % heads
    kv = h // GROUP
    bh = (b * heads + h).to(tl.int64)
    i = block * BM + tl.arange(0, BM)[:, None]
    inside = i < n
    width, width_v = tl.arange(0, BD), tl.arange(0, BDV)

    q_start = Q + b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1]
    q = load_vectors(q_start, i, width[None, :], q_strides[2], n, W, W < BD, False)
    row = load_statistics(ROW + (bh * n + i) * (ROWS + FACTORS), inside, ROWS + FACTORS)
    factor_q = row[ROWS] if FACTORS else None
    grad_start = GRAD + b.to(tl.int64) * grad_strides[0] + h.to(tl.int64) * grad_strides[1]
    grad = load_vectors(grad_start, i, width_v[None, :], grad_strides[2], n, DV, DV < BDV, False)
    out = load_vectors(OUT + bh * n * DV, i, width_v[None, :], DV, n, DV, DV < BDV, False)
    delta = tl.sum(grad.to(tl.float32) * out, 1)[:, None]
    lse = tl.load(LSE + bh * n + i, mask=inside, other=float("inf")) * (LOG2E if FUSED else 1.0)
    record = RECORD + (bh * n + i) * (ROWS + FACTORS + 2) + ROWS + FACTORS
    tl.store(record, lse, mask=inside)
    tl.store(record + 1, delta, mask=inside)
    head = load_parameters(HEAD, h, heads, HEADS)
    k_start = K + b.to(tl.int64) * k_strides[0] + kv.to(tl.int64) * k_strides[1]
    v_start = V + b.to(tl.int64) * v_strides[0] + kv.to(tl.int64) * v_strides[1]
    key_line = (b * (heads // GROUP) + kv).to(tl.int64) * m
    column_start = COLUMN + (b * column_heads + h // (heads // column_heads)).to(tl.int64) * m * (COLUMNS + FACTORS)

    d_q = tl.zeros([BM, BD], tl.float32)
    d_rows, d_heads = zeros(BM, D_ROWS), zeros(BM, D_HEADS)
    first, last = block * BM + offset, tl.minimum(block * BM + BM, n) - 1 + offset
    low, high, clean = reach(first, last, m, window, CAUSAL, WINDOWED, BN)
    for EDGE in tl.static_range(2):
        for start in range(low if EDGE == 0 else clean, clean if EDGE == 0 else high, BN):
            j = start + tl.arange(0, BN)[None, :]
            k = load_vectors(k_start, j, width[:, None], k_strides[2], m, D, D < BD, EDGE == 0)
            v = load_vectors(v_start, j, width_v[:, None], v_strides[2], m, DV, DV < BDV, EDGE == 0)
            column = load_records(column_start, start, m, EDGE == 0, BN, COLUMNS + FACTORS, PACK)
            factor_k = column[COLUMNS] if FACTORS else None
            dot = multiplied(product(q, k), scale, factor_k, factor_q)
            gap, near = dot, False
            if INEXACT is not None:
                doubtful = INEXACT(dot, NOISE, row, column, head) & inside & (j < m)
                near = any_of(doubtful)
                if near:
                    pq, pk = POINTS_Q + bh * n * P, POINTS_K + key_line * P
                    gap = differences(pq, pk, i, j, n, m, dot, P)
            s = SCORE(dot, gap, near, NOISE, row, column, head, softcap, CAP)
            if BIAS is not None:
                s = added(s, BIAS, bias_strides, b, h, i, j, inside & (j < m), False)
            if MASK is not None:
                s = added(s, MASK, mask_strides, b, h, i, j, inside & (j < m), TRUTH)
            if EDGE == 1:
                s = tl.where((j < m) & in_reach(i + offset, j, window, CAUSAL, WINDOWED), s, float("-inf"))
            p = weights(s, lse, FUSED)
            d_p = product(grad, v)
            if SEED is not None:
                d_p *= kept(tl.load(SEED), bh.to(tl.int32), i, j, dropout) * (1 / (1 - dropout))
            d_s = p * (d_p - delta)
            d_dot, by_row, _, by_head = PULL(d_s, dot, gap, near, NOISE, row, column, head, softcap, CAP)
            d_rows, d_heads = sums(d_rows, by_row, D_ROWS), sums(d_heads, by_head, D_HEADS)
            if d_dot is not None:
                d_q += product(multiplied(d_dot, None, factor_k, None).to(k.dtype), tl.trans(k))

    place = bh * n + tl.arange(0, BM) + block * BM
    there = block * BM + tl.arange(0, BM) < n
    for index in tl.static_range(D_ROWS):
        tl.store(D_ROW + place * (D_ROWS + D_FACTORS) + index, d_rows[index], mask=there)
    for index in tl.static_range(D_HEADS):
        tl.store(D_HEAD + index * row_step.to(tl.int64) + place, d_heads[index], mask=there)
    d_q = multiplied(d_q, scale, None, None)
    if D_FACTORS:
        tl.store(D_ROW + place * (D_ROWS + 1) + D_ROWS, tl.sum(d_q * q, 1), mask=there)  # q has zeros beyond W
    d_q = tl.where(width[None, :] < W, multiplied(d_q, None, factor_q, None), 0.0)
    tl.store(D_Q + place[:, None] * D + width[None, :], d_q, mask=inside & (width[None, :] < D))


@triton.jit
def queries_in_reach(first, last, n, offset, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BM: tl.constexpr):
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
    Q, K, V, COLUMN, HEAD, MASK, BIAS, SEED, POINTS_Q, POINTS_K, GRAD, RECORD, D_K, D_V, D_COLUMN,
    q_strides, k_strides, v_strides, grad_strides, mask_strides, bias_strides,
    heads, n, m, column_heads, offset, window, scale, softcap, dropout,
    SCORE: tl.constexpr, PULL: tl.constexpr, INEXACT: tl.constexpr, NOISE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, FACTORS: tl.constexpr, FUSED: tl.constexpr,
    D_COLUMNS: tl.constexpr, D_FACTORS: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, DV: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAP: tl.constexpr, TRUTH: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """D_K [B, H, M, D], D_V [B, H, M, DV], D_COLUMN [B, H, M, D_COLUMNS + D_FACTORS]: for shared keys one for each
    query head, to be summed. RECORD is what the other kernel left. Tiles lie with keys down and queries across, as the
    products that follow need them.
    """
    blocks = tl.cdiv(m, BN)
    number = tl.program_id(0)
    block = number % blocks
    number = number // blocks
    b, h = number // heads, number % heads
    kv = h // GROUP
    bh = (b * heads + h).to(tl.int64)
    key_line = (b * (heads // GROUP) + kv).to(tl.int64) * m
    j = block * BN + tl.arange(0, BN)[:, None]
    inside = j < m
    width, width_v = tl.arange(0, BD), tl.arange(0, BDV)
    k_start = K + b.to(tl.int64) * k_strides[0] + kv.to(tl.int64) * k_strides[1]
    v_start = V + b.to(tl.int64) * v_strides[0] + kv.to(tl.int64) * v_strides[1]
    k = load_vectors(k_start, j, width[None, :], k_strides[2], m, W, W < BD, False)
    v = load_vectors(v_start, j, width_v[None, :], v_strides[2], m, DV, DV < BDV, False)
    head = load_parameters(HEAD, h, heads, HEADS)
    column_line = (b * column_heads + h // (heads // column_heads)).to(tl.int64) * m
    column = load_statistics(COLUMN + (column_line + j) * (COLUMNS + FACTORS), inside, COLUMNS + FACTORS)
    factor_k = column[COLUMNS] if FACTORS else None
    q_start = Q + b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1]
    grad_start = GRAD + b.to(tl.int64) * grad_strides[0] + h.to(tl.int64) * grad_strides[1]

    d_k, d_v = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BDV], tl.float32)
    d_columns = zeros(BN, D_COLUMNS)
    first, last = block * BN, tl.minimum(block * BN + BN, m) - 1
    low, high, clean = queries_in_reach(first, last, n, offset, window, CAUSAL, WINDOWED, BM)
    for EDGE in tl.static_range(2):
        if EDGE == 0 or CAUSAL or WINDOWED:
            for start in range(clean if EDGE == 0 else low, high if EDGE == 0 else clean, BM):
                i = start + tl.arange(0, BM)[None, :]
                q = load_vectors(q_start, i, width[:, None], q_strides[2], n, D, D < BD, False)
                grad = load_vectors(grad_start, i, width_v[:, None], grad_strides[2], n, DV, DV < BDV, False)
                row = load_records(
                    RECORD + bh * n * (ROWS + FACTORS + 2), start, n, False, BM, ROWS + FACTORS + 2, PACK
                )
                factor_q = row[ROWS] if FACTORS else None
                lse, delta = tl.where(i < n, row[ROWS + FACTORS], float("inf")), row[ROWS + FACTORS + 1]
                dot = multiplied(product(k, q), scale, factor_q, factor_k)
                gap, near = dot, False
                if INEXACT is not None:
                    doubtful = INEXACT(dot, NOISE, row, column, head) & inside & (i < n)
                    near = any_of(doubtful)
                    if near:
                        pq, pk = POINTS_Q + bh * n * P, POINTS_K + key_line * P
                        gap = differences(pq, pk, i, j, n, m, dot, P)
                s = SCORE(dot, gap, near, NOISE, row, column, head, softcap, CAP)
                if BIAS is not None:
                    s = added(s, BIAS, bias_strides, b, h, i, j, inside & (i < n), False)
                if MASK is not None:
                    s = added(s, MASK, mask_strides, b, h, i, j, inside & (i < n), TRUTH)
                if EDGE == 1:
                    s = tl.where(in_reach(i + offset, j, window, CAUSAL, WINDOWED), s, float("-inf"))
                p = weights(s, lse, FUSED)
                d_p = product(v, grad)
                if SEED is not None:
                    factor = kept(tl.load(SEED), bh.to(tl.int32), i, j, dropout) * (1 / (1 - dropout))
                    d_p *= factor
                    d_v += product((p * factor).to(v.dtype), tl.trans(grad))
                else:
                    d_v += product(p.to(v.dtype), tl.trans(grad))
                d_s = p * (d_p - delta)
                d_dot, _, by_column, _ = PULL(d_s, dot, gap, near, NOISE, row, column, head, softcap, CAP)
                d_columns = sums(d_columns, by_column, D_COLUMNS)
                if d_dot is not None:
                    d_k += product(multiplied(d_dot, None, factor_q, None).to(q.dtype), tl.trans(q))

    line = bh * m
    place = line + block * BN + tl.arange(0, BN)
    there = block * BN + tl.arange(0, BN) < m
    for index in tl.static_range(D_COLUMNS):
        tl.store(D_COLUMN + place * (D_COLUMNS + D_FACTORS) + index, d_columns[index], mask=there)
    d_k = multiplied(d_k, scale, None, None)
    if D_FACTORS:
        tl.store(D_COLUMN + place * (D_COLUMNS + 1) + D_COLUMNS, tl.sum(d_k * k, 1), mask=there)  # k: zeros beyond W
    d_k = tl.where(width[None, :] < W, multiplied(d_k, None, factor_k, None), 0.0)
    tl.store(D_K + (line + j) * D + width[None, :], d_k, mask=inside & (width[None, :] < D))
    tl.store(D_V + (line + j) * DV + width_v[None, :], d_v, mask=inside & (width_v[None, :] < DV))
