"""The forward kernel: attention by an online softmax over tiles of keys.

Here you learn how programs share rows and keys, and how one program goes through its tiles.
"""

# These functions are in Triton's language. Python's types do not cover its growing tuples.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import LOG2E
from .tile import (
    append_numbers,
    can_skip_program,
    choose_anchor,
    compute_logits,
    compute_split,
    compute_weights,
    draw_dropout,
    load_parameters,
    load_positions,
    load_records,
    load_statistics,
    load_vectors,
    locate_head,
    multiply_by,
    multiply_tiles,
    store_doubt,
)

# How programs share the work:
#   prefill       One program computes BM query rows of one head, and walks over all their keys.
#   decoding      PACKED: few queries meet many keys. One program computes all rows of all query
#                 heads that share a key head, so each key is read once. PARTS programs split the
#                 keys, and `combine_parts` adds their results in a fixed order, so results do not
#                 change from run to run.
#
# Tiles of a program (BM queries, BN keys; BD and BDV are D and DV rounded up to a power of two):
#   q [BM, BD], k [BD, BN], v [BN, BDV]   in the dtype of the caller's tensors
#   s, p          [BM, BN]                logits in nats and their weights, float32; see tile.py
#   top, weight   [BM]                    largest logit so far (in bits with FUSED, else in nats),
#                                         and sum of weights
#   total         [BM, BDV]               sum of weights times values, float32

#: Numbers that change from call to call, such as lengths in decoding. Not specialized: one compiled
#: kernel serves all.
LENGTHS = ["n", "m", "row_step", "offset", "window"]


@triton.jit
def find_keys_in_reach(
    first, last, m, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BN: tl.constexpr
):
    """Return the range of keys that some queries can see by position.

    Args:
        first, last: Positions of the first and the last query among the keys.
        m: Number of keys.
        window, CAUSAL, WINDOWED: As for `is_in_reach` of tile.py.
        BN: Keys of a tile.

    Returns:
        low: First visible key, rounded down to a multiple of BN.
        high: End of the visible keys.
        clean: End of the tiles in which every query sees every key, a multiple of BN. They begin at
            `low`.
    """
    low, high, clean = 0, m, m
    if CAUSAL:
        # The last query sees most keys; the first one sees only keys that all queries see.
        high = tl.maximum(tl.minimum(m, last + 1), 0)
        clean = tl.maximum(tl.minimum(m, first + 1), 0)
    if WINDOWED:
        low = tl.maximum(first - window + 1, 0) // BN * BN
        high = tl.maximum(tl.minimum(high, last + window), 0)
        # The window hides keys at both ends, so every tile is masked.
        clean = low
    return low, high, clean // BN * BN


