"""Three-way attention: dense by definition, or tile by tile as one operator.

The operator stores no N x M x M logits; its backward pass computes every tile again.
"""

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
from ...utils.readable import is_exporting, is_recorded, is_transformed
from ...utils.torch_private import find_packet
from ..checks import check_choice
from . import tiles
from .reference import Windows, simplicial
from .tiles import SimplicialCall, SimplicialTensors

BACKENDS = ("auto", "reference", "blockwise")

#: `backend="auto"` uses the dense definition up to this many logits per head, where cutting tiles
#: would take longer, and up to this many logits in total, which are in memory at once.
DENSE_HEAD, DENSE_ALL = 2**14, 2**22

#: Number of tensors that the operator always has; `extras` names those after them.
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
    """Compute three-way attention of a scaled query.

    See `reference.simplicial` for the other arguments. All tensors have one dtype.

    Args:
        offset: int64 scalar tensor that replaces `options.offset` if that is not known as a number.
        backend: One of `BACKENDS`.
        weights: Also return the weights of j.

    Returns:
        Output [B, H, N, dv], and the weights of j [B, H, N, M] or None.

    Raises:
        ValueError: A mask does not broadcast, or backend="blockwise" is asked for weights or for
            gradients of a mask.
    """
    check_choice("backend", backend, BACKENDS)
    options = check_options(options, dot_score(query, keys[0], 1.0))
    learned = options.mask is not None and options.mask.requires_grad and torch.is_grad_enabled()
    if backend == "blockwise" and (weights or learned):
        what = "returns no weights" if weights else "gives no gradient to attn_mask"
        raise ValueError(f"backend='blockwise' {what}; use backend='reference' or 'auto'")
    check_transforms(backend)
    # Export and function transforms need plain operators, and tiles return no weights.
    dense = weights or learned or is_exporting() or is_transformed()
    # While recording, lengths are symbols: a choice by size would fix them.
    dense = dense or (not is_recorded() and is_small(query, keys[0].shape[2]))
    with full_precision(query.device):
        if backend == "reference" or (backend == "auto" and dense):
            options = options if offset is None else replace(options, offset=int(offset))
            out, first_weights = simplicial(query, keys, values, options, windows)
            return out, first_weights if weights else None
        return attend_in_tiles([query, *keys, *values], options, windows, offset), None


def is_small(query: Tensor, keys: int) -> bool:
    """Return whether all logits at once are cheaper than cutting tiles."""
    head = query.shape[2] * keys**2
    return head <= DENSE_HEAD and query.shape[0] * query.shape[1] * head <= DENSE_ALL


def attend_in_tiles(
    main: list[Tensor], options: Options, windows: Windows, offset: Tensor | None
) -> Tensor:
    """Compute `reference.simplicial` without its N x M x M logits.

    There are no weights, and no gradient for an additive mask. Extra memory is O(tile). Results are
    deterministic: tiles are summed in a fixed order, and dropout draws from one seed per tile.
    """
    extras = {"mask": options.mask, "bias": options.bias, "sinks": options.sinks, "offset": offset}
    if options.dropout_p:
        # A seed as a tensor, so that backward draws the same dropout as forward.
        extras["seed"] = torch.randint(2**62, (1,))
    extras = {name: t for name, t in extras.items() if t is not None}
    # An operator takes only tensors, numbers and strings, so options become a list of integers.
    ints = [int(options.is_causal), options.window or 0, options.offset]
    ints += [windows.first or 0, windows.second or 0, int(windows.back)]
    tensors = [*main, *extras.values()]
    out, _ = simplicial_forward(tensors, " ".join(extras), ints, options.softcap, options.dropout_p)
    return out


def read_call(
    tensors: Sequence[Tensor],
    extras: str,
    ints: Sequence[int],
    softcap: float | None,
    dropout_p: float,
) -> SimplicialCall:
    """Rebuild a call from the operator's arguments; 0 means no window."""
    # `extras` names the optional tensors, in their order.
    named = dict(zip(extras.split(), tensors[MAIN:], strict=True))
    is_causal, window, offset, first, second, back = ints
    offset = int(named["offset"]) if "offset" in named else offset
    options = Options(
        is_causal=bool(is_causal),
        window=window or None,
        offset=offset,
        softcap=softcap,
        dropout_p=dropout_p,
    )
    return SimplicialCall(
        tensors=group_tensors(tensors, named),
        options=options,
        windows=Windows(first or None, second or None, bool(back)),
        seed=int(named["seed"]) if "seed" in named else 0,
    )


