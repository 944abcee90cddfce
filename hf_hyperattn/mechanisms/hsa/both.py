"""`tying="both"`: softmax(S)·V tied over sibling blocks, O(nodes · branching) (arXiv 2509.15448; math in docs/hsa.md).

Agrees with `definition.definition_both`; how it is computed says `passes`.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...engines.score import working_dtype
from ...hierarchy import Hierarchy
from .pair_means import pair_means
from .passes import Means, Setting, go_back, go_down, go_up
from .siblings import SiblingEmbeddings
from .slots import Slots, WindowSlots
from .tree_slots import TreeSlots

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


def both(
    query: Tensor, key: Tensor, value: Tensor, hierarchy: Hierarchy, scale: float | None = None, **rest
) -> Tensor:
    """The output of `both_with_root` alone."""
    return both_with_root(query, key, value, hierarchy, scale, **rest)[0]


def both_with_root(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy,
    scale: float | None = None,
    *,
    keep_diagonal: bool = True,
    position_bias: Tensor | None = None,
    siblings: SiblingEmbeddings | None = None,
    row: Tensor | None = None,
    column: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Bidirectional attention tied over sibling blocks, for logits that are linear in features of the key.

    S_ij = scale · q_i·k_j + row_i + column_j + position_bias_ij, of which P takes means over pairs of blocks.

    Args:
        query: [B, H, N, d]. key: [B, Hkv, N, d], Hkv dividing H. value: [B, Hkv, N, dv]. Any floating dtype; the
            arithmetic is float64 where an input is, else float32.
        hierarchy: trees over the N tokens, one or one a row. Tokens in no tree are padding: nobody sees them, and
            their output is 0.
        scale: None for 1/sqrt(d).
        keep_diagonal: whether a token attends to itself.
        position_bias: [1 or B, 1 or H, N, N], finite at real tokens; costs its N² numbers.
        siblings: learned positions of the children of a family.
        row, column: statistics [B, H, N] and [B, Hkv or H, N].

    Returns:
        The output [B, H, N, dv] and ρ(root) [B, H], both in the working dtype.

    Raises:
        ValueError: numbers of queries, keys and the hierarchy's tokens differ.
    """
    _check(query, key, hierarchy)
    dtype = working_dtype(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if row is not None or column is not None:
        query, key, value, scale = _with_statistics(query, key, value, scale, row, column)
    (batch, heads, _, _), kv_heads = query.shape, key.shape[1]
    slots = slots_of(hierarchy, batch, query.device)
    setting = Setting(slots, scale, keep_diagonal)
    q = query.to(dtype).unflatten(1, (kv_heads, heads // kv_heads)).transpose(2, 3)
    leaves = [slots.to_leaves(x) for x in (q, key.to(dtype), value.to(dtype))]
    extras = _extras(slots, position_bias, siblings, kv_heads, dtype)
    if torch.is_grad_enabled() and any(
        t.requires_grad for t in (*leaves, *(e for e in extras if e is not None))
    ):
        out, root = _Both.apply(setting, *leaves, *extras)
    else:
        out, root, _, _ = _forward(setting, *leaves, *extras)
    return slots.from_leaves(out).transpose(2, 3).flatten(1, 2), root.flatten(1)


def _forward(setting: Setting, query: Tensor, key: Tensor, value: Tensor, *extras):
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
        out, root, ctx.means, ctx.p = _forward(setting, query, key, value, *extras)
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


def _extras(slots: Slots, bias: Tensor | None, siblings, kv_heads: int, dtype) -> list[Tensor | None]:
    """What is added to S̄ in every group: None, or broadcastable to [R, K, F, b, G, b]."""
    found: list[Tensor | None] = [None] * len(slots.groups)
    for part in (
        None if bias is None else pair_means(slots, bias.to(dtype)),
        None if siblings is None else siblings(slots, dtype),
    ):
        for index, extra in enumerate(part or ()):
            if extra is not None:
                extra = _by_key_head(extra, kv_heads)
                found[index] = extra if found[index] is None else found[index] + extra
    return found


def _by_key_head(extra: Tensor, kv_heads: int) -> Tensor:
    """[R, 1 or H, F, b, b] as [R, 1 or K, F, b, 1 or G, b]."""
    if extra.shape[1] == 1:
        return extra.unsqueeze(4)
    return extra.unflatten(1, (kv_heads, -1)).permute(0, 1, 3, 4, 2, 5)


def _with_statistics(query, key, value, scale: float, row: Tensor | None, column: Tensor | None):
    """Features whose product, unscaled, is scale · q·k + row + column: a statistic is one more column."""
    heads = query.shape[1]
    if column is not None and column.shape[1] == heads != key.shape[1]:
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    dtype = working_dtype(query, key)
    row = query.new_zeros(query.shape[:3]) if row is None else row
    column = key.new_zeros(key.shape[:3]) if column is None else column
    one = lambda x: torch.ones_like(x[..., :1], dtype=dtype)
    query = torch.cat([query.to(dtype) * scale, row.to(dtype)[..., None], one(query)], -1)
    key = torch.cat([key.to(dtype), one(key), column.to(dtype)[..., None]], -1)
    return query, key, value, 1.0


def _check(query: Tensor, key: Tensor, hierarchy: Hierarchy) -> None:
    lengths = query.shape[2], key.shape[2], hierarchy.length
    if len(set(lengths)) > 1:
        raise ValueError(
            f"tying='both' was called with {lengths[0]} queries, {lengths[1]} keys and a hierarchy over {lengths[2]} "
            "tokens; allowed: the same tokens as queries and as keys, all in the hierarchy"
        )
