"""Build trees that do not come from text.

These are quadtrees of images, groups given as spans, and several signals under one root. This
module shows how each of these becomes group ids or parent pointers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .ids import KIND, deepened_ids

# Kinds of the families of a quadtree: of the whole image, and of its cells.
IMAGE, CELL = 1, 2


def quadtree_ids(rows: int, columns: int, factor: int) -> Tensor:
    """Return the group ids [rows · columns, levels] of patches in raster order.

    Cells have factor, factor², ... patches a side, and start at the upper left. If a side is no
    power of the factor, the cells at the other end are smaller. The first level is the whole image;
    its family has kind 1, families of cells have kind 2.

    Args:
        rows, columns: Numbers of patches.
        factor: Number of cells a side that make one cell of the next level.

    Raises:
        ValueError: No patches, or a factor below 2.
    """
    for name, value, least in (("rows", rows, 1), ("columns", columns, 1), ("factor", factor, 2)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"{name}={value!r} is not allowed; allowed: integers of at least {least}"
            )
    side, sides = factor, []
    while side < max(rows, columns):
        sides.append(side)
        side *= factor
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    # Any number that differs between cells: `columns` exceeds every cell's column.
    levels = [((row // side) * columns + column // side).reshape(-1) for side in reversed(sides)]
    whole = torch.zeros(rows * columns, dtype=torch.long)
    return torch.stack([whole + IMAGE * KIND, *(level + CELL * KIND for level in levels)], 1)


def add_special_ids(ids: Tensor, before: int, after: int) -> Tensor:
    """Return group ids with special tokens added at both ends.

    Special tokens are in the group of the first level, and have unique ids on all other levels.

    Args:
        ids: int64 [length, levels].
        before, after: Numbers of special tokens.

    Raises:
        ValueError: A negative number.
    """
    for name, value in (("before", before), ("after", after)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name}={value!r} is not allowed; allowed: integers of at least 0")
    unique = len(ids) + torch.arange(before + after)[:, None].expand(-1, ids.shape[1])
    special = torch.cat([ids[:1, :1].expand(before + after, 1), unique[:, 1:]], 1)
    return torch.cat([special[:before], ids, special[before:]])


def span_parents(spans: Sequence[tuple[int, int]], length: int) -> Tensor:
    """Return the parents of a tree made of a root and spans of tokens.

    Each span is a child of the smallest span around it.

    Args:
        spans: (first token, one past the last) of every group, in any order.
        length: Number of tokens.

    Raises:
        ValueError: A span without tokens or beyond them, or two spans that overlap without one
            inside the other.
    """
    parents = torch.full((length + len(spans) + 1,), -1, dtype=torch.long)
    root = length + len(spans)
    owner = torch.full((length,), root, dtype=torch.long)
    for start, stop in spans:
        if not 0 <= start < stop <= length:
            raise ValueError(
                f"span ({start}, {stop}) is not allowed; allowed: 0 <= start < stop <= {length}"
            )
    # From left to right, and of equal starts the longest first: a span then follows all spans
    # around it.
    order = sorted(enumerate(spans), key=lambda s: (s[1][0], -s[1][1]))
    open_spans: list[tuple[int, int, int]] = []
    for number, (start, stop) in order:
        while open_spans and open_spans[-1][1] <= start:
            open_spans.pop()
        if open_spans and open_spans[-1][1] < stop:
            a, b, _ = open_spans[-1]
            raise ValueError(
                f"spans ({a}, {b}) and ({start}, {stop}) overlap; allowed: one within the other, or none in common"
            )
        parents[length + number] = open_spans[-1][2] if open_spans else root
        # Inner spans come later, and take their tokens over.
        owner[start:stop] = length + number
        open_spans.append((start, stop, length + number))
    parents[:length] = owner
    return parents


def joined_ids(parts: Sequence, kind: str) -> tuple[Tensor, tuple[str, ...]]:
    """Return group ids and names of kinds of joined hierarchies.

    Group ids are int64 [rows, length, levels].

    Args:
        parts, kind: As in `Hierarchy.join`.

    Raises:
        ValueError: No hierarchy, or numbers of rows that differ.
    """
    trees = [p for p in parts if not isinstance(p, int)]
    rows = sorted({p.rows for p in trees} - {1}) or [1]
    if not trees or len(rows) > 1:
        raise ValueError(
            f"the parts have {rows} rows; allowed: at least one hierarchy, and one number of rows besides 1"
        )
    names = tuple(dict.fromkeys(["", kind, *(name for p in trees for name in p.kind_names)]))
    # On the level below the root, ids below len(parts) are whole parts, and higher ids are special
    # tokens.
    columns, unique = [], len(parts)
    for number, part in enumerate(parts):
        if isinstance(part, int):
            ids = torch.arange(unique, unique + part)[None, :, None]
            unique += part
        else:
            ids = part.to_ids()
            # Each part numbers its kinds from 1: translate them to the joined names.
            kinds = torch.tensor([names.index(name) for name in part.kind_names])
            translated = ids % KIND + KIND * kinds[ids.clamp_min(0) // KIND]
            ids = torch.where(ids >= 0, translated, -1)
            ids = torch.cat([torch.where(ids[..., :1] >= 0, number, -1), ids], -1)
        columns.append(ids.expand(rows[0], -1, -1))
    levels = max(ids.shape[-1] for ids in columns)
    joined = torch.cat([deepened_ids(ids, levels) for ids in columns], 1)
    whole = torch.where(joined[..., :1] >= 0, KIND * names.index(kind), -1)
    return torch.cat([whole, joined], -1), names
