"""Tables that tell the kernels of listed.py which keys a block of queries sees.

Here you learn how the rules of heads and their chosen pages become bits and lists of pages.
"""

# A launch takes plain numbers where the functions of Triton declare constants.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..selected import ROWS, SUMMARIES, HeadRule
from ..selection import Lists
from .listed import write_lists

#: Keys of a page in the tables for heads whose rules choose no pages. None of them is listed.
NO_PAGE = 16
#: A number that stands for all keys in int32.
ALL = 2**30
#: Most chunks of a block: each has one bit of an int32.
BITS = 32
#: Most bytes of the tables of one launch: this number, or `SHARE` of the bytes of queries, keys and
#: values if that is more. Calls that need more have several launches.
LEAST_BYTES, SHARE = 2**25, 1 / 16
#: Pages that a program of `write_lists` reads at a time.
WIDTH = 1024


@dataclass(frozen=True, eq=False)
class ListedRules:
    """The heads of one launch.

    Args:
        heads: Index of each query head.
        rules: Rule of each head.
        page: Keys of a page in the tables. It divides the pages of all rules, and fits into a tile.
        rows: Queries of a block.
        numbers: int32 [members, 5]: the head, `near`, `sinks`, `chunk`, and a number. The first
            near position is a multiple of this number.
    """

    heads: tuple[int, ...]
    rules: tuple[HeadRule, ...]
    page: int
    rows: int
    numbers: Tensor


@dataclass(frozen=True, eq=False)
class Tables:
    """The pages of some blocks of queries.

    Args:
        first: Number of the first block; block 0 has the first real query.
        blocks: Number of blocks.
        bits: int32 [B, members, blocks, pages]: of each summary, and then of each page of the text.
            Bit u says whether chunk u of the block has chosen it.
        listed: int32 [B, members, blocks, pages, 2]: pages in the order in which the kernel reads
            them, each with its bits. Only as many as `counts` says are set. Pages of a text count
            from 0, so summaries have negative numbers.
        counts: int32 [B, members, blocks, 2]: number of pages that all queries of the block have
            chosen, and number of all listed pages.
    """

    first: int
    blocks: int
    bits: Tensor
    listed: Tensor
    counts: Tensor


