"""Three-way attention: by the definition, or tile by tile as one operator that computes every tile again backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...engines.blockwise import gradient_shapes
from ...engines.dispatch import check_options, check_transforms
from ...engines.options import Options, full_precision
from ...engines.score import dot_score
from ...engines.serialize import register_gradients
from ...engines.tiles import by_group
from ...readable import is_exporting, is_recorded, is_transformed
from ..checks import check_choice
from . import tiles
from .reference import Windows, simplicial
from .tiles import SimplicialCall, SimplicialTensors

BACKENDS = ("auto", "reference", "blockwise")

#: Up to this many logits of one head `auto` takes the definition, which then has less to do than cutting tiles; and up
#: to this many of all heads and rows of the batch, which it holds at once.
DENSE_HEAD, DENSE_ALL = 2**14, 2**22

#: The tensors of the operator that are always there; those after them are named by `extras`.
MAIN = 5


def attend(
    query: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    options: Options,
    windows: Windows,
    *,
    offset: Tensor | None = None,
    backend: str = "auto",
    weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Three-way attention of a scaled query; arguments as in `reference.simplicial`, all of one dtype.

    Args:
        offset: int64, of no axes, in place of `options.offset` where that is not known as a number.
        backend: out of `BACKENDS`.
        weights: also return the weights of j.

    Raises:
        ValueError: a mask that does not broadcast, or weights, or a mask that wants a gradient, from tiles.
    """
    check_choice("backend", backend, BACKENDS)
    options = check_options(options, dot_score(query, keys[0], 1.0))
    learned = options.mask is not None and options.mask.requires_grad and torch.is_grad_enabled()
    if backend == "blockwise" and (weights or learned):
        what = "returns no weights" if weights else "gives no gradient to attn_mask"
        raise ValueError(f"backend='blockwise' {what}; use backend='reference' or 'auto'")
    check_transforms(backend)
    dense = weights or learned or is_exporting() or is_transformed()
    dense = dense or (not is_recorded() and small(query, keys[0].shape[2]))
    with full_precision(query.device):
        if backend == "reference" or (backend == "auto" and dense):
            options = options if offset is None else replace(options, offset=int(offset))
            out, first_weights = simplicial(query, keys, values, options, windows)
            return out, first_weights if weights else None
        return in_tiles([query, *keys, *values], options, windows, offset), None


def small(query: Tensor, keys: int) -> bool:
    """Whether all logits at once are little beside the work of cutting tiles."""
    head = query.shape[2] * keys**2
    return head <= DENSE_HEAD and query.shape[0] * query.shape[1] * head <= DENSE_ALL


def in_tiles(
    main: list[Tensor], options: Options, windows: Windows, offset: Tensor | None
) -> Tensor:
    """`simplicial` without its N x M x M logits; no weights, and no gradient for an additive mask.

    Memory beside inputs and output is O(tile). Deterministic: tiles are summed in a fixed order, and dropout is drawn
    from one seed per tile.
    """
    extras = {"mask": options.mask, "bias": options.bias, "sinks": options.sinks, "offset": offset}
    if options.dropout_p:
        extras["seed"] = torch.randint(2**62, (1,))
    extras = {name: t for name, t in extras.items() if t is not None}
    ints = [int(options.is_causal), options.window or 0, options.offset]
    ints += [windows.first or 0, windows.second or 0, int(windows.back)]
    tensors = [*main, *extras.values()]
    return simplicial_forward(tensors, " ".join(extras), ints, options.softcap, options.dropout_p)[
        0
    ]


def read_call(
    tensors: Sequence[Tensor],
    extras: str,
    ints: Sequence[int],
    softcap: float | None,
    dropout_p: float,
) -> SimplicialCall:
    """A call from the operator's arguments, where 0 stands for no window."""
    named = dict(zip(extras.split(), tensors[MAIN:], strict=True))
    is_causal, window, offset, first, second, back = ints
    offset = int(named["offset"]) if "offset" in named else offset
    options = Options(None, None, bool(is_causal), window or None, offset, softcap, None, dropout_p)
    seed = int(named["seed"]) if "seed" in named else 0
    return SimplicialCall(
        grouped(tensors, named), options, Windows(first or None, second or None, bool(back)), seed
    )


