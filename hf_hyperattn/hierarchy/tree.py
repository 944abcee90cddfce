"""Represent one rooted tree over the tokens of a sequence, in a normal form.

This module shows how nodes are numbered, and how sizes, depths and families are computed from
parent pointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Families:
    """Hold some inner nodes of one height, each with its children.

    Args:
        parent: int64 [F], node numbers.
        children: int64 [F, b], node numbers in the order of their first leaf, filled up with -1.
    """

    parent: Tensor
    children: Tensor

    @cached_property
    def real(self) -> Tensor:
        """Return bool [F, b]: which entries of `children` are nodes."""
        return self.children >= 0


@dataclass(frozen=True, eq=False)
class Tree:
    """Hold a rooted tree whose leaves are the real tokens, in order.

    Make one with `Tree.from_parents`. Leaves are nodes 0 ... leaves - 1. Inner nodes follow by
    height, and within one height by their first leaf. A child so always stands before its parent,
    and the root is last. No inner node has a single child, except the root of a tree of one leaf.
    Groups need not be contiguous.

    Args:
        parents: int64 [nodes] on the CPU, -1 for the root.
        kinds: int64 [nodes]. For an inner node, the kind of the family of its children; 0 is no
            kind.
        kind_names: Names of the kinds; the name of kind 0 is "".
    """

    parents: Tensor
    kinds: Tensor
    kind_names: tuple[str, ...] = ("",)

    @classmethod
    def from_parents(
        cls,
        parents: Sequence[int] | Tensor,
        kinds: Sequence[int] | Tensor | None = None,
        kind_names=("",),
    ) -> Tree:
        """Return the tree in normal form.

        A chain of nodes with a single child is collapsed into its lowest node.

        Args:
            parents: One entry per node, the leaves first in token order, -1 for the root; inner
                nodes in any order.
            kinds: One entry per node; None: no kinds.
            kind_names: Names of the kinds, "" first.

        Raises:
            ValueError: No root or several, a parent out of range, a cycle, an inner node without
                children.
        """
        parents = checked_parents(parents)
        kinds = torch.zeros_like(parents) if kinds is None else torch.as_tensor(kinds).long().cpu()
        if kinds.shape != parents.shape:
            raise ValueError(
                f"kinds has shape {tuple(kinds.shape)}; allowed: one a node, {tuple(parents.shape)}"
            )
        if kinds.numel() and (kinds.min() < 0 or kinds.max() >= len(kind_names)):
            raise ValueError(
                f"kinds goes from {int(kinds.min())} to {int(kinds.max())}; allowed: 0 to {len(kind_names) - 1}, "
                "numbers of kind_names"
            )
        parents, kinds = _sort_nodes(*_collapse_chains(parents, kinds))
        return cls(parents, kinds, tuple(kind_names))

    @classmethod
    def flat(cls, leaves: int) -> Tree:
        """Return the tree in which all leaves are children of the root."""
        return cls.from_parents([leaves] * leaves + [-1])

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return len(self.parents)

    @cached_property
    def leaves(self) -> int:
        """Return the number of leaves."""
        # The lowest number of a parent is the first inner node, which follows the last leaf.
        return int(self.parents[:-1].min())

    @cached_property
    def depth(self) -> Tensor:
        """Return int64 [nodes], the depth of every node, 0 for the root."""
        return _compute_depths(self.parents)

    @cached_property
    def height(self) -> Tensor:
        """Return int64 [nodes], the height of every node.

        Leaves have height 0, and inner nodes one more than their highest child.
        """
        zeros = torch.zeros_like(self.parents)
        return _gather_from_below(self.parents, self.depth, zeros, "amax", 1)

    @cached_property
    def sizes(self) -> Tensor:
        """Return int64 [nodes], the number |A| of leaves under every node."""
        ones = (torch.arange(self.nodes) < self.leaves).long()
        return _gather_from_below(self.parents, self.depth, ones, "sum")

    @cached_property
    def first_leaf(self) -> Tensor:
        """Return int64 [nodes], the first leaf under every node."""
        # Inner nodes start with a number that is larger than every leaf.
        numbers = torch.arange(self.nodes).clamp_max(self.leaves)
        return _gather_from_below(self.parents, self.depth, numbers, "amin")

    @cached_property
    def branching(self) -> Tensor:
        """Return int64 [nodes], the number of children of every node."""
        return torch.bincount(self.parents[:-1], minlength=self.nodes)

    @cached_property
    def families(self) -> list[Families]:
        """Return all inner nodes with their children, by height from the bottom up.

        One entry holds nodes of one height whose numbers of children share a power of two (b to 2b
        - 1), so at most half of it is filling. Every child stands in an earlier entry than its
        parent.
        """
        # All nodes but the root, by parent; the children of one parent by their first leaf.
        by_leaf = self.first_leaf[:-1].argsort(stable=True)
        siblings = by_leaf[self.parents[by_leaf].argsort(stable=True)]
        # The place among `siblings` where a node's children begin.
        offsets = self.branching.cumsum(0) - self.branching
        inner = torch.arange(self.leaves, self.nodes)
        # One number for height and power of two. The power of an int64 is below 64.
        power = torch.frexp(self.branching[inner].double())[1].long()
        key = self.height[inner] * 64 + power
        families = []
        # `unique` sorts: by height, then by width.
        for value in key.unique().tolist():
            parent = inner[key == value]
            count = self.branching[parent]
            place = torch.arange(int(count.max()))
            index = (offsets[parent][:, None] + place).clamp(max=self.nodes - 2)
            children = torch.where(place < count[:, None], siblings[index], -1)
            families.append(Families(parent, children))
        return families

    def same(self, other: Tree) -> bool:
        """Return whether both trees have the same nodes and the same names of kinds."""
        names = [[t.kind_names[k] for k in t.kinds.tolist()] for t in (self, other)]
        return torch.equal(self.parents, other.parents) and names[0] == names[1]


def checked_parents(parents: Sequence[int] | Tensor) -> Tensor:
    """Return parent pointers as int64 [nodes] on the CPU.

    Raises:
        ValueError: They are not one rooted tree with the leaves first.
    """
    parents = torch.as_tensor(parents).cpu()
    is_integer = not (parents.is_floating_point() or parents.dtype == torch.bool)
    if parents.dim() != 1 or not is_integer or len(parents) < 2:
        raise ValueError(
            f"parents has shape {tuple(parents.shape)} and dtype {parents.dtype}; allowed: integers, one a node, at "
            "least a leaf and a root"
        )
    parents, nodes = parents.long(), len(parents)
    roots = _list_indices(parents == -1)
    if len(roots) != 1:
        raise ValueError(
            f"parents has {len(roots)} roots ({_quote_some(roots)}); allowed: one node with parent -1"
            + (": the others are orphans" if roots else "; without a root there is a cycle")
        )
    if wrong := _list_indices((parents < -1) | (parents >= nodes)):
        raise ValueError(
            f"nodes {_quote_some(wrong)} have parents out of range; allowed: -1 for the root, 0 to {nodes - 1}"
        )
    # Each round doubles the length of the step. Then every node outside of cycles has reached the
    # root.
    up = torch.where(parents == -1, roots[0], parents)
    for _ in range(nodes.bit_length()):
        up = up[up]
    if lost := _list_indices(up != roots[0]):
        raise ValueError(
            f"nodes {_quote_some(lost)} are in or under a cycle of parents; allowed: parents that lead to the root"
        )
    childless = _count_children(parents) == 0
    # The leaves are the childless nodes before the first node with children.
    leaves = int(childless.long().cumprod(0).sum())
    if late := _list_indices(childless & (torch.arange(nodes) >= leaves)):
        raise ValueError(
            f"inner nodes {_quote_some(late)} cover no token; allowed: leaves first, in token order (here 0 to "
            f"{leaves - 1}), then inner nodes with at least one child each"
        )
    return parents


def _list_indices(mask: Tensor) -> list[int]:
    """Return the indices at which a mask [n] is True."""
    return mask.nonzero()[:, 0].tolist()


def _quote_some(numbers: list[int], most: int = 5) -> str:
    """Return the first numbers as text for a message."""
    return ", ".join(map(str, numbers[:most])) + (", ..." if len(numbers) > most else "")


def _count_children(parents: Tensor) -> Tensor:
    """Return int64 [nodes], the number of children of every node."""
    return torch.bincount(parents[parents >= 0], minlength=len(parents))


def _compute_depths(parents: Tensor) -> Tensor:
    """Return int64 [nodes], the number of steps to the root."""
    root = _list_indices(parents == -1)[0]
    up = torch.where(parents == -1, root, parents)
    depth = (parents >= 0).long()
    # Pointer doubling: a deep tree takes log2(depth) rounds.
    while bool((up != root).any()):
        depth, up = depth + depth[up], up[up]
    return depth


def _gather_from_below(
    parents: Tensor, depth: Tensor, values: Tensor, how: str, step: int = 0
) -> Tensor:
    """Return the values of all nodes, each combined with the values of its children.

    Args:
        parents, depth: int64 [nodes].
        values: int64 [nodes], starting values.
        how: "sum", "amin" or "amax".
        step: Added to a child's value.
    """
    values, order = values.clone(), depth.argsort(descending=True, stable=True)
    # The deepest level first, and without the root. A child is then complete before its parent
    # reads it.
    for nodes in order.split(torch.bincount(depth).flip(0).tolist())[:-1]:
        values.scatter_reduce_(0, parents[nodes], values[nodes] + step, how)
    return values


def _collapse_chains(parents: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Return parents and kinds without the inner nodes that have one child.

    The lowest node of a chain stays, because its family has several members. A tree of one leaf
    keeps its root.
    """
    count = _count_children(parents)
    keep = count != 1
    if int((count == 0).sum()) == 1:
        return torch.tensor([1, -1]), torch.stack([torch.zeros_like(kinds[0]), kinds[parents[0]]])
    if bool(keep.all()):
        return parents, kinds
    # `end` is the place above the root.
    end = len(parents)
    up = torch.where(parents >= 0, parents, end)
    # Follow each path to a node that stays: itself for nodes that stay, one up for others, until
    # nothing moves.
    target = torch.cat([torch.where(keep, torch.arange(end), up), torch.tensor([end])])
    while not torch.equal(target, further := target[target]):
        target = further
    number = torch.cat([keep.long().cumsum(0) - 1, torch.tensor([-1])])
    return number[target[up[keep]]], kinds[keep]


def _sort_nodes(parents: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Return parents and kinds with the inner nodes sorted.

    They are sorted by height, then by their first leaf.
    """
    nodes = len(parents)
    depth = _compute_depths(parents)
    is_leaf = _count_children(parents) == 0
    height = _gather_from_below(parents, depth, torch.zeros_like(parents), "amax", 1)
    numbers = torch.where(is_leaf, torch.arange(nodes), nodes)
    first = _gather_from_below(parents, depth, numbers, "amin")
    # Leaves have height 0, so they stay in place.
    rank = (height * (nodes + 1) + first).argsort(stable=True)
    place = torch.empty_like(rank)
    place[rank] = torch.arange(nodes)
    moved = parents[rank]
    return torch.where(moved >= 0, place[moved.clamp(min=0)], -1), kinds[rank]
