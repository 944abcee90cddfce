"""Convert trees to group ids and back.

This module shows the tensor form of hierarchies: int64 [B, length, levels], the group of every
token on every level, coarse to fine.

A group is identified by its ids from the coarsest level down. Fine ids may start again in every
coarse group or go on: both mean the same. Padding has -1 on all levels. A token that is a direct
child of a coarse node has unique ids on the finer levels. An id is a group's number plus `KIND`
times the kind of the family below it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tree import Tree

# Two numbers that no count of groups reaches: ids count kinds from KIND, and tokens that are
# generated from FRESH.
KIND = 1 << 40
FRESH = 1 << 32


def checked_ids(ids: Tensor) -> Tensor:
    """Return group ids as int64 [B, length, levels].

    Args:
        ids: Integers [length], [B, length] or [B, length, levels].

    Raises:
        ValueError: Another shape or dtype, or a token that is padding on some levels only.
    """
    ids = torch.as_tensor(ids)
    is_integer = not (ids.is_floating_point() or ids.dtype == torch.bool)
    if not is_integer or not 1 <= ids.dim() <= 3 or 0 in ids.shape:
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
    """Return a padding mask as bool [B, length] on the CPU.

    Raises:
        ValueError: Another shape, or a row without real tokens.
    """
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
    """Return the tree over the real tokens of one row, and their indices [leaves].

    Args:
        ids: int64 [length, levels].
        kind_names: A name for every kind in the ids, "" first. ("",): kinds are called "kind 1",
            "kind 2", ...

    Raises:
        ValueError: All tokens are padding, or too few names are given.
    """
    ids = ids.cpu()
    tokens = (ids[:, 0] >= 0).nonzero()[:, 0]
    if not len(tokens):
        raise ValueError("a row of the hierarchy has no token but padding; allowed: at least one")

    # For every level, coarse to fine: the group of every leaf, numbered from 0. A group is a pair
    # of coarser group and id, so equal ids in different coarse groups are told apart.
    group = torch.zeros(len(tokens), dtype=torch.long)
    groups = []
    for column in ids[tokens].unbind(1):
        values, number = column.unique(return_inverse=True)
        _, group = (group * len(values) + number).unique(return_inverse=True)
        groups.append(group)

    # Parent pointers from the leaves up, level by level; the root is the last node.
    below, nodes = torch.arange(len(tokens)), len(tokens)
    parents = torch.empty(0, dtype=torch.long)
    kinds = torch.zeros(nodes, dtype=torch.long)
    for group, column in zip(reversed(groups), reversed(ids[tokens].unbind(1))):
        parents = torch.cat([parents, _scatter_values(below, group + nodes)])
        kinds = torch.cat([kinds, _scatter_values(group, column // KIND)])
        below, nodes = group, len(kinds)
    parents = torch.cat([parents, torch.full((nodes - len(parents),), nodes), torch.tensor([-1])])
    kinds = torch.cat([kinds, torch.zeros(1, dtype=torch.long)])
    return Tree.from_parents(parents, kinds, _names_of_kinds(kinds, kind_names)), tokens


def _names_of_kinds(kinds: Tensor, kind_names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a name for every kind, as in `tree_of_ids`.

    Raises:
        ValueError: Too few names are given.
    """
    most = int(kinds.max())
    if most < len(kind_names):
        return kind_names
    if any(kind_names):
        raise ValueError(
            f"kind_names has {len(kind_names)} names, and the ids have families of kind {most}; allowed: {most + 1} "
            "names or more, '' first"
        )
    return ("", *(f"kind {k}" for k in range(1, most + 1)))


def _scatter_values(index: Tensor, values: Tensor) -> Tensor:
    """Return a tensor with these values at these indices, which must fill it."""
    out = torch.empty(int(index.max()) + 1, dtype=torch.long)
    out[index] = values
    return out


def ids_of_tree(tree: Tree, tokens: Tensor, length: int, levels: int | None = None) -> Tensor:
    """Return the group ids [length, levels] of one tree: the numbers of its nodes.

    Args:
        tree: The tree. If its root has a kind, the coarsest level is the root itself.
        tokens: int64 [leaves], the token of every leaf.
        length: Number of tokens, padding included.
        levels: At least `levels_of(tree)`, the default. Further levels have unique ids for every
            token.
    """
    numbers = torch.arange(tree.nodes) + tree.kinds * KIND
    skip = 0 if int(tree.kinds[-1]) else 1
    levels = levels_of(tree) if levels is None else levels
    # From the leaves up, one depth at a time. Leaves that are less deep wait at their node.
    node = torch.arange(tree.leaves)
    path = [numbers[node]]
    for depth in range(int(tree.depth.max()), skip, -1):
        node = torch.where(tree.depth[node] == depth, tree.parents[node], node)
        path.append(numbers[node])
    # Coarse to fine, without the leaves themselves.
    path = path[:0:-1] if len(path) > 1 else path
    path += [numbers[: tree.leaves]] * (levels - len(path))
    ids = torch.full((length, levels), -1, dtype=torch.long)
    ids[tokens] = torch.stack(path, 1)
    return ids


def levels_of(tree: Tree) -> int:
    """Return the number of levels of a tree's group ids."""
    # The root needs a level only for its kind.
    without_root = 0 if int(tree.kinds[-1]) else 1
    return max(1, int(tree.depth.max()) - without_root)


def extended_ids(ids: Tensor, more: int) -> Tensor:
    """Return group ids with new siblings of the last real token at the end.

    A new token joins every group of the last token that has another member. On finer levels its ids
    are unique. Extending in one step or in several gives the same result.

    Args:
        ids: int64 [B, length, levels], with a real token in every row.
        more: Number of new tokens.
    """
    if more <= 0:
        return ids
    place = torch.arange(ids.shape[1], device=ids.device)
    end = torch.where(ids[..., 0] >= 0, place, 0).amax(1)
    last = ids[torch.arange(len(ids), device=ids.device), end][:, None]
    # The number of tokens with the same ids down to each level; a group of one is the last token
    # alone.
    shared = (ids == last).cumprod(-1).sum(1, keepdim=True) > 1  # [B, 1, levels]
    fresh = FRESH + ids.shape[1] + torch.arange(more, device=ids.device)
    return torch.cat([ids, torch.where(shared, last, fresh[None, :, None])], 1)


def deepened_ids(ids: Tensor, levels: int) -> Tensor:
    """Return group ids [..., length, levels] with finer levels added.

    On these levels every token has a unique id.

    Args:
        ids: int64 [..., length, fewer levels].
        levels: Number of levels of the result.
    """
    more = levels - ids.shape[-1]
    if more <= 0:
        return ids
    unique = torch.arange(ids.shape[-2], device=ids.device)[:, None].expand(*ids.shape[:-1], more)
    return torch.cat([ids, torch.where(ids[..., :1] >= 0, unique, -1)], -1)
