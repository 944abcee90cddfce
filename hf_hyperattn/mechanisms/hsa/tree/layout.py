"""Where the numbers of a hierarchy's nodes stand in memory, so that one step of the dynamic programme is one batched
operation on all families of a level.

A *slot* holds what belongs to one node: a mean query, a log-sum, ... Numbers of leaves are [R, K, leaves, ...], with
R rows and K key heads; those of all nodes are kept in a *store*. For windows a store is one tensor a level, and the
children of a level's families are a reshape of it. For trees it is one tensor over all nodes, and children are
gathered. Different trees in a batch are one forest: R is 1, and the leaves of all rows stand in a line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from ....hierarchy import Hierarchy


@dataclass(frozen=True, eq=False)
class Group:
    """Families that one step works on: F parents with up to b children each.

    Args:
        share: |B|/|A| of child B of parent A, float64 [R or 1, 1, F, b], 0 at filling.
        log_size: log|B|, float64 of that shape, -inf at filling.
        fixed: bool of that shape: children whose own logit is ρ: inner nodes, and filling (with ρ = 0). None for
            families of leaves without filling.
        all_fixed: whether all children are such.
        kind: int64 [F], numbers of `Slots.kind_names`.
        level: place of the children in a store: a number of a level, or their slots, int64 [F · b], or a slice where
            they stand in a line.
        parents: place of the parents in a store: a number of a level, or their first slot.
    """

    share: Tensor
    log_size: Tensor
    fixed: Tensor | None
    all_fixed: bool
    kind: Tensor
    level: int | Tensor | slice
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


class Slots:
    """Base of the two layouts.

    `groups` go bottom-up; `apart` is the number of rows that differ in where their leaves stand, 1 or the batch size.
    """

    groups: list[Group]
    apart: int
    kind_names: tuple[str, ...] = ("",)

    def to_leaves(self, x: Tensor) -> Tensor:
        """Tokens [batch, heads, length, ...] to leaves [R, heads, leaves, ...], 0 at filling."""
        raise NotImplementedError

    def from_leaves(self, x: Tensor) -> Tensor:
        """Leaves [R, heads, leaves, ...] to tokens [batch, heads, length, ...], 0 at padding."""
        raise NotImplementedError

    def store(self, leaves: Tensor):
        """A store that holds these numbers of the leaves, [R, K, leaves, ...], and 0 for the roots and at filling.

        The other nodes have no numbers before they are put there.
        """
        raise NotImplementedError

    def blank(self, like: Tensor):
        """A store for numbers of the shape that `like`, [R, K, leaves, ...], has; 0 for the roots and at filling."""
        raise NotImplementedError

    def leaves(self, store) -> Tensor:
        """The numbers of the leaves in a store."""
        raise NotImplementedError

    def children(self, store, group: Group) -> Tensor:
        """[R, K, F, b, ...] from a store; 0 at filling if nothing else was put there."""
        raise NotImplementedError

    def parents(self, store, group: Group) -> Tensor:
        """[R, K, F, ...] from a store."""
        raise NotImplementedError

    def put_children(self, store, group: Group, x: Tensor) -> None:
        """Put [R, K, F, b, ...] into a store."""
        raise NotImplementedError

    def put_parents(self, store, group: Group, x: Tensor) -> None:
        """Put [R, K, F, ...] into a store."""
        raise NotImplementedError

    def roots(self, store) -> Tensor:
        """[batch, K, ...]: the numbers of the root of every row."""
        raise NotImplementedError

    def put_roots(self, store, x: Tensor) -> None:
        """Put [batch, K, ...] into a store, as the numbers of the roots."""
        raise NotImplementedError


class WindowSlots(Slots):
    """Windows, one tensor a level, each filled up to a whole number of families.

    Where a window holds a single node, the step changes nothing: its ρ and its mean are its child's.

    Args:
        hierarchy: windows.
        batch: rows of the call.
        device: where the tensors are.
    """

    def __init__(self, hierarchy: Hierarchy, batch: int, device):
        length = hierarchy.length
        if hierarchy.starts is None and hierarchy.stops is None:
            self.spans = None
            sizes = torch.tensor([length], device=device)
        else:
            rows = torch.tensor([hierarchy.span(row) for row in range(hierarchy.rows)], device=device)
            self.spans = rows.expand(batch, 2)
            sizes = self.spans[:, 1] - self.spans[:, 0]
        self.length, self.tokens, self.apart = length, int(sizes.max()), 1 if self.spans is None else batch
        self.groups = self._groups(sizes, hierarchy.sizes)
        if self.spans is not None:
            self.index = torch.arange(self.filled[0], device=device) + self.spans[:, :1]
            self.real = self.index < self.spans[:, 1:]
        self._sizes = sizes

    def _groups(self, tokens: Tensor, sizes: Sequence[int]) -> list[Group]:
        """One group a level. `filled` becomes the number of slots of every level, filling included."""
        ratios = [b // a for a, b in zip((1, *sizes), sizes)]
        widths = [s for s in (1, *sizes) if s < self.tokens]  # a window that holds everything is the root
        self.filled, found = [], []
        for level, width in enumerate(widths or [1]):
            count = math.ceil(self.tokens / width)
            b = ratios[level] if level + 1 < len(widths) else count
            families = math.ceil(count / b)
            self.filled.append(families * b)
            place = torch.arange(families * b, device=tokens.device) * width
            size = (tokens[:, None] - place).clamp(0, width).double().unflatten(-1, (families, b))[:, None]
            empty = size == 0
            fixed = None if level == 0 and not bool(empty.any()) else (empty | (level > 0))
            found.append(
                Group(
                    share=size / size.sum(-1, keepdim=True).clamp_min(1),
                    log_size=size.log(),
                    fixed=fixed,
                    all_fixed=level > 0,
                    kind=torch.zeros(families, dtype=torch.long, device=tokens.device),
                    level=level,
                    parents=level + 1,
                )
            )
        self.filled.append(1)
        return found

    def to_leaves(self, x):
        if self.spans is not None:
            index, real = (
                t[:, None].reshape(len(t), 1, -1, *[1] * (x.dim() - 3)) for t in (self.index, self.real)
            )
            index = index.clamp(max=self.length - 1).expand(*x.shape[:2], -1, *x.shape[3:])
            return x.gather(2, index).masked_fill(~real, 0)
        spare = self.filled[0] - x.shape[2]
        return F.pad(x, (0, 0) * (x.dim() - 3) + (0, spare)) if spare else x

    def from_leaves(self, x):
        if self.spans is None:
            return x[:, :, : self.length]
        place = torch.arange(self.length, device=x.device) - self.spans[:, :1]
        real = (place >= 0) & (place < self._sizes[:, None])
        place, real = (t.reshape(len(t), 1, -1, *[1] * (x.dim() - 3)) for t in (place, real))
        index = place.clamp(0, x.shape[2] - 1).expand(*x.shape[:2], -1, *x.shape[3:])
        return x.gather(2, index).masked_fill(~real, 0)

    def store(self, leaves):
        return [leaves] + [None] * len(self.groups)

    def blank(self, like):
        return self.store(like.new_zeros(()).expand(like.shape))

    def leaves(self, store):
        return store[0]

    def children(self, store, group):
        x = store[group.level]
        if x is None:
            x = self._nothing(store, group.level)
        return x.unflatten(2, (group.families, group.width))

    def parents(self, store, group):
        x = store[group.parents]
        return (self._nothing(store, group.parents) if x is None else x)[:, :, : group.families]

    def _nothing(self, store, level: int) -> Tensor:
        like = next(t for t in store if t is not None)
        return like.new_zeros(()).expand(*like.shape[:2], self.filled[level], *like.shape[3:])

    def put_children(self, store, group, x):
        store[group.level] = x.flatten(2, 3)

    def put_parents(self, store, group, x):
        spare = self.filled[group.parents] - x.shape[2]
        store[group.parents] = F.pad(x, (0, 0) * (x.dim() - 3) + (0, spare)) if spare else x

    def roots(self, store):
        return store[-1][:, :, 0]

    def put_roots(self, store, x):
        store[-1] = x[:, :, None]
