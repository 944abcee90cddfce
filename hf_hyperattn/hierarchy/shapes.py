"""Trees that are no text: patches of an image in a quad-tree, groups given as spans, several signals under one root."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .ids import KIND, deepened_ids


def quadtree_ids(rows: int, columns: int, factor: int) -> Tensor:
    """Group ids [rows · columns, levels] of patches in raster order: cells of factor, factor², ... patches a side.

    The first level is the whole image; its family has kind 1, those of cells have kind 2. Cells start at the upper
    left; where a side is no power of the factor, those at the other end are smaller.

    Raises:
        ValueError: no patches, or a factor below 2.
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
    levels = [((row // side) * columns + column // side).reshape(-1) for side in reversed(sides)]
    whole = torch.zeros(rows * columns, dtype=torch.long)
    return torch.stack([whole + KIND, *(level + 2 * KIND for level in levels)], 1)


def add_special_ids(ids: Tensor, before: int, after: int) -> Tensor:
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
            raise ValueError(
                f"span ({start}, {stop}) is not allowed; allowed: 0 <= start < stop <= {length}"
            )
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


def joined_ids(parts: Sequence, kind: str) -> tuple[Tensor, tuple[str, ...]]:
    """Group ids [rows, length, levels] of hierarchies that follow each other, and names of kinds; arguments as in
    `Hierarchy.join`.
    """
    trees = [p for p in parts if not isinstance(p, int)]
    rows = sorted({p.rows for p in trees} - {1}) or [1]
    if not trees or len(rows) > 1:
        raise ValueError(
            f"the parts have {rows} rows; allowed: at least one hierarchy, and one number of rows besides 1"
        )
    names = tuple(dict.fromkeys(["", kind, *(name for p in trees for name in p.kind_names)]))
    columns, alone = (
        [],
        len(parts),
    )  # numbers below stand for whole parts, those from there on for special tokens
    for number, part in enumerate(parts):
        if isinstance(part, int):
            ids = torch.arange(alone, alone + part)[None, :, None]
            alone += part
        else:
            ids, kinds = (
                part.to_ids(),
                torch.tensor([names.index(name) for name in part.kind_names]),
            )
            ids = torch.where(ids >= 0, ids % KIND + KIND * kinds[ids.clamp_min(0) // KIND], -1)
            ids = torch.cat([torch.where(ids[..., :1] >= 0, number, -1), ids], -1)
        columns.append(ids.expand(rows[0], -1, -1))
    levels = max(ids.shape[-1] for ids in columns)
    joined = torch.cat([deepened_ids(ids, levels) for ids in columns], 1)
    whole = torch.where(joined[..., :1] >= 0, KIND * names.index(kind), -1)
    return torch.cat([whole, joined], -1), names
