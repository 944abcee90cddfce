"""Checks of parent pointers, and their normal form: unary chains collapsed, nodes numbered bottom-up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def checked_parents(parents: Sequence[int] | Tensor) -> Tensor:
    """Parent pointers as int64 [nodes] on the CPU.

    Raises:
        ValueError: they are not one rooted tree with the leaves first.
    """
    found = torch.as_tensor(parents).cpu()
    if found.dim() != 1 or found.is_floating_point() or found.dtype == torch.bool or len(found) < 2:
        raise ValueError(
            f"parents has shape {tuple(found.shape)} and dtype {found.dtype}; allowed: integers, one a node, at least "
            "a leaf and a root"
        )
    found = found.long()
    nodes = len(found)
    roots = (found == -1).nonzero()[:, 0].tolist()
    if len(roots) != 1:
        raise ValueError(
            f"parents has {len(roots)} roots ({_some(roots)}); allowed: one node with parent -1"
            + ("" if roots else "; without a root there is a cycle")
            + (": the others are orphans" if len(roots) > 1 else "")
        )
    wrong = ((found < -1) | (found >= nodes)).nonzero()[:, 0].tolist()
    if wrong:
        raise ValueError(
            f"nodes {_some(wrong)} have parents out of range; allowed: -1 for the root, 0 to {nodes - 1}"
        )
    _check_cycles(found, roots[0])
    _check_leaves(found)
    return found


def _check_cycles(parents: Tensor, root: int) -> None:
    """Every node leads to the root: after enough doublings of the step, all stand there."""
    up = torch.where(parents == -1, root, parents)
    for _ in range(len(parents).bit_length()):
        up = up[up]
    lost = (up != root).nonzero()[:, 0].tolist()
    if lost:
        raise ValueError(
            f"nodes {_some(lost)} are in or under a cycle of parents; allowed: parents that lead to the root"
        )


def _check_leaves(parents: Tensor) -> None:
    """The nodes without children are the first ones."""
    childless = torch.bincount(parents[parents >= 0], minlength=len(parents)) == 0
    leaves = int(childless.long().cumprod(0).sum())
    late = childless[leaves:].nonzero()[:, 0] + leaves
    if len(late):
        raise ValueError(
            f"inner nodes {_some(late.tolist())} cover no token; allowed: leaves first, in token order (here 0 to "
            f"{leaves - 1}), then inner nodes with at least one child each"
        )


def _some(numbers: list[int], most: int = 5) -> str:
    return ", ".join(map(str, numbers[:most])) + (", ..." if len(numbers) > most else "")


def levels_by_depth(depth: Tensor) -> list[Tensor]:
    """Numbers of the nodes of every depth but 0, the deepest first."""
    order = depth.argsort(descending=True, stable=True)
    counts = torch.bincount(depth).flip(0).tolist()
    return list(order.split(counts))[:-1]


def depths(parents: Tensor) -> Tensor:
    """Steps to the root; `parents` is a checked tree."""
    root = int((parents == -1).nonzero()[0, 0])
    up = torch.where(parents == -1, root, parents)
    depth = (parents >= 0).long()
    while bool((up != root).any()):
        depth = depth + depth[up]
        up = up[up]
    return depth


def normalised(parents: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Parents and kinds of the same tree with unary chains collapsed and the inner nodes in order.

    Of a chain the node nearest to the leaves stays: its family is the one that has several members.
    """
    parents, kinds = collapsed(parents, kinds)
    height, first = _bottom_up(parents)
    rank = (height * (len(parents) + 1) + first).argsort(
        stable=True
    )  # leaves have height 0 and stay in place
    place = torch.empty_like(rank)
    place[rank] = torch.arange(len(rank))
    moved = parents[rank]
    return torch.where(moved >= 0, place[moved.clamp(min=0)], -1), kinds[rank]


def collapsed(parents: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Without the inner nodes that have one child; a tree of one leaf keeps its root."""
    count = torch.bincount(parents[parents >= 0], minlength=len(parents))
    keep = count != 1
    if int((count == 0).sum()) == 1:
        return torch.tensor([1, -1]), torch.stack([torch.zeros_like(kinds[0]), kinds[parents[0]]])
    if bool(keep.all()):
        return parents, kinds
    end = len(parents)  # stands for the place above the root
    up = torch.where(parents >= 0, parents, end)
    # Where a path leads to: itself for nodes that stay, one up for the others, until nothing moves.
    target = torch.cat([torch.where(keep, torch.arange(end), up), torch.tensor([end])])
    while not torch.equal(target, further := target[target]):
        target = further
    number = torch.cat([keep.long().cumsum(0) - 1, torch.tensor([-1])])
    return number[target[up[keep]]], kinds[keep]


def _bottom_up(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Height and first leaf of every node."""
    nodes = len(parents)
    leaf = torch.bincount(parents[parents >= 0], minlength=nodes) == 0
    height = torch.zeros_like(parents)
    first = torch.where(leaf, torch.arange(nodes), nodes)
    for level in levels_by_depth(depths(parents)):
        height.scatter_reduce_(0, parents[level], height[level] + 1, "amax")
        first.scatter_reduce_(0, parents[level], first[level], "amin")
    return height, first