def grouped(tensors: Sequence[Tensor], named: dict[str, Tensor]) -> SimplicialTensors:
    """Tensors, or gradients, grouped by key heads."""
    query, key, key2, value, value2 = tensors[:MAIN]
    group = (key.shape[1], query.shape[1] // key.shape[1])
    mask, bias = (by_group(named.get(name), group) for name in ("mask", "bias"))
    sinks = named["sinks"].view(group) if "sinks" in named else None
    return SimplicialTensors(query.unflatten(1, group), key, key2, value, value2, mask, bias, sinks)


@torch.library.custom_op("hf_hyperattn::simplicial", mutates_args=())
def simplicial_forward(
    tensors: Sequence[Tensor],
    extras: str,
    ints: Sequence[int],
    softcap: float | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, N, dv], and the largest logits and sums [2, B, H, N]."""
    call = read_call(tensors, extras, ints, softcap, dropout_p)
    t = call.tensors
    out = t.query.new_empty(*t.query.shape[:-1], t.value.shape[-1])
    sums = t.query.new_empty(2, *t.query.shape[:-1])
    for block, chunks in call.blocks():
        block_out, block_sums = tiles.forward(block, chunks)
        block.of_query(out).copy_(block_out)
        for whole, part in zip(sums, block_sums, strict=True):
            block.of_query(whole).copy_(part)
    return out.flatten(1, 2), sums.flatten(2, 3)


@simplicial_forward.register_fake
def _(tensors, *_):
    query, value = tensors[0], tensors[3]
    return query.new_empty(*query.shape[:3], value.shape[-1]), query.new_empty(2, *query.shape[:3])


@torch.library.custom_op("hf_hyperattn::simplicial_backward", mutates_args=())
def simplicial_backward(
    grad: Tensor,
    out: Tensor,
    sums: Tensor,
    tensors: Sequence[Tensor],
    needs_grad: Sequence[bool],
    extras: str,
    ints: Sequence[int],
    softcap: float | None,
    dropout_p: float,
) -> list[Tensor]:
    """Gradients of all tensors; empty for an extra that needs none."""
    call = read_call(tensors, extras, ints, softcap, dropout_p)
    buffers = [out.new_zeros(shape) for shape in gradient_shapes(tensors, needs_grad, extras)]
    learned = [(n, b) for n, b in zip(extras.split(), buffers[MAIN:]) if n in ("bias", "sinks")]
    grads = grouped(buffers, {name: b for name, b in learned if b.shape != (0,)})
    group = call.tensors.query.shape[1:3]
    grad, out, top, sums = (x.unflatten(1, group) for x in (grad, out, *sums))
    with full_precision(grad.device):  # backward may be called under autocast
        for block, chunks in call.blocks():
            block_grad, block_top = (
                block.of_query(grad) / block.of_query(sums)[..., None],
                block.of_query(top),
            )
            delta = (block_grad * block.of_query(out)).sum(-1)
            for chunk in chunks:
                tiles.backward(chunk, grads, block_grad, delta, block_top)
    return buffers


@simplicial_backward.register_fake
def _(grad, out, sums, tensors, needs_grad, extras, *_):
    return [out.new_empty(shape) for shape in gradient_shapes(tensors, needs_grad, extras)]


register_gradients(simplicial_forward, simplicial_backward, "blockwise", pairwise=False)


def _flops(shapes: Sequence, ints: Sequence[int], backward: bool) -> int:
    """Of the products: two for each pair of keys that a query's windows hold, in the gradients five."""
    (batch, heads, queries, width), (_, _, keys, _), _, (*_, value_width) = shapes[:4]
    *_, first, second, back = ints
    reach = [min(keys, w if back else 2 * w - 1) if w else keys for w in (first, second)]
    each = 3 * width + 2 * value_width if backward else width + value_width
    return 2 * batch * heads * queries * math.prod(reach) * each


@register_flop_formula(simplicial_forward._opoverload._overloadpacket)
def _(tensors, extras, ints, *_, **__) -> int:
    return _flops(tensors, ints, False)


@register_flop_formula(simplicial_backward._opoverload._overloadpacket)
def _(grad, out, lse, tensors, needs_grad, extras, ints, *_, **__) -> int:
    return _flops(tensors, ints, True)
