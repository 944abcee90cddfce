"""Kernels for attention to selected keys: the first, the nearest and the chosen ones.

Here you learn how a program finds the keys of its queries. `tables.py` makes the tables that the
kernels read, `selected.py` launches them.
"""

# These functions are in Triton's language. Python has no types for its loops and tuples.
# mypy: disable-error-code="assignment"
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .arithmetic import LOG2E, tanh
from .forward import store_sums
from .tile import load_vectors, locate_head, multiply_tiles

# A *position* counts from the first real key of a text; an *index* counts padding, too. A *block* is
# BM queries at neighbouring positions, and begins at a multiple of BM. A *tile* has BN keys, and a
# *slot* is one column of a tile. Near keys are all keys from the page on that is near the first
# query of the block. *Summaries* are rows before all texts, such as means of windows. Their
# positions are below 0, so they are seen only if they are listed, as pages of one key.
#
# The keys of a block come in three kinds of tiles, each with its own loop:
#
#   clean    Keys that all queries of the block see, without a mask: listed pages that all queries
#            have chosen, and the middle of the near keys.
#   chosen   Listed pages that some queries have chosen. Row r sees key j if bits[j] has bit[r].
#   edge     The first keys of the text, and both ends of the near keys. Row r sees key j if
#            (bits[j] has bit[r], or j >= lowest[r], or j < sinks) and j <= p[r].
#
# With a sliding window, rows of chosen and edge tiles see only keys j > p[r] - window. A tile of
# listed pages has BN // PAGE pages.
#
#   name     shape    content
#   p        [BM]     int32, position of the query of each row
#   j        [BN]     int32, position of the key of each slot. Slots without a key hold FAR in edge
#                     tiles, and `spare` in chosen tiles.
#   bits     [BN]     int32, one bit for each chunk of the block that has chosen the key's page
#   bit      [BM]     int32, the bit of the chunk of each row
#   lowest   [BM]     int32, the first position that is near each row

#: A position behind all queries: no query sees it.
FAR = tl.constexpr(2**30)
#: Numbers that change from call to call. Not specialized: one compiled kernel serves all.
LENGTHS = [
    "n",
    "m",
    "pages",
    "blocks",
    "first_block",
    "row_step",
    "offset",
    "window",
    "summaries",
]


