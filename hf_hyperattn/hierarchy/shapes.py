"""Trees that are no text: patches of an image in a quad-tree, groups given as spans, several signals under one root."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .ids import KIND
from .tree import Tree


def quadtree_ids(rows: int, columns: int, factor: int) -> Tensor:
    """Group ids [rows · columns, levels] of patches in raster order: cells of factor, factor², ... patches a side.

    The first level is the whole image; its family has kind 1, those of cells have kind 2. Cells start at the upper
    left; where a side is no power of the factor, those at the other end are smaller.

    Raises:
        ValueError: no patches, or a factor below 2.
    """
    for name, value, least in (("rows", rows, 1), ("columns", columns, 1), ("factor", factor, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} is not allowed; allowed: integers of at least {least}")
    side, sides = factor, []
    while side < max(rows, columns):
        sides.append(side)
        side *= factor
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    levels = [((row // side) * columns + column // side).reshape(-1) for side in reversed(sides)]
    whole = torch.zeros(rows * columns, dtype=torch.long)
    return torch.stack([whole + KIND, *(level + 2 * KIND for level in levels)], 1)


def around(ids: Tensor, before: int, after: int) -> Tensor:
    """Group ids with special tokens at either end: in the group of the first level, and alone on all others.

    Raises:
        ValueError: a negative number.
    """
    for name, value in (("before", before), ("after", after)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name}={value!r} is not allowed; allowed: integers of at least 0")
    alone = len(ids) + torch.arange(before + after)[:, None].expand(-1, ids.shape[1])
    special = torch.cat([ids[:1, :1].expand(before + after, 1), alone[:, 1:]], 1)
    return torch.cat([special[:before], ids, special[before:]])


def span_parents(spans: Sequence[tuple[int, int]], length: int) -> Tensor:
    """Parents of the tree whose inner nodes are a root and these spans of tokens, each in the smallest around it.

    Args:
        spans: (first token, one past the last) of every group, in any order.
        length: number of tokens.

    Raises:
        ValueError: a span without tokens or beyond them, or two that overlap without one holding the other.
    """
    parents = torch.full((length + len(spans) + 1,), -1, dtype=torch.long)
    root = length + len(spans)
    owner = torch.full((length,), root, dtype=torch.long)
    for start, stop in spans:
        if not 0 <= start < stop <= length:
            raise ValueError(f"span ({start}, {stop}) is not allowed; allowed: 0 <= start < stop <= {length}")
    open_spans: list[tuple[int, int, int]] = []
    for number, (start, stop) in sorted(enumerate(spans), key=lambda s: (s[1][0], -s[1][1])):
        while open_spans and open_spans[-1][1] <= start:
            open_spans.pop()
        if open_spans and open_spans[-1][1] < stop:
            a, b, _ = open_spans[-1]
            raise ValueError(
                f"spans ({a}, {b}) and ({start}, {stop}) overlap; allowed: one within the other, or none in common"
            )
        parents[length + number] = open_spans[-1][2] if open_spans else root
        owner[start:stop] = length + number
        open_spans.append((start, stop, length + number))
    parents[:length] = owner
    return parents


def joined_tree(parts: Sequence[Tree | int], kind: str) -> Tree:
    """One tree with a root over all parts; a number stands for so many leaves."""
    names = ["", kind, *dict.fromkeys(n for p in parts if isinstance(p, Tree) for n in p.kind_names[1:])]
    counts = [p if isinstance(p, int) else p.leaves for p in parts]
    inner = sum(p.nodes - p.leaves for p in parts if isinstance(p, Tree))
    leaves, begins = sum(counts), [sum(counts[:i]) for i in range(len(parts))]
    root, first = leaves + inner, leaves
    parents = torch.full((root + 1,), root, dtype=torch.long)
    kinds = torch.zeros(root + 1, dtype=torch.long)
    kinds[root], parents[root] = 1, -1
    for part, begin in zip(parts, begins, strict=True):
        if isinstance(part, int):
            continue
        place = torch.cat([begin + torch.arange(part.leaves), first + torch.arange(part.nodes - part.leaves)])
        parents[place[:-1]] = place[part.parents[:-1]]
        numbers = torch.tensor([names.index(n) if n else 0 for n in part.kind_names])
        kinds[place] = numbers[part.kinds]
        first += part.nodes - part.leaves
    return Tree.from_parents(parents, kinds, names)


def joined(parts: Sequence, kind: str) -> tuple[list[Tree], list[Tensor], int]:
    """Trees, tokens and length of hierarchies that follow each other; arguments as in `Hierarchy.join`."""
    parts = [p if isinstance(p, int) else p.materialised for p in parts]
    rows = sorted({p.rows for p in parts if not isinstance(p, int)} - {1}) or [1]
    if all(isinstance(p, int) for p in parts) or len(rows) > 1:
        raise ValueError(
            f"the parts have {rows} rows; allowed: at least one hierarchy, and one number of rows besides 1"
        )
    starts = [0, *accumulate(p if isinstance(p, int) else p.length for p in parts)]
    trees, tokens = [], []
    for row in range(rows[0]):
        trees.append(joined_tree([p if isinstance(p, int) else p.tree(row) for p in parts], kind))
        places = [torch.arange(p) if isinstance(p, int) else p.tokens_of(row) for p in parts]
        tokens.append(torch.cat([start + place for start, place in zip(starts, places)]))
    return trees, tokens, starts[-1]
