"""`tying="both"` as one operator, with its gradient: one node for the compiler and for export.

An operator's arguments are tensors, numbers and text, so a hierarchy comes apart: windows as their sizes and spans,
trees as parents, kinds and tokens. Inside it is put together again, once for all calls with the same content.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ....engines.options import full_precision
from ....hierarchy import Hierarchy, Tree
from .programme import Extras, forward, leaves_of, slots_of
from .up_down import Setting, go_back

#: Between names in one text, and between the names of one tree and those of the next.
BREAK, NEXT = "\x1f", "\x1e"


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hierarchy: Hierarchy,
    scale: float,
    keep_diagonal: bool,
    extras: Extras,
) -> tuple[Tensor, Tensor]:
    """As `programme.run`."""
    tables = [] if extras.tables is None else list(extras.tables)
    names = "" if extras.tables is None else BREAK.join(["", *extras.kinds])
    tensors = [query, key, value, *tables]
    tensors += [] if extras.position_bias is None else [extras.position_bias]
    parts, kinds = apart(hierarchy)
    sizes = None if hierarchy.sizes is None else list(hierarchy.sizes)
    return both_tied(tensors, names, parts, kinds, sizes, hierarchy.length, scale, keep_diagonal)


def apart(hierarchy: Hierarchy) -> tuple[list[Tensor], str]:
    """Tensors and names that `together` makes the hierarchy of."""
    if hierarchy.sizes is not None:
        parts = [] if hierarchy.starts is None else [hierarchy.starts]
        return [
            *parts,
            *([] if hierarchy.stops is None else [hierarchy.stops]),
        ], "" if hierarchy.stops is None else "s"
    parts = [
        t
        for tree, tokens in zip(hierarchy.trees, hierarchy.tokens)
        for t in (tree.parents, tree.kinds, tokens)
    ]
    return parts, NEXT.join([BREAK.join(tree.kind_names) for tree in hierarchy.trees])


def together(parts: Sequence[Tensor], kinds: str, sizes: Sequence[int] | None, length: int) -> Hierarchy:
    """The hierarchy again; the same object for the same content, so that its layout is made once."""
    content = tuple((len(t), t.cpu().numpy().tobytes()) for t in parts)
    return _together(content, kinds, None if sizes is None else tuple(sizes), length)


@lru_cache(maxsize=16)
def _together(content: tuple, kinds: str, sizes: tuple[int, ...] | None, length: int) -> Hierarchy:
    parts = [torch.frombuffer(bytearray(data), dtype=torch.long) for _, data in content]
    if sizes is not None:
        stops = parts.pop() if kinds else None
        return Hierarchy(length, sizes=sizes, starts=parts[0] if parts else None, stops=stops)
    names = [tuple(text.split(BREAK)) for text in kinds.split(NEXT)]
    trees = tuple(Tree(p, k, n) for p, k, n in zip(parts[::3], parts[1::3], names))
    return Hierarchy(length, trees, tuple(parts[2::3]))


def extras_of(tensors: Sequence[Tensor], names: str) -> Extras:
    """Sibling tables and position bias out of an operator's tensors."""
    kinds = names.split(BREAK)[1:]
    rest = list(tensors[3 + len(kinds) :])
    tables = list(tensors[3 : 3 + len(kinds)]) if names else None
    return Extras(rest[0] if rest else None, tables, kinds)


@torch.library.custom_op("hf_hyperattn::both_tied", mutates_args=())
def both_tied(
    tensors: Sequence[Tensor],
    names: str,
    parts: Sequence[Tensor],
    kinds: str,
    sizes: Sequence[int] | None,
    length: int,
    scale: float,
    keep_diagonal: bool,
) -> tuple[Tensor, Tensor]:
    """The operator: output [B, H, N, dv] and ρ(root) [B, H]. `tensors`: query, key, value, tables, position bias."""
    query, key, value = tensors[:3]
    slots = slots_of(together(parts, kinds, sizes, length), len(query), query.device)
    extras = extras_of(tensors, names).of(slots, key.shape[1], query.dtype)
    out, root, _, _ = forward(
        Setting(slots, scale, keep_diagonal), *leaves_of(slots, query, key, value), *extras
    )
    return slots.from_leaves(out).transpose(2, 3).flatten(1, 2).contiguous(), root.flatten(1).clone()


@both_tied.register_fake
def _(tensors, *_):
    query, _, value = tensors[:3]
    return query.new_empty(*query.shape[:3], value.shape[-1]), query.new_empty(query.shape[:2])


@torch.library.custom_op("hf_hyperattn::both_tied_backward", mutates_args=())
def backward(
    grad_out: Tensor,
    grad_root: Tensor,
    tensors: Sequence[Tensor],
    names: str,
    parts: Sequence[Tensor],
    kinds: str,
    sizes: Sequence[int] | None,
    length: int,
    scale: float,
    keep_diagonal: bool,
) -> list[Tensor]:
    """Gradients of all tensors; the forward passes are made again."""
    slots = slots_of(together(parts, kinds, sizes, length), len(tensors[0]), tensors[0].device)
    setting, kv_heads = Setting(slots, scale, keep_diagonal), tensors[1].shape[1]

    def prepared(*given: Tensor):
        extras = extras_of(given, names).of(slots, kv_heads, given[0].dtype)
        there.extend(e is not None for e in extras[len(there) :])
        return *leaves_of(slots, *given[:3]), *(e for e in extras if e is not None)

    there: list[bool] = []
    with full_precision(grad_out.device):  # backward may be called under autocast
        # autograd is switched off inside an operator; torch.func has a tape of its own
        (query, key, value, *rest), pull = torch.func.vjp(prepared, *tensors)
        given = iter(rest)
        extras = [next(given) if one else None for one in there]
        _, _, means, p = forward(setting, query, key, value, *extras)
        grad = slots.to_leaves(grad_out.unflatten(1, (kv_heads, -1)).transpose(2, 3))
        found = go_back(means, p, grad, grad_root.unflatten(1, (kv_heads, -1)), setting, extras)
        grads = pull((found.query, found.key, found.value, *(e for e in found.extras if e is not None)))
    return [g.contiguous() for g in grads]


@backward.register_fake
def _(grad_out, grad_root, tensors, *_):
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _save(ctx, inputs, output):
    tensors, ctx.names, ctx.parts, *ctx.rest = inputs
    ctx.save_for_backward(*tensors)


def _pullback(ctx, grad_out, grad_root):
    tensors = list(ctx.saved_tensors)
    grads = backward(grad_out.contiguous(), grad_root.contiguous(), tensors, ctx.names, ctx.parts, *ctx.rest)
    return grads, None, [None] * len(ctx.parts), *[None] * len(ctx.rest)


both_tied.register_autograd(_pullback, setup_context=_save)