def group_tensors(tensors: Sequence[Tensor], named: dict[str, Tensor]) -> SimplicialTensors:
    """Group tensors, or their gradients, by key heads."""
    query, key, key2, value, value2 = tensors[:MAIN]
    # Query heads of a group share a key head, so a tile serves all of them.
    group = (key.shape[1], query.shape[1] // key.shape[1])
    mask, bias = (by_group(named.get(name), group) for name in ("mask", "bias"))
    sinks = named["sinks"].view(group) if "sinks" in named else None
    return SimplicialTensors(
        query=query.unflatten(1, group),
        key=key,
        key2=key2,
        value=value,
        value2=value2,
        mask=mask,
        bias=bias,
        sinks=sinks,
    )


@torch.library.custom_op("hf_hyperattn::simplicial", mutates_args=())
def simplicial_forward(
    tensors: Sequence[Tensor],
    extras: str,
    ints: Sequence[int],
    softcap: float | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, N, dv], and largest logits and sums [2, B, H, N]."""
    call = read_call(tensors, extras, ints, softcap, dropout_p)
    t = call.tensors
    out = t.query.new_empty(*t.query.shape[:-1], t.value.shape[-1])
    # The backward pass needs the largest logit and the sum of every row.
    sums = t.query.new_empty(2, *t.query.shape[:-1])
    for block, chunks in call.iterate_blocks():
        block_out, block_sums = tiles.compute_block(block, chunks)
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
    """Compute the gradients of all tensors; empty for an extra that needs none."""
    call = read_call(tensors, extras, ints, softcap, dropout_p)
    buffers = [out.new_zeros(shape) for shape in gradient_shapes(tensors, needs_grad, extras)]
    # Masks and seeds get no gradient from tiles.
    learned = [(n, b) for n, b in zip(extras.split(), buffers[MAIN:]) if n in ("bias", "sinks")]
    # The views of `grads` share memory with the buffers, so tiles add into the buffers.
    grads = group_tensors(buffers, {name: b for name, b in learned if b.shape != (0,)})
    group = call.tensors.query.shape[1:3]
    grad, out, top, sums = (x.unflatten(1, group) for x in (grad, out, *sums))
    with full_precision(grad.device):  # backward may be called under autocast
        for block, chunks in call.iterate_blocks():
            block_grad = block.of_query(grad) / block.of_query(sums)[..., None]
            block_top = block.of_query(top)
            # delta_i = do_i · o_i, as in FlashAttention (arXiv 2205.14135, appendix B.4).
            delta = (block_grad * block.of_query(out)).sum(-1)
            for chunk in chunks:
                tiles.add_chunk_gradients(chunk, grads, block_grad, delta, block_top)
    return buffers


@simplicial_backward.register_fake
def _(grad, out, sums, tensors, needs_grad, extras, *_):
    return [out.new_empty(shape) for shape in gradient_shapes(tensors, needs_grad, extras)]


register_gradients(simplicial_forward, simplicial_backward, "blockwise", pairwise=False)


def _count_flops(shapes: Sequence, ints: Sequence[int], backward: bool) -> int:
    """Count the floating-point operations of the matrix products.

    Forward has two products for each pair of keys in a query's windows, backward has five.
    """
    (batch, heads, queries, width), (_, _, keys, _), _, (*_, value_width) = shapes[:4]
    *_, first, second, back = ints
    # A window that looks both ways has 2w - 1 keys.
    reach = [min(keys, w if back else 2 * w - 1) if w else keys for w in (first, second)]
    each = 3 * width + 2 * value_width if backward else width + value_width
    return 2 * batch * heads * queries * math.prod(reach) * each


@register_flop_formula(find_packet(simplicial_forward))
def _(tensors, extras, ints, *_, **__) -> int:
    return _count_flops(tensors, ints, False)


@register_flop_formula(find_packet(simplicial_backward))
def _(grad, out, lse, tensors, needs_grad, extras, ints, *_, **__) -> int:
    return _count_flops(tensors, ints, True)
