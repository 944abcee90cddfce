"""Lay out the nodes of a hierarchy in memory.

One step up or down a hierarchy is then one batched operation per level. This module shows where
the numbers of a node stand, and how windows and trees are read and written alike.

Numbers of leaves are [R, K, leaves, ...], with R rows and K key heads. A *buffer* holds the numbers
of all nodes. A *group* is the families that one step works on.

Windows have one tensor per level, and the children of a level's families are a reshape of it. This
is 1.5 times as fast as one tensor over all nodes, from which the children of trees, and of windows
with padding, are gathered. Different trees in a batch are one forest: R is 1, and the leaves of all
rows stand in a line. Both layouts have

    groups, apart, kind_names         groups bottom-up; rows whose leaves stand apart, 1 or the batch; kinds of families
    to_leaves, from_leaves            tokens [batch, heads, length, ...] to leaves and back; 0 at filling and padding
    make_buffer(leaves)               a buffer with these numbers of leaves; 0 for the roots and at filling
    make_blank(like)                  the same without numbers of leaves
    read_leaves                       [R, K, leaves, ...]
    read_children, read_parents       of a group: [R, K, F, b, ...] and [R, K, F, ...]
    read_roots                        [batch, K, ...]
    put_children, put_parents, put_roots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from ....hierarchy import Families, Hierarchy, Tree

#: Numbers of all nodes: a list of one tensor per level, or one tensor. Only the layout looks into
#: it.
Buffer = Any

# Layouts live as long as their hierarchy. All layers of a model share it.
_LAYOUTS: WeakKeyDictionary[Hierarchy, dict] = WeakKeyDictionary()


def layout_of(hierarchy: Hierarchy, batch: int, device) -> Layout:
    """Return the layout of a hierarchy's nodes.

    It is made once and kept as long as the hierarchy.

    Args:
        hierarchy: Trees over the tokens.
        batch: Number of rows of the call.
        device: Device of the layout's tensors.

    Raises:
        ValueError: The hierarchy has neither one row nor `batch` rows.
    """
    if hierarchy.rows not in (1, batch):
        raise ValueError(
            f"the hierarchy has {hierarchy.rows} rows, the batch {batch}; allowed: 1 or {batch} rows, see "
            "Hierarchy.fitted"
        )
    known, key = _LAYOUTS.setdefault(hierarchy, {}), (batch, str(device))
    if key not in known:
        padded = hierarchy.starts is not None or hierarchy.stops is not None
        if hierarchy.is_windows and not padded:
            known[key] = WindowLayout(hierarchy, device)
        else:
            known[key] = TreeLayout(hierarchy.materialised, batch, device)
    return known[key]


@dataclass(frozen=True, eq=False)
class Group:
    """Hold the families that one step works on: F parents with up to b children each.

    Args:
        share: |B|/|A| of child B of parent A, float64 [R or 1, 1, F, b], 0 at filling.
        log_size: log|B|, float64, shaped as `share`, -inf at filling.
        fixed: bool, shaped as `share`: children whose own logit is ρ: inner nodes, and filling
            (with ρ = 0). None for families of leaves without filling.
        all_fixed: Whether all children are fixed.
        kind: int64 [F], numbers of the layout's `kind_names`.
        children, parents: Places in a buffer, which each layout writes in its own way.
    """

    share: Tensor
    log_size: Tensor
    fixed: Tensor | None
    all_fixed: bool
    kind: Tensor
    children: Any
    parents: int

    @classmethod
    def of_sizes(cls, size: Tensor, *, fixed: Tensor, **rest) -> Group:
        """Return a group from the sizes of its children.

        Args:
            size: float64, shaped as `share`.
            fixed: As in the class, never None.
            rest: `kind`, `children` and `parents`.
        """
        return cls(
            share=size / size.sum(-1, keepdim=True),
            log_size=size.log(),
            fixed=fixed if bool(fixed.any()) else None,
            all_fixed=bool(fixed.all()),
            **rest,
        )

    @property
    def families(self) -> int:
        """Return F, the number of families."""
        return self.share.shape[2]

    @property
    def width(self) -> int:
        """Return b, the largest number of children that fits."""
        return self.share.shape[3]

    @cached_property
    def kinds_present(self) -> list[int]:
        """Return the kinds of these families, each once."""
        return self.kind.unique().tolist()

    def most_children(self, kind: int) -> int:
        """Return the number of children of the largest family of a kind."""
        return int((self.share > 0).sum(-1)[..., self.kind == kind].max())


class WindowLayout:
    """Lay out windows without padding.

    There is one tensor per level, each filled up to a whole number of families. A window may hold a
    single node. Then the step changes nothing: its ρ and its mean are its child's.
    """

    apart, kind_names = 1, ("",)

    def __init__(self, hierarchy: Hierarchy, device):
        tokens = self.length = hierarchy.length
        # A window that holds all tokens is the root, so it is no level of its own.
        widths = [1, *(s for s in hierarchy.sizes or () if s < tokens)]
        self.groups: list[Group] = []
        #: Number of nodes of every level, filling included.
        self.filled: list[int] = []
        for level, (width, above) in enumerate(zip(widths, (*widths[1:], None))):
            nodes = -(-tokens // width)
            b = above // width if above else nodes
            self.groups.append(self._make_group(level, width, -(-nodes // b), b, device))
            self.filled.append(self.groups[-1].families * b)
        # One root above the last level.
        self.filled.append(1)

    def _make_group(self, level: int, width: int, families: int, b: int, device) -> Group:
        """Return the families of one level.

        Args:
            level: Level of the children.
            width: Number of tokens of a child.
            families, b: Number of families, and of children in each.
            device: Of the tensors.
        """
        start = torch.arange(families * b, device=device) * width
        # The last window may be incomplete, and filling has size 0.
        size = (self.length - start).clamp(0, width).double().view(1, 1, families, b)
        return Group.of_sizes(
            size,
            fixed=(size == 0) | (level > 0),
            kind=torch.zeros(families, dtype=torch.long, device=device),
            children=level,
            parents=level + 1,
        )

    def to_leaves(self, x: Tensor) -> Tensor:
        return _pad_nodes(x, self.filled[0])

    def from_leaves(self, x: Tensor) -> Tensor:
        return x[:, :, : self.length]

    def make_buffer(self, leaves: Tensor) -> Buffer:
        # Levels are replaced, not written to, so an expanded 0 is enough.
        zero = leaves.new_zeros(())
        above = (zero.expand(*leaves.shape[:2], n, *leaves.shape[3:]) for n in self.filled[1:])
        return [leaves, *above]

    def make_blank(self, like: Tensor) -> Buffer:
        return self.make_buffer(like.new_zeros(()).expand(like.shape))

    def read_leaves(self, buffer: Buffer) -> Tensor:
        return buffer[0]

    def read_children(self, buffer: Buffer, group: Group) -> Tensor:
        return buffer[group.children].unflatten(2, (group.families, group.width))

    def read_parents(self, buffer: Buffer, group: Group) -> Tensor:
        return buffer[group.parents][:, :, : group.families]

    def put_children(self, buffer: Buffer, group: Group, x: Tensor) -> None:
        buffer[group.children] = x.flatten(2, 3)

    def put_parents(self, buffer: Buffer, group: Group, x: Tensor) -> None:
        buffer[group.parents] = _pad_nodes(x, self.filled[group.parents])

    def read_roots(self, buffer: Buffer) -> Tensor:
        return buffer[-1][:, :, 0]

    def put_roots(self, buffer: Buffer, x: Tensor) -> None:
        buffer[-1] = x[:, :, None]


def _pad_nodes(x: Tensor, length: int) -> Tensor:
    """Return [R, K, n, ...] with zeros up to a length of axis 2."""
    spare = length - x.shape[2]
    return F.pad(x, (0, 0) * (x.dim() - 3) + (0, spare)) if spare else x


class TreeLayout:
    """Lay out one tree for all rows, or a forest of one tree per row.

    All nodes are in one tensor. The tensor holds the leaves (of all trees), then the inner nodes
    group by group, then one place for filling.
    """

    def __init__(self, hierarchy: Hierarchy, batch: int, device):
        trees, tokens = hierarchy.trees, hierarchy.tokens
        # One tree for all rows keeps the batch axis, which is faster than a forest.
        if len(trees) > 1 and _all_equal(trees, tokens):
            trees, tokens = trees[:1], tokens[:1]
        self.length, self.batch = hierarchy.length, batch
        self.one = len(trees) == 1
        self.apart = 1 if self.one else batch
        self.tokens = torch.cat(tokens).to(device)
        counts = torch.tensor([t.leaves for t in trees])
        self.rows = torch.arange(len(trees)).repeat_interleave(counts).to(device)
        #: Whether leaves and tokens are the same: nothing to gather.
        self.every = self.one and len(self.tokens) == self.length
        # Trees number their kinds differently: collect the names of all.
        names = (name for t in trees for name in t.kind_names)
        self.kind_names = tuple(dict.fromkeys(["", *names]))
        self.leaf_count = len(self.tokens)
        self.nodes = sum(tree.nodes for tree in trees)
        self.groups = self._make_groups(trees, counts.cumsum(0) - counts, device)

    def _make_groups(self, trees: Sequence[Tree], first_leaf: Tensor, device) -> list[Group]:
        """Give every node its place, and return the groups bottom-up.

        A group holds families of one height and of similar width: the same number of binary digits.

        Args:
            trees: The trees.
            first_leaf: int64 [trees], the place of each tree's first leaf.
            device: Of the tensors.
        """
        steps: dict[tuple[int, int], list[tuple[int, Families]]] = {}
        for number, tree in enumerate(trees):
            for families in tree.families:
                key = int(tree.height[families.parent[0]]), families.children.shape[1].bit_length()
                steps.setdefault(key, []).append((number, families))
        # Right for leaves. Inner nodes get their places below, group by group.
        place = [first + torch.arange(t.nodes) for t, first in zip(trees, first_leaf)]
        groups, start = [], self.leaf_count
        for key in sorted(steps):
            first = start
            for number, families in steps[key]:
                place[number][families.parent] = torch.arange(start, start + len(families.parent))
                start += len(families.parent)
            groups.append(self._make_group(trees, steps[key], place, first, device))
        self._roots = torch.stack([mine[-1] for mine in place]).to(device)
        # Places that must be 0: the roots, from which a pass down starts, and filling.
        self._zero = torch.cat([self._roots, self._roots.new_tensor([self.nodes])])
        return groups

    def _make_group(
        self, trees, entries: list[tuple[int, Families]], place, first: int, device
    ) -> Group:
        """Return one group from the families of several trees.

        Families are filled up to a common width.

        Args:
            trees: The trees.
            entries: Numbers of trees, each with families of the group.
            place: For each tree, the place of every node.
            first: Place of the group's first parent.
            device: Of the tensors.
        """
        width = max(families.children.shape[1] for _, families in entries)
        places, sizes, inner, kinds = [], [], [], []
        for number, families in entries:
            tree, spare = trees[number], width - families.children.shape[1]
            node = families.children.clamp(min=0)
            # Filling reads and writes the extra place, has size 0, and counts as fixed.
            fill = partial(_fill_children, real=families.real, spare=spare)
            places.append(fill(place[number][node], self.nodes))
            sizes.append(fill(tree.sizes[node], 0))
            inner.append(fill(node >= tree.leaves, True))
            names = torch.tensor([self.kind_names.index(name) for name in tree.kind_names])
            kinds.append(names[tree.kinds[families.parent]])
        return Group.of_sizes(
            torch.cat(sizes).double()[None, None].to(device),
            fixed=torch.cat(inner)[None, None].to(device),
            kind=torch.cat(kinds).to(device),
            children=_as_slice(torch.cat(places).flatten().to(device)),
            parents=first,
        )

    def to_leaves(self, x: Tensor) -> Tensor:
        if self.every:
            return x
        if self.one:
            return x.index_select(2, self.tokens)
        # A forest: the leaves of all rows in a line, with one row.
        return x.transpose(1, 2)[self.rows, self.tokens].transpose(0, 1)[None]

    def from_leaves(self, x: Tensor) -> Tensor:
        if self.every:
            return x
        batch = x.shape[0] if self.one else self.batch
        out = x.new_zeros(batch, x.shape[1], self.length, *x.shape[3:])
        if self.one:
            return out.index_copy(2, self.tokens, x)
        out = out.transpose(1, 2).index_put((self.rows, self.tokens), x[0].transpose(0, 1))
        return out.transpose(1, 2)

    def make_buffer(self, leaves: Tensor) -> Buffer:
        buffer = self.make_blank(leaves)
        buffer[:, :, : self.leaf_count] = leaves
        return buffer

    def make_blank(self, like: Tensor) -> Buffer:
        # Passes write every other place before they read it.
        buffer = like.new_empty(*like.shape[:2], self.nodes + 1, *like.shape[3:])
        buffer[:, :, self._zero] = 0
        return buffer

    def read_leaves(self, buffer: Buffer) -> Tensor:
        return buffer[:, :, : self.leaf_count]

    def read_children(self, buffer: Buffer, group: Group) -> Tensor:
        places = group.children
        x = buffer[:, :, places] if isinstance(places, slice) else buffer.index_select(2, places)
        return x.unflatten(2, (group.families, group.width))

    def read_parents(self, buffer: Buffer, group: Group) -> Tensor:
        return buffer[:, :, group.parents : group.parents + group.families]

    def put_children(self, buffer: Buffer, group: Group, x: Tensor) -> None:
        if isinstance(group.children, slice):
            buffer[:, :, group.children] = x.flatten(2, 3)
        else:
            buffer.index_copy_(2, group.children, x.flatten(2, 3))

    def put_parents(self, buffer: Buffer, group: Group, x: Tensor) -> None:
        buffer[:, :, group.parents : group.parents + group.families] = x

    def read_roots(self, buffer: Buffer) -> Tensor:
        # A forest has one row, and a root for every row of the batch.
        roots = buffer.index_select(2, self._roots)
        return roots[:, :, 0] if self.one else roots[0].transpose(0, 1)

    def put_roots(self, buffer: Buffer, x: Tensor) -> None:
        buffer[:, :, self._roots] = x[:, :, None] if self.one else x.transpose(0, 1)[None]


Layout = WindowLayout | TreeLayout


def _fill_children(values: Tensor, filling, real: Tensor, spare: int) -> Tensor:
    """Return values of children [F, b + spare], with a filling for children that do not exist.

    Args:
        values: [F, b].
        filling: A number.
        real: bool [F, b], which children exist.
        spare: Number of columns to add.
    """
    return F.pad(torch.where(real, values, filling), (0, spare), value=filling)


def _as_slice(places: Tensor) -> Tensor | slice:
    """Return a slice if the places follow each other, else the places.

    Reading a slice is a view, not a gather.
    """
    first = int(places[0])
    follow = torch.equal(places, torch.arange(first, first + len(places), device=places.device))
    return slice(first, first + len(places)) if follow else places


def _all_equal(trees: Sequence[Tree], tokens: Sequence[Tensor]) -> bool:
    """Return whether all rows have equal trees over the same tokens."""
    same_trees = all(t is trees[0] or t.same(trees[0]) for t in trees)
    return same_trees and all(torch.equal(t, tokens[0]) for t in tokens)
