"""The tensor form of hierarchies: int64 [B, length, levels], the group of every token on every level, coarse to fine.

A group is known by its ids from the coarsest level down, so fine ids may start anew in every coarse group or go on:
both mean the same. Padding has -1 on all levels. A token that stands directly under a coarse node has ids of its own on
the finer levels. An id is a group's number plus `KIND` times the kind of the family below it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tree import Tree

#: Where the kind begins in an id, and where the ids begin that tokens get as they are generated.
KIND, FRESH = 1 << 40, 1 << 32


def checked_ids(ids: Tensor) -> Tensor:
    """Group ids as int64 [B, length, levels], from [length], [B, length] or that.

    Raises:
        ValueError: another form, or a token that is padding on some levels only.
    """
    ids = torch.as_tensor(ids)
    if (
        ids.is_floating_point()
        or ids.dtype == torch.bool
        or not 1 <= ids.dim() <= 3
        or 0 in ids.shape
    ):
        raise ValueError(
            f"hierarchy ids have shape {tuple(ids.shape)} and dtype {ids.dtype}; allowed: integers [length], "
            "[batch, length] or [batch, length, levels]"
        )
    ids = ids[None] if ids.dim() == 1 else ids
    ids = (ids[..., None] if ids.dim() == 2 else ids).long()
    padded = ids < 0
    mixed = (padded.any(-1) & ~padded.all(-1)).nonzero()[:1].tolist()
    if mixed:
        raise ValueError(
            f"token {mixed[0][1]} of row {mixed[0][0]} has no group on some levels only; allowed: -1 (padding) on all "
            "levels or none"
        )
    return ids


def checked_mask(mask: Tensor, length: int) -> Tensor:
    """A padding mask as bool [B, length]."""
    mask = torch.as_tensor(mask)
    if mask.dim() != 2 or mask.shape[1] != length:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; allowed: [batch, {length}]"
        )
    real = (mask != 0).cpu()
    if not bool(real.any(1).all()):
        raise ValueError(
            "attention_mask has a row without real tokens; allowed: at least one in every row"
        )
    return real


def tree_of_ids(ids: Tensor, kind_names: tuple[str, ...] = ("",)) -> tuple[Tree, Tensor]:
    """The tree over the tokens of one row, ids [length, levels], that are no padding; and their indices [leaves].

    Args:
        kind_names: a name for every kind in the ids, "" first; ("",): kinds are called "kind 1", "kind 2", ...

    Raises:
        ValueError: all tokens are padding, or names are given, and too few.
    """
    ids = ids.cpu()
    tokens = (ids[:, 0] >= 0).nonzero()[:, 0]
    if not len(tokens):
        raise ValueError("a row of the hierarchy has no token but padding; allowed: at least one")
    group = torch.zeros(len(tokens), dtype=torch.long)
    groups = []  # of every level, coarse to fine: the group of every leaf, numbered from 0
    for column in ids[tokens].unbind(1):
        values, number = column.unique(return_inverse=True)
        _, group = (group * len(values) + number).unique(return_inverse=True)
        groups.append(group)
    below, nodes = torch.arange(len(tokens)), len(tokens)
    parents, kinds = torch.empty(0, dtype=torch.long), torch.zeros(nodes, dtype=torch.long)
    for group, column in zip(reversed(groups), reversed(ids[tokens].unbind(1))):
        parents = torch.cat([parents, _scatter_values(below, group + nodes)])
        kinds = torch.cat([kinds, _scatter_values(group, column // KIND)])
        below, nodes = group, len(kinds)
    parents = torch.cat([parents, torch.full((nodes - len(parents),), nodes), torch.tensor([-1])])
    kinds = torch.cat([kinds, torch.zeros(1, dtype=torch.long)])
    most = int(kinds.max())
    if any(kind_names) and most >= len(kind_names):
        raise ValueError(
            f"kind_names has {len(kind_names)} names, and the ids have families of kind {most}; allowed: {most + 1} "
            "names or more, '' first"
        )
    names = (
        kind_names if most < len(kind_names) else ("", *(f"kind {k}" for k in range(1, most + 1)))
    )
    return Tree.from_parents(parents, kinds, names), tokens


def _scatter_values(index: Tensor, values: Tensor) -> Tensor:
    """A tensor with these values at these places, which fill it."""
    out = torch.empty(int(index.max()) + 1, dtype=torch.long)
    out[index] = values
    return out


def ids_of_tree(tree: Tree, tokens: Tensor, length: int, levels: int | None = None) -> Tensor:
    """Group ids [length, levels] of one tree: the numbers of its nodes.

    Args:
        tree: the tree; where its root has a kind, the coarsest level is the root itself.
        tokens: int64 [leaves], the token of every leaf.
        length: with padding.
        levels: at least `levels_of(tree)`, the default; the finest are filled with ids of single tokens.
    """
    numbers = torch.arange(tree.nodes) + tree.kinds * KIND
    skip = 0 if int(tree.kinds[-1]) else 1
    levels = levels_of(tree) if levels is None else levels
    node = torch.arange(tree.leaves)
    path = [numbers[node]]
    for depth in range(
        int(tree.depth.max()), skip, -1
    ):  # from a leaf up, waiting where it is not so deep
        node = torch.where(tree.depth[node] == depth, tree.parents[node], node)
        path.append(numbers[node])
    path = path[:0:-1] if len(path) > 1 else path  # coarse to fine, without the leaves themselves
    path += [numbers[: tree.leaves]] * (levels - len(path))
    ids = torch.full((length, levels), -1, dtype=torch.long)
    ids[tokens] = torch.stack(path, 1)
    return ids


def levels_of(tree: Tree) -> int:
    """Levels that the tensor form of a tree needs."""
    return max(1, int(tree.depth.max()) - (0 if int(tree.kinds[-1]) else 1))


def extended_ids(ids: Tensor, more: int) -> Tensor:
    """Group ids with `more` tokens at the end, each a sibling of the last real one that was there.

    A new token stands in every group of the last token that has another member; below those it stands alone.
    Extending in one step or in several gives the same.

    Args:
        ids: int64 [B, length, levels], with a token that is no padding in every row.
        more: how many.
    """
    if more <= 0:
        return ids
    place = torch.arange(ids.shape[1], device=ids.device)
    end = torch.where(ids[..., 0] >= 0, place, 0).amax(1)
    last = ids[torch.arange(len(ids), device=ids.device), end][:, None]
    shared = (ids == last).cumprod(-1).sum(1, keepdim=True) > 1  # [B, 1, levels]
    fresh = FRESH + ids.shape[1] + torch.arange(more, device=ids.device)
    return torch.cat([ids, torch.where(shared, last, fresh[None, :, None])], 1)


def deepened_ids(ids: Tensor, levels: int) -> Tensor:
    """Group ids [..., length, levels] with finer levels added, on which every token stands alone."""
    more = levels - ids.shape[-1]
    if more <= 0:
        return ids
    alone = torch.arange(ids.shape[-2], device=ids.device)[:, None].expand(*ids.shape[:-1], more)
    return torch.cat([ids, torch.where(ids[..., :1] >= 0, alone, -1)], -1)
