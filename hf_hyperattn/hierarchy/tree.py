"""One rooted tree over the tokens of a sequence, in a normal form, and its families level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .normal import checked_parents, depths, levels_by_depth, normalised


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
        cls, parents: Sequence[int] | Tensor, kinds: Sequence[int] | Tensor | None = None, kind_names=("",)
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
        return cls(*normalised(parents, kinds), tuple(kind_names))

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
        return depths(self.parents)

    @cached_property
    def _by_depth(self) -> list[Tensor]:
        """Nodes of every depth, deepest first, the root left out."""
        return levels_by_depth(self.depth)

    @cached_property
    def height(self) -> Tensor:
        """int64 [nodes], 0 for leaves; an inner node's is one more than its highest child's."""
        return self._gathered(torch.zeros_like(self.parents), "amax", 1)

    @cached_property
    def sizes(self) -> Tensor:
        """int64 [nodes], the number of leaves under a node, |A|."""
        ones = (torch.arange(self.nodes) < self.leaves).long()
        return self._gathered(ones, "sum", 0)

    @cached_property
    def first_leaf(self) -> Tensor:
        """int64 [nodes], the first leaf under a node."""
        first = torch.arange(self.nodes)
        first[self.leaves :] = self.leaves
        return self._gathered(first, "amin", 0)

    def _gathered(self, values: Tensor, how: str, step: int) -> Tensor:
        values = values.clone()
        for nodes in self._by_depth:
            values.scatter_reduce_(0, self.parents[nodes], values[nodes] + step, how)
        return values

    @cached_property
    def order(self) -> Tensor:
        """int64 [nodes - 1]: all nodes but the root, by parent and among siblings by first leaf."""
        by_leaf = self.first_leaf[:-1].argsort(stable=True)
        return by_leaf[self.parents[by_leaf].argsort(stable=True)]

    @cached_property
    def branching(self) -> Tensor:
        """int64 [nodes], the number of children."""
        return torch.bincount(self.parents[:-1], minlength=self.nodes)

    @cached_property
    def _offsets(self) -> Tensor:
        """int64 [nodes]: where the children of a node begin in `order`."""
        return self.branching.cumsum(0) - self.branching

    @cached_property
    def child_rank(self) -> Tensor:
        """int64 [nodes], the position among siblings by first leaf; 0 for the root."""
        rank = torch.zeros_like(self.parents)
        rank[self.order] = torch.arange(self.nodes - 1) - self._offsets[self.parents[self.order]]
        return rank

    @cached_property
    def families(self) -> list[Families]:
        """All inner nodes with their children, by height from the bottom up.

        One entry holds nodes of one height whose numbers of children share a power of two (b to 2b - 1), so that
        at most half of its entries are filling. Every child stands in an earlier entry than its parent.
        """
        inner = torch.arange(self.leaves, self.nodes)
        width = torch.frexp(self.branching[inner].double())[1].long()
        key = self.height[inner] * 64 + width
        found = []
        for value in key.unique().tolist():  # sorted: by height, then by width
            parent = inner[key == value]
            count = self.branching[parent]
            place = torch.arange(int(count.max()))
            index = (self._offsets[parent][:, None] + place).clamp(max=self.nodes - 2)
            children = torch.where(place < count[:, None], self.order[index], -1)
            found.append(Families(parent, children))
        return found

    def same(self, other: Tree) -> bool:
        """Whether both are the same tree with the same kinds."""
        names = [[t.kind_names[k] for k in t.kinds.tolist()] for t in (self, other)]
        return torch.equal(self.parents, other.parents) and names[0] == names[1]
