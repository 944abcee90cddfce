"""The layout for trees: one tensor over all nodes, children gathered. See `slots`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....hierarchy import Hierarchy, Tree
from .layout import Group, Slots


class TreeSlots(Slots):
    """One tree for all rows, or a forest of one tree a row.

    Slots: the leaves (of all trees), then the inner nodes group by group, then one slot that filling reads and
    writes.

    Args:
        hierarchy: trees, one or one a row.
        batch: rows of the call.
        device: where the tensors are.
    """

    def __init__(self, hierarchy: Hierarchy, batch: int, device):
        trees, tokens = hierarchy.trees, hierarchy.tokens
        if len(trees) > 1 and _all_equal(trees, tokens):
            trees, tokens = trees[:1], tokens[:1]
        self.length, self.batch, self.one = hierarchy.length, batch, len(trees) == 1
        self.apart = 1 if self.one else batch
        self.tokens = torch.cat(tokens).to(device)
        counts = torch.tensor([t.leaves for t in trees])
        self.rows = None if self.one else torch.arange(len(trees)).repeat_interleave(counts).to(device)
        self.every = self.one and len(self.tokens) == self.length
        self.kind_names = tuple(dict.fromkeys(["", *(name for t in trees for name in t.kind_names)]))
        self._number(trees, device)

    def _number(self, trees: Sequence[Tree], device) -> None:
        """Give every node its slot, and make the groups."""
        steps: dict[tuple[int, int], list] = {}
        for tree_number, tree in enumerate(trees):
            for found in tree.families:
                height = int(tree.height[found.parent[0]])
                key = height, found.children.shape[1].bit_length()
                steps.setdefault(key, []).append((tree_number, found))
        slot, next_slot = [], 0
        for tree in trees:
            mine = torch.empty(tree.nodes, dtype=torch.long)
            mine[: tree.leaves] = torch.arange(next_slot, next_slot + tree.leaves)
            slot.append(mine)
            next_slot += tree.leaves
        self.leaf_slots = next_slot
        self.slots = sum(tree.nodes for tree in trees)
        self.groups = []
        for key in sorted(steps):
            start = next_slot
            for number, found in steps[key]:
                slot[number][found.parent] = torch.arange(next_slot, next_slot + len(found.parent))
                next_slot += len(found.parent)
            self.groups.append(self._group(trees, steps[key], slot, start, device))
        self._roots = torch.stack([mine[-1] for mine in slot]).to(device)
        self._zero = torch.cat([self._roots, self._roots.new_tensor([self.slots])])

    def _group(self, trees, entries, slot, start: int, device) -> Group:
        """One group from the families of several trees, filled up to a common width."""
        width = max(found.children.shape[1] for _, found in entries)
        places, sizes, inner, kinds = [], [], [], []
        for number, found in entries:
            tree, real = trees[number], found.real
            node = found.children.clamp(min=0)
            wide = lambda t, value: torch.nn.functional.pad(t, (0, width - t.shape[1]), value=value)
            places.append(wide(torch.where(real, slot[number][node], self.slots), self.slots))
            sizes.append(wide(torch.where(real, tree.sizes[node], 0), 0))
            inner.append(wide(torch.where(real, node >= tree.leaves, True), True))
            names = torch.tensor([self.kind_names.index(name) for name in tree.kind_names])
            kinds.append(names[tree.kinds[found.parent]])
        size, fixed = torch.cat(sizes).double()[None, None], torch.cat(inner)[None, None]
        return Group(
            share=(size / size.sum(-1, keepdim=True)).to(device),
            log_size=size.log().to(device),
            fixed=fixed.to(device) if bool(fixed.any()) else None,
            all_fixed=bool(fixed.all()),
            kind=torch.cat(kinds).to(device),
            level=_line(torch.cat(places).flatten().to(device)),
            parents=start,
        )

    def to_leaves(self, x):
        if self.every:
            return x
        if self.one:
            return x.index_select(2, self.tokens)
        return x.transpose(1, 2)[self.rows, self.tokens].transpose(0, 1)[None]

    def from_leaves(self, x):
        if self.every:
            return x
        batch = x.shape[0] if self.one else self.batch
        out = x.new_zeros(batch, x.shape[1], self.length, *x.shape[3:])
        if self.one:
            return out.index_copy(2, self.tokens, x)
        out = out.transpose(1, 2).index_put((self.rows, self.tokens), x[0].transpose(0, 1))
        return out.transpose(1, 2)

    def store(self, leaves):
        store = self.blank(leaves)
        store[:, :, : self.leaf_slots] = leaves
        return store

    def blank(self, like):
        store = like.new_empty(*like.shape[:2], self.slots + 1, *like.shape[3:])
        store[:, :, self._zero] = 0
        return store

    def leaves(self, store):
        return store[:, :, : self.leaf_slots]

    def children(self, store, group):
        line = isinstance(group.level, slice)
        x = store[:, :, group.level] if line else store.index_select(2, group.level)
        return x.unflatten(2, (group.families, group.width))

    def parents(self, store, group):
        return store[:, :, group.parents : group.parents + group.families]

    def put_children(self, store, group, x):
        if isinstance(group.level, slice):
            store[:, :, group.level] = x.flatten(2, 3)
        else:
            store.index_copy_(2, group.level, x.flatten(2, 3))

    def put_parents(self, store, group, x):
        store[:, :, group.parents : group.parents + group.families] = x

    def roots(self, store):
        found = store.index_select(2, self._roots)
        return found[:, :, 0] if self.one else found[0].transpose(0, 1)

    def put_roots(self, store, x):
        store[:, :, self._roots] = x[:, :, None] if self.one else x.transpose(0, 1)[None]


def _line(places: Tensor) -> Tensor | slice:
    """A slice where the places follow each other."""
    first = int(places[0])
    follow = torch.equal(places, torch.arange(first, first + len(places), device=places.device))
    return slice(first, first + len(places)) if follow else places


def _all_equal(trees: Sequence[Tree], tokens: Sequence[Tensor]) -> bool:
    """Whether all rows have the very same tree over the same tokens."""
    return all(t is trees[0] or t.same(trees[0]) for t in trees) and all(
        torch.equal(t, tokens[0]) for t in tokens
    )
