"""One rooted tree over the tokens of a sequence, in a normal form, and its families level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Families:
    """Some inner nodes of one height, each with its children.

    Args:
        parent: int64 [F], node numbers.
        children: int64 [F, b], node numbers in the order of their first leaf, filled up with -1.
    """

    parent: Tensor
    children: Tensor

    @cached_property
    def real(self) -> Tensor:
        """Bool [F, b]: which entries of `children` are nodes."""
        return self.children >= 0


@dataclass(frozen=True, eq=False)
class Tree:
    """A rooted tree whose leaves are the real tokens, in order. Make one with `Tree.from_parents`.

    Leaves are nodes 0 ... leaves - 1. Inner nodes follow by height, and among equals by their first leaf, so that a
    child always stands before its parent and the root is last. No inner node has a single child, except the root of
    a tree of one leaf. Groups need not be contiguous.

    Args:
        parents: int64 [nodes] on the CPU, -1 for the root.
        kinds: int64 [nodes]; for an inner node, the kind of the family whose parent it is (0: no kind).
        kind_names: names of the kinds; the first one, of kind 0, is "".
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
        """The tree in normal form; unary chains are collapsed, and what stays is the node nearest to the leaves.

        Args:
            parents: one entry a node, the leaves first in token order, -1 for the root; inner nodes in any order.
            kinds: one entry a node, or None for no kinds.
            kind_names: names of the kinds, "" first.

        Raises:
            ValueError: no root or several, a parent out of range, a cycle, an inner node without children.
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
        return cls(*_sort_nodes(*_collapse_chains(parents, kinds)), tuple(kind_names))

    @classmethod
    def flat(cls, leaves: int) -> Tree:
        """All leaves under one root."""
        return cls.from_parents([leaves] * leaves + [-1])

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.parents)

    @cached_property
    def leaves(self) -> int:
        """Number of leaves."""
        return int(self.parents[:-1].min())

    @cached_property
    def depth(self) -> Tensor:
        """int64 [nodes], 0 for the root."""
        return _compute_depths(self.parents)

    @cached_property
    def height(self) -> Tensor:
        """int64 [nodes], 0 for leaves; an inner node's is one more than its highest child's."""
        return _gather_from_below(
            self.parents, self.depth, torch.zeros_like(self.parents), "amax", 1
        )

    @cached_property
    def sizes(self) -> Tensor:
        """int64 [nodes], the number of leaves under a node, |A|."""
        ones = (torch.arange(self.nodes) < self.leaves).long()
        return _gather_from_below(self.parents, self.depth, ones, "sum")

    @cached_property
    def first_leaf(self) -> Tensor:
        """int64 [nodes], the first leaf under a node."""
        return _gather_from_below(
            self.parents, self.depth, torch.arange(self.nodes).clamp_max(self.leaves), "amin"
        )

    @cached_property
    def branching(self) -> Tensor:
        """int64 [nodes], the number of children."""
        return torch.bincount(self.parents[:-1], minlength=self.nodes)

    @cached_property
    def families(self) -> list[Families]:
        """All inner nodes with their children, by height from the bottom up.

        One entry holds nodes of one height whose numbers of children share a power of two (b to 2b - 1), so that
        at most half of its entries are filling. Every child stands in an earlier entry than its parent.
        """
        by_leaf = self.first_leaf[:-1].argsort(stable=True)
        siblings = by_leaf[
            self.parents[by_leaf].argsort(stable=True)
        ]  # all nodes but the root, by parent
        offsets = (
            self.branching.cumsum(0) - self.branching
        )  # where a node's children begin among them
        inner = torch.arange(self.leaves, self.nodes)
        key = self.height[inner] * 64 + torch.frexp(self.branching[inner].double())[1].long()
        families = []
        for value in key.unique().tolist():  # sorted: by height, then by width
            parent = inner[key == value]
            count = self.branching[parent]
            place = torch.arange(int(count.max()))
            index = (offsets[parent][:, None] + place).clamp(max=self.nodes - 2)
            families.append(
                Families(parent, torch.where(place < count[:, None], siblings[index], -1))
            )
        return families

    def same(self, other: Tree) -> bool:
        """Whether both are the same tree with the same kinds."""
        names = [[t.kind_names[k] for k in t.kinds.tolist()] for t in (self, other)]
        return torch.equal(self.parents, other.parents) and names[0] == names[1]


def checked_parents(parents: Sequence[int] | Tensor) -> Tensor:
    """Parent pointers as int64 [nodes] on the CPU.

    Raises:
        ValueError: they are not one rooted tree with the leaves first.
    """
    parents = torch.as_tensor(parents).cpu()
    if (
        parents.dim() != 1
        or parents.is_floating_point()
        or parents.dtype == torch.bool
        or len(parents) < 2
    ):
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
    up = torch.where(parents == -1, roots[0], parents)
    for _ in range(nodes.bit_length()):  # after enough doublings of the step, all stand at the root
        up = up[up]
    if lost := _list_indices(up != roots[0]):
        raise ValueError(
            f"nodes {_quote_some(lost)} are in or under a cycle of parents; allowed: parents that lead to the root"
        )
    childless = _count_children(parents) == 0
    leaves = int(childless.long().cumprod(0).sum())
    if late := _list_indices(childless & (torch.arange(nodes) >= leaves)):
        raise ValueError(
            f"inner nodes {_quote_some(late)} cover no token; allowed: leaves first, in token order (here 0 to "
            f"{leaves - 1}), then inner nodes with at least one child each"
        )
    return parents


def _list_indices(mask: Tensor) -> list[int]:
    return mask.nonzero()[:, 0].tolist()


def _quote_some(numbers: list[int], most: int = 5) -> str:
    return ", ".join(map(str, numbers[:most])) + (", ..." if len(numbers) > most else "")


def _count_children(parents: Tensor) -> Tensor:
    return torch.bincount(parents[parents >= 0], minlength=len(parents))


def _compute_depths(parents: Tensor) -> Tensor:
    """Steps to the root, by doubling."""
    root = _list_indices(parents == -1)[0]
    up, depth = torch.where(parents == -1, root, parents), (parents >= 0).long()
    while bool((up != root).any()):
        depth, up = depth + depth[up], up[up]
    return depth


def _gather_from_below(
    parents: Tensor, depth: Tensor, values: Tensor, how: str, step: int = 0
) -> Tensor:
    """Values of all nodes, each gathered from those of its children plus `step`, from the deepest up."""
    values, order = values.clone(), depth.argsort(descending=True, stable=True)
    for nodes in order.split(torch.bincount(depth).flip(0).tolist())[:-1]:
        values.scatter_reduce_(0, parents[nodes], values[nodes] + step, how)
    return values


def _collapse_chains(parents: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Without the inner nodes that have one child; a tree of one leaf keeps its root.

    Of a chain the node nearest to the leaves stays: its family is the one that has several members.
    """
    count = _count_children(parents)
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


def _sort_nodes(parents: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """The inner nodes in order of their height, then of their first leaf."""
    nodes, depth, leaf = len(parents), _compute_depths(parents), _count_children(parents) == 0
    height = _gather_from_below(parents, depth, torch.zeros_like(parents), "amax", 1)
    first = _gather_from_below(
        parents, depth, torch.where(leaf, torch.arange(nodes), nodes), "amin"
    )
    rank = (height * (nodes + 1) + first).argsort(
        stable=True
    )  # leaves have height 0 and stay in place
    place = torch.empty_like(rank)
    place[rank] = torch.arange(nodes)
    moved = parents[rank]
    return torch.where(moved >= 0, place[moved.clamp(min=0)], -1), kinds[rank]