@triton.jit
def find_near(p, near, chunk, step):
    """Return the first position that is near the queries at positions `p`.

    Args:
        p: Positions.
        near, chunk: As in `HeadRule`.
        step: Near keys begin at a multiple of this.
    """
    begin = tl.maximum(p // chunk * chunk - near + 1, 0)
    return begin // step * step


@triton.jit
def read_rule(RULES, member):
    """Return the query head of a member of the launch, and its numbers of `HeadRule`.

    Args:
        RULES: Pointer to int32 [members, 5]; see `tables.ListedRules`.
        member: Index of the member.

    Returns:
        head, near, sinks, chunk, step.
    """
    rule = RULES + member * 5
    return (
        tl.load(rule),
        tl.load(rule + 1),
        tl.load(rule + 2),
        tl.load(rule + 3),
        tl.load(rule + 4),
    )


@triton.jit
def locate_block(block, start, offset, n, BM: tl.constexpr):
    """Return the positions of the queries of a block.

    Args:
        block: Number of the block; block 0 has the first real query.
        start: First real key of the batch element.
        offset: Index of the key that belongs to query 0.
        n: Number of queries.

    Returns:
        base: First position of the block, a multiple of BM.
        first, last: Positions of the first and the last real query of the block.
    """
    real = tl.maximum(offset - start, 0)
    base = (real // BM + block) * BM
    return base, tl.maximum(base, real), tl.minimum(base + BM, n + offset - start) - 1


@triton.jit
def place_queries(base, first, last, rule, BM: tl.constexpr):
    """Return the queries of a block.

    Args:
        base, first, last: From `locate_block`.
        rule: From `read_rule`.

    Returns:
        p, lowest, bit: See the table at the top.
        inside: Bool [BM], the rows that hold a real query of the call.
    """
    _, near, _, chunk, step = rule
    p = base + tl.arange(0, BM)
    inside = (p >= first) & (p <= last)
    # Other rows repeat a query of the block, so that their numbers are real ones.
    p = tl.minimum(tl.maximum(p, first), last)
    place = p // chunk - base // chunk
    # Rules without pages have a chunk for each query, and no bits. Any bit does for them.
    return p, find_near(p, near, chunk, step), 1 << (place & 31), inside


@triton.jit
def load_bits(BITS, j, page, sinks, pages):
    """Return the bits of keys; all bits for the first `sinks` keys of the text.

    Args:
        BITS: Pointer to the bits of the block's pages, int32 [pages].
        j: Positions of the keys; FAR for slots without a key.
        page: Place of each key's page in the table.
        sinks: Number of first keys that all queries see.
        pages: Number of pages in the table.
    """
    bits = tl.load(BITS + page, mask=page < pages, other=0)
    return tl.where((j >= 0) & (j < sinks), -1, bits)


@triton.jit
def is_chosen(p, bit, j, bits, window, WINDOWED: tl.constexpr):
    """Return the visible pairs of a chosen tile, bool [BM, BN]; arguments as in the table above."""
    seen = (bits[None, :] & bit[:, None]) != 0
    if WINDOWED:
        seen = seen & (j[None, :] > p[:, None] - window)
    return seen


@triton.jit
def is_seen(p, lowest, bit, j, bits, window, WINDOWED: tl.constexpr):
    """Return the visible pairs of any tile, bool [BM, BN]; arguments as in the table above."""
    seen = ((bits[None, :] & bit[:, None]) != 0) | (j[None, :] >= lowest[:, None])
    seen = seen & (j[None, :] <= p[:, None])
    if WINDOWED:
        seen = seen & (j[None, :] > p[:, None] - window)
    return seen


@triton.jit
def find_near_range(first, last, rule, stop, window, WINDOWED: tl.constexpr, PAGE: tl.constexpr):
    """Return the range of keys that are near a block, and its clean part.

    Args:
        first, last: Positions of the first and the last query of the block.
        rule: From `read_rule`.
        stop: Number of real keys.
        window: Sliding window of the attention layer.

    Returns:
        begin, end: The range; `begin` is a multiple of PAGE unless the window cuts it.
        clean: First position that is near all queries of the block.
        clean_end: End of the positions that no causal mask hides from a query of the block: the
            position after the first query, at most `end`.
    """
    _, near, _, chunk, step = rule
    # Tables hold only complete pages. Queries in the padding behind a text see its incomplete last
    # page as a near one.
    begin = tl.minimum(find_near(first, near, chunk, step) // PAGE, stop // PAGE) * PAGE
    clean = find_near(last, near, chunk, step)
    if WINDOWED:
        begin = tl.maximum(begin, first - window + 1)
        clean = tl.maximum(clean, last - window + 1)
    end = tl.minimum(last + 1, stop)
    return begin, end, clean, tl.minimum(first + 1, end)


@triton.jit
def find_first_range(sinks, begin, stop, PAGE: tl.constexpr):
    """Return the end of the pages that hold the first keys.

    Args:
        sinks: Number of first keys that all queries see.
        begin: First near position. With a sliding window it may lie behind all keys.
        stop: Number of real keys.
    """
    return tl.minimum(tl.cdiv(sinks, PAGE) * PAGE, tl.minimum(begin, stop))


@triton.jit
def place_clean(LIST, entry, PAGE: tl.constexpr, BN: tl.constexpr):
    """Return the positions of the keys of a full tile of listed pages, int32 [BN].

    Args:
        LIST: Pointer to the list of the block; see `tables.Tables`.
        entry: Index of the first page of the tile.
    """
    slot = tl.arange(0, BN)
    return tl.load(LIST + 2 * (entry + slot // PAGE)) * PAGE + slot % PAGE


@triton.jit
def place_chosen(LIST, entry, entries, spare, PAGE: tl.constexpr, BN: tl.constexpr):
    """Return the positions and the bits of the keys of a tile of listed pages, int32 [BN].

    Args:
        LIST, entry: As in `place_clean`.
        entries: Number of listed pages.
        spare: Position of a real key, for slots without a key. They have no bits, so no row sees
            them, and loads need no mask.
    """
    # Pages and bits are loaded as one tile of two columns, for the reason in `tile.load_records`.
    slot = tl.arange(0, BN)[:, None]
    place = tl.arange(0, 2)[None, :]
    at = entry + slot // PAGE
    is_there = (at < entries) & (slot < BN // PAGE * PAGE)
    # Positions are computed before the split: until then, each thread has only one number.
    record = tl.load(LIST + 2 * at + place, mask=is_there, other=0)
    record = tl.where(place == 0, record * PAGE + slot % PAGE, record)
    record = tl.where(is_there | (place == 1), record, spare)
    return tl.split(record)


@triton.jit
def place_edge(t, first_tiles, first_end, begin, end, BN: tl.constexpr):
    """Return the positions of the keys of an edge tile, int32 [BN].

    Args:
        t: Number of the tile: the first keys of the text come first, then the near keys.
        first_tiles, first_end: Number of tiles of first keys, and their end.
        begin, end: Range of the near keys.
    """
    is_first = t < first_tiles
    j = tl.where(is_first, t * BN, begin + (t - first_tiles) * BN) + tl.arange(0, BN)
    return tl.where(j < tl.where(is_first, first_end, end), j, FAR)


@triton.jit
def load_rows(
    vectors, start, j, width, WIDTH: tl.constexpr, PADDED: tl.constexpr, EDGE: tl.constexpr
):
    """Return the vectors of keys, [BN, BD]; zeros for slots without a key.

    Args:
        vectors: (pointer, stride) from `locate_head`.
        start: First real key of the batch element.
        j: Positions of the keys.
        width: Indices of the components, [BD].
        WIDTH, PADDED: As for `tile.load_vectors`.
        EDGE: Whether there may be slots without a key.
    """
    # int32: each thread computes the places of several scattered rows, and the host makes sure that
    # a head ends below 2^31.
    pointers = vectors[0] + ((start + j) * vectors[1])[:, None] + width[None, :]
    if EDGE and PADDED:
        return tl.load(pointers, mask=(j < FAR)[:, None] & (width < WIDTH)[None, :], other=0.0)
    elif EDGE:
        return tl.load(pointers, mask=(j < FAR)[:, None], other=0.0)
    elif PADDED:
        return tl.load(pointers, mask=(width < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def compute_scores(q, k, BIAS, start, j, scale, softcap, PLAIN: tl.constexpr, CAPPED: tl.constexpr):
    """Return the logits of a tile, [BM, BN], and the slope of the softcap (1.0 without one).

    Args:
        q, k: [BM, BD] and [BN, BD].
        BIAS: Pointer to the bias of the keys of this head, or None.
        start, j: As in `load_rows`.
        scale, softcap: As in `SelectedKernel.attend`.
        PLAIN: Whether there is no softcap, no bias, and a positive scale. The result is then not
            yet multiplied by the scale; otherwise it is in base 2. See `unit_in_nats`.
        CAPPED: Whether there is a softcap.
    """
    s = multiply_tiles(q, tl.trans(k))
    slope = 1.0
    if CAPPED:
        share = tanh(s * (scale / softcap))
        s = share * (softcap * LOG2E)
        slope = 1 - share * share
    elif not PLAIN:
        s = s * (scale * LOG2E)
    if BIAS is not None:
        s += load_bias(BIAS, start, j)[None, :]
    return s, slope


@triton.jit
def load_bias(BIAS, start, j):
    """Return the bias of keys in base 2, [BN]; arguments as for `compute_scores`."""
    # Loaded twice, as a tile of two columns, for the reason in `tile.load_records`.
    at = (start + j)[:, None] + tl.arange(0, 2)[None, :] * 0
    bias = tl.load(BIAS + at, mask=(j < FAR)[:, None], other=0.0)
    # A row may see only keys with a bias of about -3.4e38, as additive masks have it. These must
    # not become -inf.
    bias = tl.where(bias == float("-inf"), bias, tl.maximum(bias * LOG2E, -3.0e38))
    once, _ = tl.split(bias)
    return once


@triton.jit
def unit_in_nats(scale, PLAIN: tl.constexpr):
    """Return how many nats are 1 in the unit of the results of `compute_scores`."""
    if PLAIN:
        return scale
    else:
        return 1 / LOG2E


@triton.jit
def raise_to_weights(s, top, scale, PLAIN: tl.constexpr):
    """Return the weights e^(logit - largest logit).

    Args:
        s: Logits from `compute_scores`.
        top: The largest logit of each row, which broadcasts to `s`.
        scale, PLAIN: As for `compute_scores`.
    """
    if PLAIN:
        unit = scale * LOG2E
        return tl.exp2(s * unit - top * unit)
    else:
        return tl.exp2(s - top)


@triton.jit
def locate_bias(BIAS, b, h):
    """Return the pointer to the bias of a head, given (pointer or None, strides); None without."""
    found = None
    if BIAS[0] is not None:
        found = BIAS[0] + b.to(tl.int64) * BIAS[1][0] + h.to(tl.int64) * BIAS[1][1]
    return found


@triton.jit
def place_row(row, start, stop, summaries):
    """Return the positions of summaries and keys, which are numbered one after the other.

    Args:
        row: Numbers: summaries have the first ones, and then the keys of the text.
        start, stop: Of the batch element.
        summaries: Number of summaries.
    """
    # Padding may stand between the summaries and the first key of the text.
    j = tl.where(row < summaries, row - start, row - summaries)
    return tl.where(j < stop - start, j, FAR)


@triton.jit
def take_share(tiles, part, PARTS: tl.constexpr):
    """Return the range of tiles that one of PARTS programs computes."""
    share = tl.cdiv(tiles, PARTS)
    return part * share, tl.minimum(tiles, (part + 1) * share)


@triton.jit(do_not_specialize=LENGTHS)
def listed_forward(
    Q,
    K,
    V,
    TABLES,
    RULES,
    SPANS,
    BIAS,
    SINKS,
    OUT,
    LSE,
    SUM,
    batch,
    heads,
    members,
    n,
    m,
    pages,
    blocks,
    first_block,
    row_step,
    offset,
    window,
    summaries,
    scale,
    softcap,
    PLAIN: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute the output of the queries of some blocks, and the sums for the backward pass.

    Args:
        Q, K, V: (pointer, strides) of [B, H, N, D], [B, Hkv, M, D] and [B, Hkv, M, DV].
        TABLES: Pointers to `bits`, `listed` and `counts` of `tables.Tables`.
        RULES: Pointer to `numbers` of `tables.ListedRules`.
        SPANS: Pointer to int32 [2, B]: index of the first real key of each batch element, and of
            the end of its real keys.
        BIAS: (pointer or None, strides) of [B, H, M], float32.
        SINKS: Pointer to one logit per head, float32 [H], or None.
        OUT: Written, [B, H, N, DV]. If PARTS > 1: float32 [PARTS, B, H, N, DV], not yet divided by
            the sum of weights.
        LSE: Written, float32 [2, B, H, N]: see `forward.store_sums`. If PARTS > 1: the largest
            logits, [PARTS, B, H, N].
        SUM: Written if PARTS > 1, float32 [PARTS, B, H, N]: sums of weights.
        batch: B.
        heads, n, m: H, N, M.
        members: Number of heads of this launch.
        pages: Number of pages in the tables: each summary, then the pages of a text.
        blocks, first_block: Number of blocks of the tables, and the first of them.
        row_step: B * H * N.
        offset, window, summaries, scale, softcap: As in `SelectedKernel.attend`.
        PLAIN: See `compute_scores`.
        GROUP: Query heads that share a key head.
        PAGE: Keys of a page in the tables, at most BN.
        PARTS: Number of programs that share the keys of a block.
    """
    part = tl.program_id(0) % PARTS
    number = tl.program_id(0) // PARTS
    # Backwards: the blocks with the most keys start first, so no long program ends last.
    block = blocks - 1 - number % blocks
    member = number // blocks % members
    b = number // (blocks * members)
    rule = read_rule(RULES, member)
    h, sinks = rule[0], rule[2]
    start, stop = tl.load(SPANS + b), tl.load(SPANS + batch + b)
    base, first, last = locate_block(block + first_block, start, offset, n, BM)
    # Rows of the batch that begin later have fewer blocks.
    if last < first:
        return
    p, lowest, bit, inside = place_queries(base, first, last, rule, BM)
    i = p + start - offset

    width, width_v = tl.arange(0, BD), tl.arange(0, BDV)
    queries = locate_head(Q, b, h)
    q = load_vectors(queries, i[:, None], width[None, :], n, D, D < BD, True)
    keys, values = locate_head(K, b, h // GROUP), locate_head(V, b, h // GROUP)
    bias = locate_bias(BIAS, b, h)
    table = ((b * members + member) * blocks + block).to(tl.int64)
    bits_of, listed = TABLES[0] + table * pages, TABLES[1] + table * pages * 2
    whole, entries = tl.load(TABLES[2] + table * 2), tl.load(TABLES[2] + table * 2 + 1)
    begin, end, clean, clean_end = find_near_range(
        first, last, rule, stop - start, window, WINDOWED, PAGE
    )
    # Clean tiles: full tiles of pages that all queries see, and the middle of the near keys. A
    # window may hide some of the pages from the last queries.
    PER: tl.constexpr = BN // PAGE
    listed_clean = whole // PER if BN % PAGE == 0 and not WINDOWED else 0
    near_tiles = tl.cdiv(tl.maximum(end - begin, 0), BN)
    left = tl.minimum(tl.cdiv(tl.maximum(clean - begin, 0), BN), near_tiles)
    near_clean = tl.maximum((clean_end - begin) // BN - left, 0)
    # Edges: the tiles of first keys, and the near tiles that are not clean.
    first_end = find_first_range(sinks, begin, stop - start, PAGE)
    first_tiles = tl.cdiv(first_end, BN)

    nats = unit_in_nats(scale, PLAIN)
    total = tl.zeros([BM, BDV], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    if SINKS is not None:
        # One part counts the sink, or it would count PARTS times.
        if part == 0:
            top = tl.zeros([BM], tl.float32) + tl.load(SINKS + h) / nats
            weight += 1.0
    spare = tl.minimum(first, stop - start - 1)
    # KIND 0: clean, 1: chosen, 2: edge.
    for KIND in tl.static_range(3):
        if KIND == 0:
            tiles = listed_clean + near_clean
        elif KIND == 1:
            tiles = tl.cdiv(entries - listed_clean * PER, PER)
        else:
            tiles = first_tiles + near_tiles - near_clean
        low, high = take_share(tiles, part, PARTS)
        for t in range(low, high):
            # Load: keys by their places in the list, or neighbouring keys.
            if KIND == 0:
                near_j = begin + (t - listed_clean + left) * BN + tl.arange(0, BN)
                # A tile of near keys needs no list. It reads any valid entry.
                at = tl.minimum(t, tl.maximum(listed_clean - 1, 0)) * PER
                j = tl.where(t < listed_clean, place_clean(listed, at, PAGE, BN), near_j)
            elif KIND == 1:
                entry = (listed_clean + t) * PER
                j, bits = place_chosen(listed, entry, entries, spare, PAGE, BN)
            else:
                # Edge tiles right of the clean ones skip over these.
                skipped = tl.where(t - first_tiles < left, 0, near_clean)
                j = place_edge(t, first_tiles, first_end, begin + skipped * BN, end, BN)
            k = load_rows(keys, start, j, width, D, D < BD, KIND == 2)
            s, _ = compute_scores(q, k, bias, start, j, scale, softcap, PLAIN, CAPPED)
            if KIND == 1:
                seen = is_chosen(p, bit, j, bits, window, WINDOWED)
                s = tl.where(seen, s, float("-inf"))
            elif KIND == 2:
                bits = load_bits(bits_of, j, summaries + j // PAGE, sinks, pages)
                s = tl.where(is_seen(p, lowest, bit, j, bits, window, WINDOWED), s, float("-inf"))

            # Online softmax.
            new = tl.maximum(top, tl.max(s, 1))
            # A row that sees nothing yet has a maximum of -inf, and -inf - -inf is NaN. In clean
            # tiles only a bias can hide all keys.
            safe_top = new
            if KIND > 0 or not PLAIN:
                safe_top = tl.where(new == float("-inf"), 0.0, new)
            w = raise_to_weights(s, safe_top[:, None], scale, PLAIN)
            shrink = raise_to_weights(top, safe_top, scale, PLAIN)
            weight = weight * shrink + tl.sum(w, 1)
            top = new

            # Accumulate.
            v = load_rows(values, start, j, width_v, DV, DV < BDV, KIND == 2)
            total = total * shrink[:, None] + multiply_tiles(w.to(v.dtype), v)

    place = (b * heads + h).to(tl.int64) * n + i
    if PARTS > 1:
        place += part * row_step.to(tl.int64)
        tl.store(SUM + place, weight, mask=inside)
    else:
        total *= tl.where(weight > 0, 1 / weight, 0.0)[:, None]
    store_sums(LSE, place, row_step, top * nats, weight, inside, PARTS == 1, False)
    out = OUT + place[:, None] * DV + width_v[None, :]
    tl.store(out, total.to(OUT.dtype.element_ty), mask=inside[:, None] & (width_v[None, :] < DV))


@triton.jit
def compute_slopes(
    q,
    k,
    v,
    grad,
    top,
    share,
    delta,
    seen,
    bias,
    start,
    j,
    scale,
    softcap,
    PLAIN: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Return the weights of a tile and two gradients, each [BM, BN].

    The first gradient is of the logits after softcap and bias, the second of the dot products.

    Args:
        q, k, v: [BM, BD], [BN, BD] and [BN, BDV].
        grad: Gradient of the output, [BM, BDV].
        top, share: Both halves of LSE, [BM].
        delta: Sum of gradient times output of each row, [BM].
        seen: Bool [BM, BN], the visible pairs.
        bias, start, j, scale, softcap, PLAIN, CAPPED: As for `compute_scores`.
    """
    s, slope = compute_scores(q, k, bias, start, j, scale, softcap, PLAIN, CAPPED)
    # LSE is in nats; rows that see nothing have a top of +inf, and weights of 0. The same product
    # gave the largest logit in LSE, so that the difference of the two is exact, however large both
    # are.
    s = tl.where(seen, s * unit_in_nats(scale, PLAIN), float("-inf"))
    w = tl.exp2((s - top[:, None]) * LOG2E) * share[:, None]
    d_w = multiply_tiles(grad, tl.trans(v))
    d_logits = w * (d_w - delta[:, None])
    return w, d_logits, d_logits * slope * scale


@triton.jit(do_not_specialize=LENGTHS)
def listed_backward_query(
    Q,
    K,
    V,
    GRAD,
    TABLES,
    RULES,
    SPANS,
    BIAS,
    LSE,
    DELTA,
    D_Q,
    batch,
    heads,
    members,
    n,
    m,
    pages,
    blocks,
    first_block,
    row_step,
    offset,
    window,
    summaries,
    scale,
    softcap,
    PLAIN: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute the gradients of the queries of some blocks.

    Args:
        GRAD: (pointer, strides) of the gradient of the output, [B, H, N, DV].
        LSE: Float32 [2, B, H, N], from `listed_forward`.
        DELTA: Float32 [B, H, N]; see `compute_slopes`.
        D_Q: Written, [B, H, N, D].

    The other arguments are as for `listed_forward`.
    """
    number = tl.program_id(0)
    block = blocks - 1 - number % blocks
    member = number // blocks % members
    b = number // (blocks * members)
    rule = read_rule(RULES, member)
    h, sinks = rule[0], rule[2]
    start, stop = tl.load(SPANS + b), tl.load(SPANS + batch + b)
    base, first, last = locate_block(block + first_block, start, offset, n, BM)
    if last < first:
        return
    p, lowest, bit, inside = place_queries(base, first, last, rule, BM)
    i = p + start - offset

    width, width_v = tl.arange(0, BD), tl.arange(0, BDV)
    queries, grads = locate_head(Q, b, h), locate_head(GRAD, b, h)
    q = load_vectors(queries, i[:, None], width[None, :], n, D, D < BD, True)
    grad = load_vectors(grads, i[:, None], width_v[None, :], n, DV, DV < BDV, True)
    keys, values = locate_head(K, b, h // GROUP), locate_head(V, b, h // GROUP)
    bias = locate_bias(BIAS, b, h)
    place = (b * heads + h).to(tl.int64) * n + i
    top, share = tl.load(LSE + place), tl.load(LSE + row_step.to(tl.int64) + place)
    delta = tl.load(DELTA + place)
    table = ((b * members + member) * blocks + block).to(tl.int64)
    bits_of, listed = TABLES[0] + table * pages, TABLES[1] + table * pages * 2
    entries = tl.load(TABLES[2] + table * 2 + 1)
    begin, end, _, _ = find_near_range(first, last, rule, stop - start, window, WINDOWED, PAGE)

    first_end = find_first_range(sinks, begin, stop - start, PAGE)
    first_tiles = tl.cdiv(first_end, BN)
    spare = tl.minimum(first, stop - start - 1)
    total = tl.zeros([BM, BD], tl.float32)
    # KIND 1: all listed pages, 2: all first and near keys.
    for KIND in tl.static_range(1, 3):
        if KIND == 1:
            tiles = tl.cdiv(entries, BN // PAGE)
        else:
            tiles = first_tiles + tl.cdiv(tl.maximum(end - begin, 0), BN)
        for t in range(0, tiles):
            # Load: keys and values.
            if KIND == 1:
                j, bits = place_chosen(listed, t * (BN // PAGE), entries, spare, PAGE, BN)
            else:
                j = place_edge(t, first_tiles, first_end, begin, end, BN)
                bits = load_bits(bits_of, j, summaries + j // PAGE, sinks, pages)
            k = load_rows(keys, start, j, width, D, D < BD, KIND == 2)
            v = load_rows(values, start, j, width_v, DV, DV < BDV, KIND == 2)

            # Scores and slopes.
            if KIND == 1:
                seen = is_chosen(p, bit, j, bits, window, WINDOWED)
            else:
                seen = is_seen(p, lowest, bit, j, bits, window, WINDOWED)
            slopes = compute_slopes(
                q,
                k,
                v,
                grad,
                top,
                share,
                delta,
                seen,
                bias,
                start,
                j,
                scale,
                softcap,
                PLAIN,
                CAPPED,
            )[2]

            # Accumulate.
            total += multiply_tiles(slopes.to(k.dtype), k)
    out = D_Q + place[:, None] * D + width[None, :]
    mask = inside[:, None] & (width[None, :] < D)
    tl.store(out, total.to(D_Q.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=LENGTHS)
def listed_backward_key(
    Q,
    K,
    V,
    GRAD,
    TABLES,
    READERS,
    RULES,
    SPANS,
    BIAS,
    LSE,
    DELTA,
    D_K,
    D_V,
    D_BIAS,
    batch,
    heads,
    members,
    n,
    m,
    pages,
    blocks,
    first_block,
    row_step,
    offset,
    window,
    summaries,
    scale,
    softcap,
    PLAIN: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Add the gradients of a tile of BN keys and values from the queries of some blocks.

    Args:
        READERS: Pointers to the blocks that read each tile of keys, int32 [B, members, tiles,
            blocks], and to their number, int32 [B, members, tiles].
        D_K, D_V: Float32 [B, H, M, D] and [B, H, M, DV]. The kernel adds to them; launches for
            other blocks follow one another, so sums do not change from run to run.
        D_BIAS: Float32 [B, H, M], to which the kernel adds likewise; None if there is no bias.

    The other arguments are as for `listed_backward_query`.
    """
    tiles = tl.cdiv(m, BN)
    number = tl.program_id(0)
    tile = number % tiles
    member = number // tiles % members
    b = number // (tiles * members)
    rule = read_rule(RULES, member)
    h, sinks = rule[0], rule[2]
    start, stop = tl.load(SPANS + b), tl.load(SPANS + batch + b)
    row = tile * BN + tl.arange(0, BN)
    page = row // PAGE
    j = place_row(row, start, stop, summaries)

    width, width_v = tl.arange(0, BD), tl.arange(0, BDV)
    queries, grads = locate_head(Q, b, h), locate_head(GRAD, b, h)
    keys, values = locate_head(K, b, h // GROUP), locate_head(V, b, h // GROUP)
    bias = locate_bias(BIAS, b, h)
    k = load_rows(keys, start, j, width, D, D < BD, True)
    v = load_rows(values, start, j, width_v, DV, DV < BDV, True)
    d_k, d_v = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BDV], tl.float32)
    d_bias = tl.zeros([BN], tl.float32)
    member_of = (b * members + member).to(tl.int64)
    readers = READERS[0] + (member_of * tiles + tile) * blocks
    for x in range(0, tl.load(READERS[1] + member_of * tiles + tile)):
        # Load: the queries of one block that sees some key of this tile.
        block = tl.load(readers + x)
        base, first, last = locate_block(block + first_block, start, offset, n, BM)
        p, lowest, bit, inside = place_queries(base, first, last, rule, BM)
        i = p + start - offset
        q = load_vectors(queries, i[:, None], width[None, :], n, D, D < BD, True)
        grad = load_vectors(grads, i[:, None], width_v[None, :], n, DV, DV < BDV, True)
        place = (b * heads + h).to(tl.int64) * n + i
        top, share = tl.load(LSE + place), tl.load(LSE + row_step.to(tl.int64) + place)
        delta = tl.load(DELTA + place)

        # Scores and slopes.
        bits_of = TABLES[0] + (member_of * blocks + block) * pages
        bits = load_bits(bits_of, j, page, sinks, pages)
        seen = is_seen(p, lowest, bit, j, bits, window, WINDOWED) & inside[:, None]
        w, d_logits, slopes = compute_slopes(
            q, k, v, grad, top, share, delta, seen, bias, start, j, scale, softcap, PLAIN, CAPPED
        )

        # Accumulate.
        d_k += multiply_tiles(tl.trans(slopes.to(q.dtype)), q)
        d_v += multiply_tiles(tl.trans(w.to(grad.dtype)), grad)
        if D_BIAS is not None:
            d_bias += tl.sum(d_logits, 0)

    # Add to the sums of earlier launches.
    line = (b * heads + h).to(tl.int64) * m + start + j
    there = (j < FAR)[:, None]
    mask = there & (width[None, :] < D)
    out = D_K + line[:, None] * D + width[None, :]
    tl.store(out, d_k + tl.load(out, mask=mask, other=0.0), mask=mask)
    mask = there & (width_v[None, :] < DV)
    out = D_V + line[:, None] * DV + width_v[None, :]
    tl.store(out, d_v + tl.load(out, mask=mask, other=0.0), mask=mask)
    if D_BIAS is not None:
        out = D_BIAS + line
        tl.store(out, d_bias + tl.load(out, mask=j < FAR, other=0.0), mask=j < FAR)


@triton.jit(do_not_specialize=LENGTHS)
def write_lists(
    TABLES,
    RULES,
    SPANS,
    batch,
    members,
    n,
    pages,
    blocks,
    first_block,
    offset,
    summaries,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the list of pages of each block, from its bits.

    Pages that all queries of the block have chosen come first, then all others that some query has
    chosen. Both are in ascending order. Near pages and those that hold the first keys are not
    listed.

    Args:
        TABLES: See `tables.Tables`. `bits` is read; `listed` and `counts` are written.
        WIDTH: Pages that are read at a time.

    The other arguments are as for `listed_forward`.
    """
    number = tl.program_id(0)
    block = number % blocks
    member = number // blocks % members
    b = number // (blocks * members)
    rule = read_rule(RULES, member)
    _, near, sinks, chunk, step = rule
    start, stop = tl.load(SPANS + b), tl.load(SPANS + batch + b)
    base, first, last = locate_block(block + first_block, start, offset, n, BM)
    table = number.to(tl.int64)
    bits_of, listed = TABLES[0] + table * pages, TABLES[1] + table * pages * 2
    # The pages before the near ones. A last page that is not complete is never listed.
    end = tl.minimum(find_near(first, near, chunk, step) // PAGE, (stop - start) // PAGE)
    # Places in the table: of the first page that may be listed, and behind the last one.
    begin = tl.where(summaries > 0, 0, tl.cdiv(sinks, PAGE))
    end = tl.minimum(summaries + end, pages)
    if last < first:
        end = 0
    # The bits of the chunks that have queries in the block.
    low, high = first // chunk - base // chunk, last // chunk - base // chunk
    every = tl.where(high >= 31, -1, (1 << (tl.minimum(high, 30) + 1)) - 1) & (-1 << low)
    count = 0
    # PASS 0: pages that all queries have chosen, 1: pages that only some have chosen.
    for PASS in tl.static_range(2):
        for at in range(begin, end, WIDTH):
            place = at + tl.arange(0, WIDTH)
            page = tl.where(place < summaries, place - start, place - summaries)
            is_free = (place < end) & ((page < 0) | (page * PAGE >= sinks))
            bits = tl.load(bits_of + place, mask=is_free, other=0)
            whole = (bits & every) == every
            found = whole if PASS == 0 else (bits != 0) & (whole == 0)
            found = (found & is_free).to(tl.int32)
            entry = listed + 2 * (count + tl.cumsum(found, 0) - 1)
            tl.store(entry, page, mask=found != 0)
            tl.store(entry + 1, bits, mask=found != 0)
            count += tl.sum(found, 0)
        tl.store(TABLES[2] + table * 2 + PASS, count)