@triton.jit
def locate_rows(number, n, heads, GROUP: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr):
    """Return the rows that a program computes.

    Args:
        number: Number of the program, without the parts.
        n, heads: Queries of a sequence, and query heads.
        GROUP: Query heads that share a key head.
        PACKED: Whether the rows of a whole group of heads lie along the tile.
        BM: Rows of the tile.

    Returns:
        b: Batch element.
        kv: Key head.
        h: Query head; PACKED, one for each row, [BM, 1].
        i: Query of each row, [BM, 1].
        inside: Bool [BM, 1]; False for rows beyond the end, which repeat another query.
        first, last: First and last query of the program.
    """
    blocks = tl.cdiv(n * GROUP if PACKED else n, BM)
    # Backwards: causal rows with the most keys start first, so no long program ends last.
    block = blocks - 1 - number % blocks
    number = number // blocks
    line = block * BM + tl.arange(0, BM)[:, None]
    if PACKED:
        b, kv = number // (heads // GROUP), number % (heads // GROUP)
        h = kv * GROUP + tl.minimum(line // n, GROUP - 1)
        i = line % n
        inside = line < n * GROUP
        return b, kv, h, i, inside, 0, n - 1
    else:
        b, h = number // heads, number % heads
        kv = h // GROUP
        i = tl.minimum(line, n - 1)
        inside = line < n
        first = block * BM
        return b, kv, h, i, inside, first, tl.minimum(first + BM, n) - 1


@triton.jit
def take_part(low, high, clean, part, PARTS: tl.constexpr, BN: tl.constexpr):
    """Return the range of keys of one part, given the range of all parts."""
    # Parts are whole tiles, so that `clean` still lies between two tiles.
    share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BN), PARTS) * BN
    low = low + part * share
    high = tl.minimum(high, low + share)
    return low, high, tl.maximum(tl.minimum(clean, high // BN * BN), low)


@triton.jit
def online_softmax(s, top, weight, base_2, FUSED: tl.constexpr):
    """Add a tile of logits to the running softmax of its rows.

    Args:
        s: Logits in nats, [BM, BN].
        top: Largest logit so far, [BM].
        weight: Sum of the weights so far, relative to `top`, [BM].
        base_2: Factor from nats to the unit of `top`: LOG2E with FUSED, else 1.
        FUSED: See `compute_weights`.

    Returns:
        The new `top`, the new `weight`, the weights of the tile [BM, BN], and the factor [BM] of
        all earlier sums.
    """
    new = tl.maximum(top, tl.max(s, 1) * base_2)
    # A row that sees nothing yet has a maximum of -inf, and -inf - -inf is NaN.
    base = tl.where(new == float("-inf"), 0.0, new)
    p = compute_weights(s, base[:, None], FUSED)
    shrink = tl.exp2((top - base) * (LOG2E / base_2))
    return new, weight * shrink + tl.sum(p, 1), p, shrink


@triton.jit
def store_sums(LSE, place, row_step, top, weight, valid, WHOLE: tl.constexpr, FUSED: tl.constexpr):
    """Store the sums of rows that the backward pass needs, in nats.

    Args:
        LSE: Pointer to [2, B, H, N]. With FUSED the first half gets the log-sum-exp, and the second
            half stays as it is. Otherwise the halves get the largest logit and 1 over the sum of
            the weights.
        place: Index of each row in [B, H, N].
        row_step: Size of a half, B * H * N.
        top, weight: Largest logit and sum of the weights; see `online_softmax`.
        valid: Bool, the rows that exist.
        WHOLE: Whether the rows saw all their keys. For a part of the keys, only the largest logit
            is stored.
        FUSED: See `compute_weights`.
    """
    if WHOLE:
        if FUSED:
            top = top / LOG2E + tl.log(weight)
        else:
            # Two numbers: where a row sees only logits of -1e9 or less, as additive masks have
            # them, adding log(weight) to the maximum would round it away.
            share = tl.where(weight > 0, 1 / weight, 0.0)
            tl.store(LSE + row_step.to(tl.int64) + place, share, mask=valid)
        # +inf makes all weights of a row that sees nothing 0 in the backward pass.
        top = tl.where(weight > 0, top, float("inf"))
    tl.store(LSE + place, top, mask=valid)


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
    SPLIT_ROW: tl.constexpr,
    SPLIT_COLUMN: tl.constexpr,
    SPLIT: tl.constexpr,
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
    SPLIT_PACK: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute the output of each row, and the sums that the backward pass needs.

    Args:
        Q, K, V: (pointer, strides) of [B, H, N, D], [B, Hkv, M, D] and [B, Hkv, M, DV].
        NUMBERS: Pointers to ROW [B, H, N, ROWS + FACTORS], COLUMN [B, column_heads, M, COLUMNS +
            FACTORS] and HEAD [HEADS, H], float32: the statistics of queries and keys, and the
            parameters of heads.
        MASKS: (mask, bias), each (pointer or None, strides).
        SINKS: Pointer to one logit per head that takes weight but has no value, [H], or None.
        SEED: Pointer to the seed of dropout, or None.
        DOUBT, CAREFUL: See `can_skip_program`.
        OUT: Written, float32 [B, H, N, DV]; 0 for rows that see nothing. If PARTS > 1: [PARTS, B,
            H, N, DV], not yet divided by the sum of weights.
        LSE: Written, float32 [2, B, H, N]; see `store_sums`. If PARTS > 1: the largest logits,
            [PARTS, B, H, N].
        SUM: Written if PARTS > 1, float32 [PARTS, B, H, N]: sums of weights.
        row_step: B * H * N.
        scale: Factor of the dot products, or None.
        offset, window, softcap, dropout: As in `Options`.
        SCORE to SLACK, P: As for `compute_logits`.
        SPLIT_ROW, SPLIT_COLUMN: Functions that compute a line's numbers of a separable term; see
            `Emitted`. None if there is no such term, or if the kernel computes it pair by pair.
        SPLIT: Places of the position in ROW and COLUMN, and counts of a column's and of a row's
            numbers that the logits read.
        ROWS, COLUMNS, HEADS: Numbers of a row, of a column and of a head.
        FACTORS: 1 if ROW and COLUMN end in a factor of the vector, else 0.
        FUSED: See `compute_weights`.
        W: Number of components of D that the dot product uses.
        GROUP: Query heads that share a key head.
        CAUSAL, WINDOWED, TRUTH: As for `compute_logits`.
        PACKED, PARTS: As above, for decoding.
        SHARED: Whether query heads that share keys also share the statistics of keys.
        PACK, SPLIT_PACK: See `load_records` and `compute_split`.
    """
    if can_skip_program(DOUBT, CAREFUL):
        return

    # Load: the rows of this program, once.
    part = tl.program_id(0) % PARTS
    program = tl.program_id(0) // PARTS
    b, kv, h, i, inside, first, last = locate_rows(program, n, heads, GROUP, PACKED, BM)
    bh = (b * heads + h).to(tl.int64)
    width, width_v = tl.arange(0, BD), tl.arange(0, BDV)
    ROW, COLUMN, HEAD = NUMBERS
    queries = locate_head(Q, b, h)
    # Zeros in q beyond W remove those components of the keys from the products.
    q = load_vectors(queries, i, width[None, :], n, W, W < BD, True)
    row = load_statistics(ROW, bh * n + i, ROWS + FACTORS)
    factor_q = row[ROWS] if FACTORS else None
    head = load_parameters(HEAD, h, heads, HEADS)
    near, far = None, None
    if SPLIT_ROW is not None:
        position = row[SPLIT[0]]
        anchor = choose_anchor(position)
        own = SPLIT_ROW(position, anchor, head)
        row, near = append_numbers(row, own[0], ROWS), own[1]
        far = tl.full([BN, SPLIT_PACK], float("inf"), tl.float32)
    keys, values = locate_head(K, b, kv), locate_head(V, b, kv)
    # Statistics of keys have one head per key head, or one per query head.
    column_head = kv if SHARED else h // (heads // column_heads)
    column_start = COLUMN + (b * column_heads + column_head).to(tl.int64) * m * (COLUMNS + FACTORS)
    base_2 = LOG2E if FUSED else 1.0

    # Start of the online softmax.
    total = tl.zeros([BM, BDV], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    if SINKS is not None:
        # A sink is a logit without a value. One part counts it, or it would count PARTS times.
        if part == 0:
            top = tl.sum(tl.load(SINKS + h + i * 0).to(tl.float32), 1) * base_2
            weight += 1.0

    # The smallest margin of each query's pairs: one instruction per pair keeps it.
    closest = tl.full([BM], float("inf"), tl.float32)
    low, high, clean = find_keys_in_reach(
        first + offset, last + offset, m, window, CAUSAL, WINDOWED, BN
    )
    if PARTS > 1:
        low, high, clean = take_part(low, high, clean, part, PARTS, BN)
    # Two copies of the loop: tiles in which every pair is visible, then tiles to mask (EDGE).
    for EDGE in tl.static_range(2):
        if SPLIT_COLUMN is not None:
            # Loaded a tile ahead, by hand: see `compute_split`.
            positions = column_start + SPLIT[1]
            begin = low if EDGE == 0 else clean
            ahead = load_positions(positions, begin, m, BN, COLUMNS + FACTORS, SPLIT_PACK)
        for start in range(low if EDGE == 0 else clean, clean if EDGE == 0 else high, BN):
            # Load: keys and their statistics.
            line = start + tl.arange(0, BN)[None, :]
            j = line if EDGE == 0 else tl.minimum(line, m - 1)
            k = load_vectors(keys, line, width[:, None], m, D, D < BD, EDGE == 0)
            # PACKED rows of several heads read different statistics, unless these are shared.
            if SHARED or not PACKED:
                column = load_records(column_start, j, BN, COLUMNS + FACTORS, PACK)
            else:
                column = load_statistics(column_start, j, COLUMNS + FACTORS)
            factor_k = column[COLUMNS] if FACTORS else None
            if SPLIT_COLUMN is not None:
                here = ahead
                ahead = load_positions(positions, start + BN, m, BN, COLUMNS + FACTORS, SPLIT_PACK)
                numbers, margins = compute_split(
                    here, anchor, head, SPLIT_COLUMN, BN, SPLIT[2], SPLIT_PACK
                )
                column = append_numbers(column, numbers, COLUMNS)
                far = tl.minimum(far, margins)

            # Scores and mask.
            dot = multiply_by(multiply_tiles(q, k), scale, factor_k, factor_q)
            s, _, margin = compute_logits(
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

            # Online softmax.
            top, weight, p, shrink = online_softmax(s, top, weight, base_2, FUSED)
            # Dropout acts after the softmax: the sum of weights above includes dropped pairs.
            if SEED is not None:
                p *= draw_dropout(SEED, bh, i, j, dropout)

            # Accumulate.
            v = load_vectors(values, tl.trans(line), width_v[None, :], m, DV, DV < BDV, EDGE == 0)
            total = total * shrink[:, None] + multiply_tiles(p.to(v.dtype), v)

    # Store.
    bounded = None
    if INEXACT is not None:
        bounded = closest[:, None] - BOUND(SLACK, row, head)
    store_doubt(DOUBT, bounded, near, far, CAREFUL)
    if SEED is not None:
        total *= 1 / (1 - dropout)
    valid = tl.sum(inside.to(tl.int32), 1) > 0
    place = tl.sum(bh * n + i, 1)
    if PARTS > 1:
        place += part * row_step.to(tl.int64)
        tl.store(SUM + place, weight, mask=valid)
    else:
        total *= tl.where(weight > 0, 1 / weight, 0.0)[:, None]
    store_sums(LSE, place, row_step, top, weight, valid, PARTS == 1, FUSED)
    out = OUT + place[:, None] * DV + width_v[None, :]
    tl.store(out, total, mask=inside & (width_v[None, :] < DV))


@triton.jit(do_not_specialize=["row_step"])
def combine_parts(
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
    """Combine the parts of one row into its output and its sums.

    Args:
        OUT, LSE: Written, as in `attention_forward` with one part.
        SUM, PART_OUT, PART_TOP: SUM, OUT and LSE of `attention_forward` with several parts.
        row_step: Number of rows, B * H * N.
        BP: PARTS, rounded up to a power of two.
    """
    # Load: the parts lie along the first axis, in a fixed order.
    place = tl.program_id(0).to(tl.int64)
    parts, width = tl.arange(0, BP).to(tl.int64), tl.arange(0, BDV)
    tops = tl.load(PART_TOP + parts * row_step + place, mask=parts < PARTS, other=float("-inf"))
    sums = tl.load(SUM + parts * row_step + place, mask=parts < PARTS, other=0.0)

    # Online softmax over parts: each sum is relative to the maximum of its part.
    base_2 = LOG2E if FUSED else 1.0
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp2((tops - base) * (LOG2E / base_2))
    weight = tl.sum(sums * shrink, 0)

    # Accumulate and store.
    pointers = PART_OUT + (parts * row_step + place)[:, None] * DV + width[None, :]
    valid = (parts < PARTS)[:, None] & (width < DV)[None, :]
    total = tl.sum(tl.load(pointers, mask=valid, other=0.0) * shrink[:, None], 0)
    tl.store(
        OUT + place * DV + width, total * tl.where(weight > 0, 1 / weight, 0.0), mask=width < DV
    )
    store_sums(LSE, place, row_step, base, weight, place < row_step, True, FUSED)
