"""The forward kernel: online softmax over tiles of keys, and the sum of the parts where keys are split.

One program serves a block of query rows of one head. PACKED, for few queries against many keys (decoding), it serves
all rows of all heads that share a key head, so that keys are read once, and PARTS programs share the keys; their
partial results are added up in a fixed order by `combine`.
"""

# What follows is Triton's language: its growing tuples have no Python types.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import LOG2E
from .tile import (
    head_of,
    kept,
    load_parameters,
    load_records,
    load_statistics,
    load_vectors,
    logits,
    multiplied,
    nothing_to_do,
    product,
    tell,
    weights,
)

#: Numbers that change from call to call, as lengths do in decoding: one compiled kernel serves them all.
LENGTHS = ["n", "m", "row_step", "offset", "window"]


@triton.jit
def reach(first, last, m, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BN: tl.constexpr):
    """Of keys: the first and the end that queries `first` to `last` (counted among the keys) can see by position,
    the first cut to a multiple of BN; and the end, such a multiple, of those that all of them see.
    """
    low, high, clean = 0, m, m
    if CAUSAL:
        high = tl.maximum(tl.minimum(m, last + 1), 0)
        clean = tl.maximum(tl.minimum(m, first + 1), 0)
    if WINDOWED:
        low = tl.maximum(first - window + 1, 0) // BN * BN
        high = tl.maximum(tl.minimum(high, last + window), 0)
        clean = low
    return low, high, clean // BN * BN