def group_rules(
    rules: Sequence[HeadRule], queries: int, rows: int, columns: int, device: torch.device
) -> list[ListedRules]:
    """Return the launches that compute all heads.

    Heads share a launch if their pages in the tables and their blocks have the same size.

    Args:
        rules: One for each head.
        queries: Number of queries.
        rows: Most queries of a block.
        columns: Keys of a tile.
        device: Of the tensors of the call.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for head, rule in enumerate(rules):
        page = 1 if lists_rows(rule) else divide_page(rule.page or NO_PAGE, columns)
        about = page, count_rows(rule, queries, rows)
        groups.setdefault(about, []).append(head)
    found = []
    for (page, rows_of_block), heads in groups.items():
        numbers = []
        for head in heads:
            rule = rules[head]
            # Without pages each query has near keys of its own.
            chunk, step = (rule.chunk, rule.page) if rule.page else (1, 1)
            sizes = rule.near, rule.sinks, chunk, step
            numbers.append([head, *(min(size, ALL) for size in sizes)])
        found.append(
            ListedRules(
                heads=tuple(heads),
                rules=tuple(rules[h] for h in heads),
                page=page,
                rows=rows_of_block,
                numbers=torch.tensor(numbers, dtype=torch.int32, device=device),
            )
        )
    return found


def lists_rows(rule: HeadRule) -> bool:
    """Return whether a rule chooses single rows. Some of them may be summaries."""
    return rule.by in (SUMMARIES, ROWS)


def count_pages(group: ListedRules, keys: int, summaries: int) -> int:
    """Return the number of pages in the tables: all that may be chosen, and one spare page.

    The spare page takes the empty entries of lists (`mark_pages`).

    Args:
        group: The heads.
        keys: Number of keys and summaries.
        summaries: Number of summaries.
    """
    if all(rule.by == SUMMARIES for rule in group.rules):
        return summaries + 1
    return keys // group.page + 1


def divide_page(page: int, columns: int) -> int:
    """Return the largest divisor of a page that fits into a tile of this many keys."""
    return next(size for size in range(min(page, columns), 0, -1) if page % size == 0)


def count_rows(rule: HeadRule, queries: int, most: int) -> int:
    """Return the number of queries of a block.

    Args:
        rule: Of the head. The chunks of a block must not be more than `BITS`.
        queries: Number of queries.
        most: Most queries of a block.
    """
    if queries <= 16:
        return 16
    rows = most
    while rule.page and rows > 16 and count_chunks(rule, rows) > BITS:
        rows //= 2
    return rows


def count_chunks(rule: HeadRule, rows: int) -> int:
    """Return the most chunks that lie in a block of this many queries."""
    # Blocks begin at multiples of their size. There are most chunks if the first one has only one
    # query in the block: 1 + ceil((rows - 1) / chunk).
    return rows // rule.chunk if rows % rule.chunk == 0 else (rows - 2) // rule.chunk + 2


def split_blocks(
    group: ListedRules, batch: int, queries: int, keys: int, summaries: int, most_bytes: int
) -> list[tuple[int, int]]:
    """Return the first block and the number of blocks of each launch.

    Args:
        group: The heads.
        batch, queries, keys: B, N and M.
        summaries: As in `SelectedKernel.attend`.
        most_bytes: Most bytes of the tables of a launch; one block may need more.
    """
    # There are most blocks if the first real query is the last one of its block.
    blocks = (queries + group.rows - 2) // group.rows + 1
    # For each page 4 bytes in `bits` and 8 in `listed`.
    of_block = 12 * len(group.heads) * count_pages(group, keys, summaries)
    # `mark_pages` computes int64 numbers for each page that a chunk of one head has chosen, up to
    # three at a time.
    of_block += max(
        24 * count_chunks(rule, group.rows) * count_chosen(rule, group.page, keys)
        for rule in group.rules
    )
    of_block *= max(1, batch)
    step = max(1, min(blocks, most_bytes // of_block))
    return [(first, min(step, blocks - first)) for first in range(0, blocks, step)]


def count_chosen(rule: HeadRule, page: int, keys: int) -> int:
    """Return the most pages of the tables that a chunk chooses.

    Args:
        rule: Of the head.
        page: Keys of a page in the tables.
        keys: M.
    """
    if lists_rows(rule):
        return min(rule.top, keys)
    return min(rule.top * rule.page, keys) // page


def make_tables(
    group: ListedRules,
    chosen: Lists,
    spans: Tensor,
    starts: Sequence[int],
    offset: int,
    queries: int,
    keys: int,
    summaries: int,
    first: int,
    blocks: int,
    columns: int,
) -> Tables:
    """Return the tables of some blocks.

    Args:
        group: The heads.
        chosen: Pages of each chunk, of all heads of the call.
        spans: int32 [2, B], the starts and the stops.
        starts: First real key of each row of the batch.
        offset: Index of the key that belongs to query 0.
        queries, keys: N and M.
        summaries: As in `SelectedKernel.attend`.
        first, blocks: From `split_blocks`.
        columns: Keys of a tile.
    """
    pages = count_pages(group, keys, summaries)
    bits = mark_pages(group, chosen, starts, offset, first, blocks, pages)
    # A tile of near keys reads a whole tile of entries and drops them (`place_clean`). The list of
    # the last block may be shorter than that.
    listed = bits.new_empty(2 * (bits.numel() + columns // group.page))[: 2 * bits.numel()]
    listed = listed.view(*bits.shape, 2)
    counts = bits.new_empty(*bits.shape[:3], 2)
    write_lists[(counts.numel() // 2,)](
        TABLES=(bits, listed, counts),
        RULES=group.numbers,
        SPANS=spans,
        batch=len(starts),
        members=len(group.heads),
        n=queries,
        pages=bits.shape[3],
        blocks=blocks,
        first_block=first,
        offset=offset,
        summaries=summaries,
        PAGE=group.page,
        BM=group.rows,
        WIDTH=min(WIDTH, triton.next_power_of_2(bits.shape[3])),
    )
    return Tables(first=first, blocks=blocks, bits=bits, listed=listed, counts=counts)


def mark_pages(
    group: ListedRules,
    chosen: Lists,
    starts: Sequence[int],
    offset: int,
    first: int,
    blocks: int,
    pages: int,
) -> Tensor:
    """Return the bits of some blocks, int32 [B, members, blocks, pages].

    Args:
        group, chosen, starts, offset: As in `make_tables`.
        first: Number of the first block.
        blocks: Number of blocks.
        pages: Number of pages, plus one that no chunk has chosen.
    """
    device = chosen.rows.device
    bits = torch.zeros(
        len(starts), len(group.heads), blocks, pages, dtype=torch.int32, device=device
    )
    tables = chosen.of_heads()
    # Position of the first real query of each row of the batch, and of the first query of a block.
    begin = torch.tensor([max(0, offset - start) for start in starts], device=device)[:, None]
    block = torch.arange(first, first + blocks, device=device)
    base = (begin // group.rows + block) * group.rows
    for member, (head, rule) in enumerate(zip(group.heads, group.rules, strict=True)):
        table = tables[head]
        if not rule.page or not table.shape[2]:
            continue
        own = base // rule.chunk
        last = (base + group.rows - 1) // rule.chunk
        place = torch.arange(count_chunks(rule, group.rows), device=device)
        chunk = own[..., None] + place
        # Chunk 0 of the table is the chunk of the first real query.
        row = chunk - begin[..., None] // rule.chunk
        is_there = (row >= 0) & (row < table.shape[1]) & (chunk <= last[..., None])
        index = row.clamp(0, table.shape[1] - 1).flatten(1)[..., None]
        listed = table.gather(1, index.expand(-1, -1, table.shape[2])).long()
        is_listed = is_there.flatten(1)[..., None] & (listed >= 0)
        # Each page of the rule is one or more pages of the tables.
        parts = 1 if lists_rows(rule) else rule.page // group.page
        listed = (listed[..., None] * parts + torch.arange(parts, device=device)).flatten(2)
        # Empty entries mark the last page, which is set to 0 at the end.
        listed = listed.where(is_listed.repeat_interleave(parts, 2), pages - 1)
        # Bit 31 makes an int32 negative, which does no harm.
        value = (1 << place).to(torch.int32)[:, None].expand(len(place), listed.shape[2])
        value = value.expand(len(starts), blocks, -1, -1).flatten(2)
        # A chunk lists a page once, so the sum of its bits is their union.
        bits[:, member].scatter_add_(2, listed.unflatten(1, (blocks, -1)).flatten(2), value)
    bits[..., -1] = 0
    return bits


def find_readers(
    group: ListedRules,
    tables: Tables,
    spans: Tensor,
    offset: int,
    queries: int,
    keys: int,
    summaries: int,
    columns: int,
) -> tuple[Tensor, Tensor]:
    """Return the blocks that see some key of each tile of keys.

    Args:
        group, spans, offset, queries, keys, summaries: As in `make_tables`.
        tables: Of the blocks.
        columns: Keys of a tile.

    Returns:
        int32 [B, members, tiles, blocks], the numbers of these blocks in the tables, in ascending
        order, and then the other blocks. Then int32 [B, members, tiles], their count.
    """
    device = spans.device
    tiles = -(-keys // columns)
    # A page lies in one tile, or in two.
    page = torch.arange(tables.bits.shape[3], device=device)
    is_chosen = (tables.bits != 0).to(torch.int32)
    reads = is_chosen.new_zeros(*is_chosen.shape[:3], tiles)
    for key in (page * group.page, page * group.page + group.page - 1):
        # The last page, which nobody has chosen, may lie behind all keys.
        reads.index_add_(3, (key // columns).clamp_max(tiles - 1), is_chosen)

    # The positions are those of `locate_block` and `find_near_range` of listed.py.
    _, near, sinks, chunk, step = group.numbers.long().mT[..., None, None]
    begin = (offset - spans[0].long()).clamp_min(0)[:, None, None, None]
    block = torch.arange(tables.first, tables.first + tables.blocks, device=device)[:, None]
    base = (begin // group.rows + block) * group.rows
    first = base.maximum(begin)
    last = (base + group.rows).minimum(queries + offset - spans[0].long()[:, None, None, None]) - 1
    near_begin = (first // chunk * chunk - near + 1).clamp_min(0) // step * step
    # An incomplete last page counts as near.
    lengths = (spans[1] - spans[0]).long()[:, None, None, None]
    near_begin = near_begin.minimum(lengths // group.page * group.page)
    # A tile that has summaries begins below 0.
    tile = torch.arange(tiles, device=device) * columns - summaries
    is_read = (reads > 0) | ((tile < sinks) & (tile + columns > 0)) | (tile + columns > near_begin)
    is_read = (is_read & (tile <= last) & (last >= first)).transpose(2, 3)
    order = is_read.logical_not().to(torch.int8).sort(dim=-1, stable=True).indices.to(torch.int32)
    return order.contiguous(), is_read.sum(-1, dtype=torch.int32)
