"""Where the numbers of a hierarchy's nodes stand in memory, so that one step up or down a tree is one batched operation
on all families of a level.

Numbers of leaves are [R, K, leaves, ...], with R rows and K key heads. A *buffer* holds those of all nodes, and a
*group* is the families that one step works on. Windows have a list of one tensor a level for a buffer, and the children
of a level's families are a reshape of it: 1.5 times as fast as one tensor over all nodes, from which the children of
trees, and of windows beside padding, are gathered. Different trees in a batch are one forest: R is 1, and the leaves of
all rows stand in a line. Both layouts have

    groups, apart, kind_names         groups bottom-up; rows whose leaves stand apart, 1 or the batch; kinds of families
    to_leaves, from_leaves            tokens [batch, heads, length, ...] to leaves and back; 0 at filling and padding
    buffer(leaves), blank(like)       a buffer with these numbers of leaves, or none; 0 for the roots and at filling
    leaves, children, parents, roots  what a buffer holds: [R, K, leaves, ...], [R, K, F, b, ...], [R, K, F, ...] and
                                      [batch, K, ...]
    put_children, put_parents, put_roots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from ....hierarchy import Families, Hierarchy, Tree

#: Numbers of all nodes: a tensor a level, or one tensor; only the layout looks into it.
Buffer = Any

_LAYOUTS: WeakKeyDictionary[Hierarchy, dict] = WeakKeyDictionary()


def layout_of(hierarchy: Hierarchy, batch: int, device) -> Layout:
    """The layout of a hierarchy's nodes for a call of so many rows; made once, and kept as long as the hierarchy.

    Raises:
        ValueError: the hierarchy has neither one row nor `batch`.
    """
    if hierarchy.rows not in (1, batch):
        raise ValueError(
            f"the hierarchy has {hierarchy.rows} rows, the batch {batch}; allowed: 1 or {batch} rows, see "
            "Hierarchy.fitted"
        )
    known, key = _LAYOUTS.setdefault(hierarchy, {}), (batch, str(device))
    if key not in known:
        padded = hierarchy.starts is not None or hierarchy.stops is not None
        windows = hierarchy.is_windows and not padded
        known[key] = (
            WindowLayout(hierarchy, device)
            if windows
            else TreeLayout(hierarchy.materialised, batch, device)
        )
    return known[key]


@dataclass(frozen=True, eq=False)
class Group:
    """Families that one step works on: F parents with up to b children each.

    Args:
        share: |B|/|A| of child B of parent A, float64 [R or 1, 1, F, b], 0 at filling.
        log_size: log|B|, float64 of that shape, -inf at filling.
        fixed: bool of that shape: children whose own logit is ρ: inner nodes, and filling (with ρ = 0). None for
            families of leaves without filling.
        all_fixed: whether all children are such.
        kind: int64 [F], numbers of the layout's `kind_names`.
        children, parents: where they stand in a buffer; each layout has its own way to say it.
    """

    share: Tensor
    log_size: Tensor
    fixed: Tensor | None
    all_fixed: bool
    kind: Tensor
    children: Any
    parents: int

    @property
    def families(self) -> int:
        """F, the number of families."""
        return self.share.shape[2]

    @property
    def width(self) -> int:
        """b, the children that a family has room for."""
        return self.share.shape[3]

    @cached_property
    def kinds_present(self) -> list[int]:
        """Kinds of these families, each once."""
        return self.kind.unique().tolist()

    def most_children(self, kind: int) -> int:
        """Children of the largest family of a kind."""
        return int((self.share > 0).sum(-1)[..., self.kind == kind].max())


class WindowLayout:
    """Windows without padding: one tensor a level, each filled up to a whole number of families.

    Where a window holds a single node, the step changes nothing: its ρ and its mean are its child's.
    """

    apart, kind_names = 1, ("",)

    def __init__(self, hierarchy: Hierarchy, device):
        tokens = self.length = hierarchy.length
        widths = [
            1,
            *(s for s in hierarchy.sizes or () if s < tokens),
        ]  # a window that holds everything is the root
        self.groups: list[Group] = []
        self.filled: list[int] = []  # nodes of every level, filling included
        for level, (width, above) in enumerate(zip(widths, (*widths[1:], None))):
            nodes = -(-tokens // width)
            b = above // width if above else nodes
            self.groups.append(self._make_group(level, width, -(-nodes // b), b, device))
            self.filled.append(self.groups[-1].families * b)
        self.filled.append(1)

    def _make_group(self, level: int, width: int, families: int, b: int, device) -> Group:
        size = (
            (self.length - torch.arange(families * b, device=device) * width)
            .clamp(0, width)
            .double()
        )
        size = size.view(1, 1, families, b)
        return Group(
            share=size / size.sum(-1, keepdim=True),
            log_size=size.log(),
            fixed=(size == 0) | (level > 0) if level or bool((size == 0).any()) else None,
            all_fixed=level > 0,
            kind=torch.zeros(families, dtype=torch.long, device=device),
            children=level,
            parents=level + 1,
        )

    def to_leaves(self, x: Tensor) -> Tensor:
        return _pad_nodes(x, self.filled[0])

    def from_leaves(self, x: Tensor) -> Tensor:
        return x[:, :, : self.length]

    def make_buffer(self, leaves: Tensor) -> Buffer:
        zero = leaves.new_zeros(())
        return [
            leaves,
            *(zero.expand(*leaves.shape[:2], n, *leaves.shape[3:]) for n in self.filled[1:]),
        ]

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
    """[R, K, n, ...] with zeros up to a length of axis 2."""
    spare = length - x.shape[2]
    return F.pad(x, (0, 0) * (x.dim() - 3) + (0, spare)) if spare else x


class TreeLayout:
    """One tree for all rows, or a forest of one tree a row, in one tensor over all nodes.

    There stand the leaves (of all trees), then the inner nodes group by group, then one place that filling reads and
    writes.
    """

    def __init__(self, hierarchy: Hierarchy, batch: int, device):
        trees, tokens = hierarchy.trees, hierarchy.tokens
        if len(trees) > 1 and _all_equal(trees, tokens):
            trees, tokens = trees[:1], tokens[:1]
        self.length, self.batch, self.one = hierarchy.length, batch, len(trees) == 1
        self.apart = 1 if self.one else batch
        self.tokens = torch.cat(tokens).to(device)
        counts = torch.tensor([t.leaves for t in trees])
        self.rows = torch.arange(len(trees)).repeat_interleave(counts).to(device)
        self.every = self.one and len(self.tokens) == self.length
        self.kind_names = tuple(
            dict.fromkeys(["", *(name for t in trees for name in t.kind_names)])
        )
        self.leaf_count, self.nodes = len(self.tokens), sum(tree.nodes for tree in trees)
        self.groups = self._make_groups(trees, counts.cumsum(0) - counts, device)

    def _make_groups(self, trees: Sequence[Tree], first_leaf: Tensor, device) -> list[Group]:
        """Give every node its place, and make the groups: families of one height and about one width together."""
        steps: dict[tuple[int, int], list[tuple[int, Families]]] = {}
        for number, tree in enumerate(trees):
            for families in tree.families:
                key = int(tree.height[families.parent[0]]), families.children.shape[1].bit_length()
                steps.setdefault(key, []).append((number, families))
        place = [
            first + torch.arange(t.nodes) for t, first in zip(trees, first_leaf)
        ]  # inner nodes' comes below
        groups, start = [], self.leaf_count
        for key in sorted(steps):
            first = start
            for number, families in steps[key]:
                place[number][families.parent] = torch.arange(start, start + len(families.parent))
                start += len(families.parent)
            groups.append(self._make_group(trees, steps[key], place, first, device))
        self._roots = torch.stack([mine[-1] for mine in place]).to(device)
        self._zero = torch.cat([self._roots, self._roots.new_tensor([self.nodes])])
        return groups

    def _make_group(
        self, trees, entries: list[tuple[int, Families]], place, first: int, device
    ) -> Group:
        """One group from the families of several trees, filled up to a common width."""
        width = max(families.children.shape[1] for _, families in entries)
        places, sizes, inner, kinds = [], [], [], []
        for number, families in entries:
            tree, spare = trees[number], width - families.children.shape[1]
            node = families.children.clamp(min=0)
            wide = lambda t, value, real=families.real, spare=spare: F.pad(
                torch.where(real, t, value), (0, spare), value=value
            )
            places.append(wide(place[number][node], self.nodes))
            sizes.append(wide(tree.sizes[node], 0))
            inner.append(wide(node >= tree.leaves, True))
            names = torch.tensor([self.kind_names.index(name) for name in tree.kind_names])
            kinds.append(names[tree.kinds[families.parent]])
        size, fixed = torch.cat(sizes).double()[None, None], torch.cat(inner)[None, None]
        return Group(
            share=(size / size.sum(-1, keepdim=True)).to(device),
            log_size=size.log().to(device),
            fixed=fixed.to(device) if bool(fixed.any()) else None,
            all_fixed=bool(fixed.all()),
            kind=torch.cat(kinds).to(device),
            children=_as_slice(torch.cat(places).flatten().to(device)),
            parents=first,
        )

    def to_leaves(self, x: Tensor) -> Tensor:
        if self.every:
            return x
        if self.one:
            return x.index_select(2, self.tokens)
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
        roots = buffer.index_select(2, self._roots)
        return roots[:, :, 0] if self.one else roots[0].transpose(0, 1)

    def put_roots(self, buffer: Buffer, x: Tensor) -> None:
        buffer[:, :, self._roots] = x[:, :, None] if self.one else x.transpose(0, 1)[None]


Layout = WindowLayout | TreeLayout


def _as_slice(places: Tensor) -> Tensor | slice:
    """A slice where the places follow each other: a view in place of a gather."""
    first = int(places[0])
    follow = torch.equal(places, torch.arange(first, first + len(places), device=places.device))
    return slice(first, first + len(places)) if follow else places


def _all_equal(trees: Sequence[Tree], tokens: Sequence[Tensor]) -> bool:
    """Whether all rows have the very same tree over the same tokens."""
    return all(t is trees[0] or t.same(trees[0]) for t in trees) and all(
        torch.equal(t, tokens[0]) for t in tokens
    )