@triton.jit
def rows_of(number, n, heads, GROUP: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr):
    """What a program serves: its batch element, key head, heads and queries, which of these are there for the first
    time, and the first and last query. PACKED, the heads and queries of a group lie down the tile, [BM, 1] each.
    """
    blocks = tl.cdiv(n * GROUP if PACKED else n, BM)
    block = blocks - 1 - number % blocks  # causal rows with most keys to see come first
    number = number // blocks
    line = block * BM + tl.arange(0, BM)[:, None]
    if PACKED:
        b, kv = number // (heads // GROUP), number % (heads // GROUP)
        return (
            b,
            kv,
            kv * GROUP + tl.minimum(line // n, GROUP - 1),
            line % n,
            line < n * GROUP,
            0,
            n - 1,
        )
    else:
        b, h = number // heads, number % heads
        return (
            b,
            h // GROUP,
            h,
            tl.minimum(line, n - 1),
            line < n,
            block * BM,
            tl.minimum(block * BM + BM, n) - 1,
        )


@triton.jit
def part_of(low, high, clean, part, PARTS: tl.constexpr, BN: tl.constexpr):
    """The share of one program in the keys that `reach` gives."""
    share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BN), PARTS) * BN
    low = low + part * share
    high = tl.minimum(high, low + share)
    return low, high, tl.maximum(tl.minimum(clean, high // BN * BN), low)


@triton.jit
def online_softmax(s, top, weight, base_2, FUSED: tl.constexpr):
    """From the logits of a tile, the maximum so far [BM] and the sum of weights: these two with the tile, the tile's
    weights, and what those that were summed before are multiplied with.
    """
    new = tl.maximum(top, tl.max(s, 1) * base_2)
    base = tl.where(new == float("-inf"), 0.0, new)
    p = weights(s, base[:, None], FUSED)
    shrink = tl.exp2((top - base) * (LOG2E / base_2))
    return new, weight * shrink + tl.sum(p, 1), p, shrink


@triton.jit
def store_sums(LSE, place, row_step, top, weight, there, WHOLE: tl.constexpr, FUSED: tl.constexpr):
    """LSE [2, B, H, N] of rows, from the maximum and the sum of weights: with FUSED the log-sum-exp and nothing, else
    the maximum and what weights are multiplied with. A log would be lost to rounding where all that a row sees is -1e9
    or less, as additive masks have it. Without WHOLE, of parts, the maximum alone.
    """
    if WHOLE:
        if FUSED:
            top = top / LOG2E + tl.log(weight)
        else:
            share = tl.where(weight > 0, 1 / weight, 0.0)
            tl.store(LSE + row_step.to(tl.int64) + place, share, mask=there)
        top = tl.where(weight > 0, top, float("inf"))
    tl.store(LSE + place, top, mask=there)


@triton.jit(do_not_specialize=LENGTHS)
def attention_forward(
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
    SUM,
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
    DISTANCE: tl.constexpr,
    INEXACT: tl.constexpr,
    MARGIN: tl.constexpr,
    BOUND: tl.constexpr,
    POINTS: tl.constexpr,
    SLACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    FACTORS: tl.constexpr,
    FUSED: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    DV: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    TRUTH: tl.constexpr,
    CAREFUL: tl.constexpr,
    PACKED: tl.constexpr,
    SHARED: tl.constexpr,
    PARTS: tl.constexpr,
    PACK: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """OUT [B, H, N, DV] and LSE [2, B, H, N], float32: what `store_sums` says, rows that see nothing 0 and +inf.

    With PARTS > 1 they are [PARTS, B, H, N, DV], not yet divided by SUM [PARTS, B, H, N], and LSE is the maximum.
    Q, K and V are (pointer, strides). NUMBERS are ROW [B, H, N, ROWS + FACTORS] and COLUMN [B, column_heads, M,
    COLUMNS + FACTORS], which end in what vectors are multiplied with, where FACTORS is 1, and HEAD [HEADS, H]. SHARED:
    heads that share a key share its statistics. With FUSED, maxima are of logits to base 2. DOUBT, CAREFUL: see
    `nothing_to_do`.
    """
    if nothing_to_do(DOUBT, CAREFUL):
        return
    part = tl.program_id(0) % PARTS
    b, kv, h, i, inside, first, last = rows_of(
        tl.program_id(0) // PARTS, n, heads, GROUP, PACKED, BM
    )
    bh = (b * heads + h).to(tl.int64)
    width, width_v = tl.arange(0, BD), tl.arange(0, BDV)
    ROW, COLUMN, HEAD = NUMBERS
    queries = head_of(Q, b, h)
    q = load_vectors(
        queries, i, width[None, :], n, W, W < BD, True
    )  # zeros keep out what is beyond W
    row = load_statistics(ROW, bh * n + i, ROWS + FACTORS)
    factor_q = row[ROWS] if FACTORS else None
    head = load_parameters(HEAD, h, heads, HEADS)
    keys, values = head_of(K, b, kv), head_of(V, b, kv)
    # a statistic of keys has as many heads as keys or as queries
    column_head = kv if SHARED else h // (heads // column_heads)
    column_start = COLUMN + (b * column_heads + column_head).to(tl.int64) * m * (COLUMNS + FACTORS)
    base_2 = LOG2E if FUSED else 1.0

    total = tl.zeros([BM, BDV], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    if SINKS is not None:
        if part == 0:
            top = tl.sum(tl.load(SINKS + h + i * 0).to(tl.float32), 1) * base_2
            weight += 1.0

    closest = tl.full([BM], float("inf"), tl.float32)
    low, high, clean = reach(first + offset, last + offset, m, window, CAUSAL, WINDOWED, BN)
    if PARTS > 1:
        low, high, clean = part_of(low, high, clean, part, PARTS, BN)
    for EDGE in tl.static_range(2):  # first the tiles of which everything is seen, then the others
        for start in range(low if EDGE == 0 else clean, clean if EDGE == 0 else high, BN):
            line = start + tl.arange(0, BN)[None, :]
            j = line if EDGE == 0 else tl.minimum(line, m - 1)
            k = load_vectors(keys, line, width[:, None], m, D, D < BD, EDGE == 0)
            if SHARED or not PACKED:
                column = load_records(column_start, j, BN, COLUMNS + FACTORS, PACK)
            else:
                column = load_statistics(column_start, j, COLUMNS + FACTORS)
            factor_k = column[COLUMNS] if FACTORS else None
            dot = multiplied(product(q, k), scale, factor_k, factor_q)
            s, _, margin = logits(
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
            top, weight, p, shrink = online_softmax(s, top, weight, base_2, FUSED)
            if SEED is not None:
                p *= kept(SEED, bh, i, j, dropout)
            v = load_vectors(values, tl.trans(line), width_v[None, :], m, DV, DV < BDV, EDGE == 0)
            total = total * shrink[:, None] + product(p.to(v.dtype), v)

    if DOUBT is not None:
        closest = closest[:, None] - BOUND(SLACK, row, head)
    tell(DOUBT, closest, CAREFUL)
    if SEED is not None:
        total *= 1 / (1 - dropout)
    there = tl.sum(inside.to(tl.int32), 1) > 0
    place = tl.sum(bh * n + i, 1)
    if PARTS > 1:
        place += part * row_step.to(tl.int64)
        tl.store(SUM + place, weight, mask=there)
    else:
        total *= tl.where(weight > 0, 1 / weight, 0.0)[:, None]
    store_sums(LSE, place, row_step, top, weight, there, PARTS == 1, FUSED)
    out = OUT + place[:, None] * DV + width_v[None, :]
    tl.store(out, total, mask=inside & (width_v[None, :] < DV))


@triton.jit(do_not_specialize=["row_step"])
def combine(
    OUT,
    LSE,
    SUM,
    PART_OUT,
    PART_TOP,
    row_step,
    PARTS: tl.constexpr,
    FUSED: tl.constexpr,
    DV: tl.constexpr,
    BP: tl.constexpr,
    BDV: tl.constexpr,
):
    """OUT and LSE of one row from its parts; `row_step` is how many rows there are."""
    place = tl.program_id(0).to(tl.int64)
    parts, width = tl.arange(0, BP).to(tl.int64), tl.arange(0, BDV)
    tops = tl.load(PART_TOP + parts * row_step + place, mask=parts < PARTS, other=float("-inf"))
    sums = tl.load(SUM + parts * row_step + place, mask=parts < PARTS, other=0.0)
    base_2 = LOG2E if FUSED else 1.0
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2((tops - base) * (LOG2E / base_2))
    weight = tl.sum(sums * shrink, 0)
    pointers = PART_OUT + (parts * row_step + place)[:, None] * DV + width[None, :]
    there = (parts < PARTS)[:, None] & (width < DV)[None, :]
    total = tl.sum(tl.load(pointers, mask=there, other=0.0) * shrink[:, None], 0)
    tl.store(
        OUT + place * DV + width, total * tl.where(weight > 0, 1 / weight, 0.0), mask=width < DV
    )
    store_sums(LSE, place, row_step, base, weight, place < row_step, True, FUSED)
