"""The dynamic programme of `tying="both"` as one differentiable function of queries, keys, values and extras."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ....hierarchy import Hierarchy
from .layout import Slots, WindowSlots
from .pair_means import pair_means
from .siblings import products
from .tree_slots import TreeSlots
from .up_down import Means, Setting, go_back, go_down, go_up

_LAYOUTS: WeakKeyDictionary = WeakKeyDictionary()


def slots_of(hierarchy: Hierarchy, batch: int, device) -> Slots:
    """The layout of a hierarchy's nodes for a call of so many rows; made once, and kept as long as the hierarchy.

    Raises:
        ValueError: the hierarchy has neither one row nor `batch`.
    """
    if hierarchy.rows not in (1, batch):
        raise ValueError(
            f"the hierarchy has {hierarchy.rows} rows, the batch {batch}; allowed: 1 or {batch} rows, see "
            "Hierarchy.fitted"
        )
    kept, key = _LAYOUTS.setdefault(hierarchy, {}), (batch, str(device))
    if key not in kept:
        kept[key] = (WindowSlots if hierarchy.is_windows else TreeSlots)(hierarchy, batch, device)
    return kept[key]


@dataclass(frozen=True, eq=False)
class Extras:
    """What is added to the means of logits.

    Args:
        position_bias: [1 or B, 1 or H, N, N] or None.
        tables: sibling embeddings [positions, H, w], one for each of `kinds`; None if there are none, which is
            another thing than an empty list: kinds of families are then not looked at.
        kinds: names of kinds of families.
    """

    position_bias: Tensor | None = None
    tables: Sequence[Tensor] | None = None
    kinds: Sequence[str] = ()

    def of(self, slots: Slots, kv_heads: int, dtype) -> list[Tensor | None]:
        """For every group None, or broadcastable to [R, K, F, b, G, b]."""
        found: list[Tensor | None] = [None] * len(slots.groups)
        for part in (
            None if self.position_bias is None else pair_means(slots, self.position_bias.to(dtype)),
            None if self.tables is None else products(slots, self.kinds, self.tables, dtype),
        ):
            for index, extra in enumerate(part or ()):
                if extra is not None:
                    extra = _by_key_head(extra, kv_heads)
                    found[index] = extra if found[index] is None else found[index] + extra
        return found


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy,
    scale: float,
    keep_diagonal: bool,
    extras: Extras,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, N, dv] and ρ(root) [B, H] of features of one dtype; arguments as in `both.both_with_root`."""
    slots = slots_of(hierarchy, len(query), query.device)
    setting = Setting(slots, scale, keep_diagonal)
    leaves = leaves_of(slots, query, key, value)
    found = extras.of(slots, key.shape[1], query.dtype)
    learned = any(t.requires_grad for t in (*leaves, *(e for e in found if e is not None)))
    if torch.is_grad_enabled() and learned:
        out, root = _Both.apply(setting, *leaves, *found)
    else:
        out, root, _, _ = forward(setting, *leaves, *found)
    return slots.from_leaves(out).transpose(2, 3).flatten(1, 2), root.flatten(1)


def leaves_of(slots: Slots, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries [R, K, leaves, G, d], keys and values [R, K, leaves, ...]."""
    kv_heads = key.shape[1]
    query = query.unflatten(1, (kv_heads, query.shape[1] // kv_heads)).transpose(2, 3)
    return [slots.to_leaves(x) for x in (query, key, value)]


def forward(setting: Setting, query: Tensor, key: Tensor, value: Tensor, *extras):
    """Output, ρ(root), and what the backward pass needs."""
    slots = setting.slots
    means = Means(*(slots.store(x) for x in (query, key, value)))
    go_up(means, setting, list(extras))
    a, p = go_down(means, setting)
    return slots.leaves(a), slots.roots(means.rho), means, p


class _Both(torch.autograd.Function):
    """The passes, with their own backward: it needs O(nodes · d) memory however wide the families."""

    @staticmethod
    def forward(ctx, setting, query, key, value, *extras):
        out, root, ctx.means, ctx.p = forward(setting, query, key, value, *extras)
        ctx.setting = setting
        ctx.save_for_backward(*(e for e in extras if e is not None))
        ctx.given = [e is not None for e in extras]
        return out, root

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, grad_root):
        saved = iter(ctx.saved_tensors)
        extras = [next(saved) if given else None for given in ctx.given]
        found = go_back(ctx.means, ctx.p, grad_out, grad_root, ctx.setting, extras)
        return None, found.query, found.key, found.value, *found.extras


def _by_key_head(extra: Tensor, kv_heads: int) -> Tensor:
    """[R, 1 or H, F, b, b] as [R, 1 or K, F, b, 1 or G, b]."""
    if extra.shape[1] == 1:
        return extra.unsqueeze(4)
    return extra.unflatten(1, (kv_heads, -1)).permute(0, 1, 3, 4, 2, 5)
