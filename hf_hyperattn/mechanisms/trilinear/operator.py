"""Three-way attention tile by tile, as one operator with a backward pass that computes every tile again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...engines.options import Options, full_precision
from ...engines.tiles import by_group
from .pairs import Windows
from .tile import Block, Call, Chunk, Tensors

#: The tensors of a call that are always there; those after them are named by `extras`.
MAIN = 5


def blockwise(
    query: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    options: Options,
    windows: Windows,
    offset: Tensor | None = None,
) -> Tensor:
    """`definition.simplicial` without its N x M x M logits; no weights, and no gradient for an additive mask.

    Memory beside inputs and output is O(tile). Deterministic: tiles are summed in a fixed order, and dropout is drawn
    from one seed per tile.

    Args:
        offset: int64, of no axes, in place of `options.offset` where that is not known as a number.
    """
    extras = {"mask": options.mask, "bias": options.bias, "sinks": options.sinks, "offset": offset}
    if options.dropout_p:
        extras["seed"] = torch.randint(2**62, (1,))
    extras = {name: t for name, t in extras.items() if t is not None}
    rest = (
        " ".join(extras), options.is_causal, options.window, options.offset, options.softcap, options.dropout_p,
        windows.first, windows.second, windows.back,
    )  # fmt: skip
    return _forward([query, keys[0], keys[1], *values, *extras.values()], *rest)[0]


def parse(
    tensors: Sequence[Tensor], extras: str, is_causal, window, offset, softcap, dropout_p, first, second, back
) -> Call:
    """A call from an operator's arguments."""
    named = dict(zip(extras.split(), tensors[MAIN:], strict=True))
    offset = int(named["offset"]) if "offset" in named else offset
    options = Options(None, None, is_causal, window, offset, softcap, None, dropout_p)
    seed = int(named["seed"]) if "seed" in named else 0
    return Call(grouped(tensors[:MAIN], named), options, Windows(first, second, back), seed)


def grouped(main: Sequence[Tensor], named: dict[str, Tensor]) -> Tensors:
    """Tensors, or gradients, grouped by key heads."""
    kv_heads = main[1].shape[1]
    group = (kv_heads, main[0].shape[1] // kv_heads)
    mask, bias = (by_group(named.get(name), group) for name in ("mask", "bias"))
    sinks = named["sinks"].view(group) if "sinks" in named else None
    return Tensors(main[0].unflatten(1, group), *main[1:], mask, bias, sinks)


@torch.library.custom_op("hf_hyperattn::simplicial", mutates_args=())
def _forward(
    tensors: Sequence[Tensor], extras: str, is_causal: bool, window: int | None, offset: int, softcap: float | None,
    dropout_p: float, first: int | None, second: int | None, back: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = parse(tensors, extras, is_causal, window, offset, softcap, dropout_p, first, second, back)
    t = call.tensors
    out = t.query.new_empty(*t.query.shape[:-1], t.value.shape[-1])
    lse = t.query.new_empty(t.query.shape[:-1])
    for block, chunks in numbered(call):
        found, total = forward(block, chunks)
        block.of_query(out).copy_(found)
        block.of_query(lse).copy_(total)
    return out.flatten(1, 2), lse.flatten(1, 2)


@_forward.register_fake
def _(tensors, *_):
    query, value = tensors[0], tensors[3]
    return query.new_empty(*query.shape[:3], value.shape[-1]), query.new_empty(query.shape[:3])


def numbered(call: Call) -> Iterator[tuple[Block, list[tuple[int, Chunk]]]]:
    """Every block with its chunks, which are numbered through: the numbers give dropout its seeds."""
    index = 0
    for block in call.blocks():
        chunks = list(enumerate(block.chunks(), index))
        index += len(chunks)
        yield block, chunks


def forward(block: Block, chunks: list[tuple[int, Chunk]]) -> tuple[Tensor, Tensor]:
    """Output [G, R, dv] and log-sum-exp [G, R] of a block: a softmax over all chunks with a running maximum."""
    t = block.call.tensors
    query, value = block.of_query(t.query), block.of_first(t.value)
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    top = query.new_full(query.shape[:2], torch.finfo(query.dtype).min)
    sums = torch.zeros_like(top)
    for index, chunk in chunks:
        logits = chunk.logits(chunk.dots(chunk.modified()))
        highest = logits.amax(-1) if logits.shape[-1] else torch.full_like(logits.sum(-1), float("-inf"))
        sink = None if t.sinks is None else t.sinks[block.head][:, None, None]
        highest = highest if sink is None else torch.maximum(highest, sink)
        new = torch.maximum(top, (highest + chunk.second).amax(-1))
        shift = new[..., None] - chunk.second
        weights = logits.sub_(shift[..., None]).exp_()
        shrink = torch.exp(top - new)
        sums = sums * shrink + weights.sum((-2, -1))
        sums = sums if sink is None else sums + torch.exp(sink - shift).sum(-1)
        kept = chunk.kept(weights, index)
        weights = weights if kept is None else weights.mul_(kept)
        out = out * shrink[..., None] + (averaged(weights, value) * chunk.read(t.value2)).sum(2)
        top = new
    sums = sums.masked_fill(sums == 0, 1.0)
    return out / sums[..., None], top + sums.log()


def averaged(weights: Tensor, value: Tensor) -> Tensor:
    """Σ_j weights v_j, [G, R, C, dv]."""
    return (weights.flatten(0, 2) @ value).view(*weights.shape[:3], value.shape[-1])


@torch.library.custom_op("hf_hyperattn::simplicial_backward", mutates_args=())
def _backward(
    grad: Tensor, out: Tensor, lse: Tensor, tensors: Sequence[Tensor], extras: str, is_causal: bool,
    window: int | None, offset: int, softcap: float | None, dropout_p: float, first: int | None, second: int | None,
    back: bool,
) -> list[Tensor]:  # fmt: skip
    call = parse(tensors, extras, is_causal, window, offset, softcap, dropout_p, first, second, back)
    buffers = [t.new_zeros(s, dtype=out.dtype) for t, s in zip(tensors, shapes(tensors, extras))]
    named = {n: b for n, b in zip(extras.split(), buffers[MAIN:]) if n in ("bias", "sinks")}
    grads = grouped(buffers[:MAIN], named)
    group = call.tensors.query.shape[1:3]
    grad, out, lse = (x.unflatten(1, group) for x in (grad, out, lse))
    with full_precision(grad.device):  # backward may be called under autocast
        for block, chunks in numbered(call):
            backward(block, chunks, grads, *(block.of_query(x) for x in (grad, out, lse)))
    return buffers


@_backward.register_fake
def _(grad, out, lse, tensors, extras, *_):
    return [t.new_empty(s, dtype=out.dtype) for t, s in zip(tensors, shapes(tensors, extras))]


def shapes(tensors: Sequence[Tensor], extras: str) -> list[tuple[int, ...]]:
    """Shapes of the gradients: as the tensors, but empty for what has none."""
    names = [""] * MAIN + extras.split()
    return [tuple(t.shape) if n in ("", "bias", "sinks") else (0,) for t, n in zip(tensors, names)]


def _save(ctx, inputs, output):
    tensors, *ctx.rest = inputs
    ctx.save_for_backward(*output, *tensors)


def _pullback(ctx, grad, _grad_lse):
    out, lse, *tensors = ctx.saved_tensors
    buffers = _backward(grad.contiguous(), out, lse, tensors, *ctx.rest)
    wanted = ctx.needs_input_grad[0]
    grads = [g.to(t.dtype) if w else None for g, t, w in zip(buffers, tensors, wanted)]
    return grads, *[None] * len(ctx.rest)


_forward.register_autograd(_pullback, setup_context=_save)


def backward(
    block: Block, chunks: list[tuple[int, Chunk]], grads: Tensors, grad: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Add a block's share to all gradients; grad and out are [G, R, dv], lse is [G, R]."""
    delta = (grad * out).sum(-1)
    for index, chunk in chunks:
        through(chunk, index, grads, grad, delta, lse)


def through(chunk: Chunk, index: int, grads: Tensors, grad: Tensor, delta: Tensor, lse: Tensor) -> None:
    """A chunk's share: with y_ik = Σ_j P_ijk v_j, the output is Σ_k y_ik ∘ v2_k."""
    block, t = chunk.block, chunk.block.call.tensors
    value, value2 = block.of_first(t.value), chunk.read(t.value2)
    modified = chunk.modified()
    dots = chunk.dots(modified)
    cap = block.options.softcap
    slope = None if cap is None else 1 - (dots / cap).tanh_().square_()
    shift = lse[..., None] - chunk.second
    weights = chunk.logits(dots).sub_(shift[..., None]).exp_()
    d_y = grad[:, :, None] * value2
    d_weights = (d_y.flatten(0, 2) @ value.mT).view_as(weights)
    kept = chunk.kept(weights, index)
    dropped = weights if kept is None else weights * kept
    d_weights = d_weights if kept is None else d_weights.mul_(kept)
    block.of_first(grads.value).add_(dropped.flatten(0, 2).mT @ d_y.flatten(0, 2))
    chunk.add(grads.value2, (grad[:, :, None] * averaged(dropped, value)).sum(0))
    d_logits = d_weights.sub_(delta[..., None, None]).mul_(weights)
    if grads.sinks is not None:
        sink = torch.exp(t.sinks[block.head][:, None, None] - shift).sum(-1)
        grads.sinks[block.head].sub_((sink * delta).sum(-1))
    if grads.bias is not None:
        add_bias(block, grads.bias, d_logits.sum(2))
    d_dots = d_logits if slope is None else d_logits.mul_(slope)
    through_product(chunk, grads, modified, d_dots)


def through_product(chunk: Chunk, grads: Tensors, modified: Tensor, d_dots: Tensor) -> None:
    """From the gradient of the products to those of q, k and k2."""
    block, t = chunk.block, chunk.block.call.tensors
    d_modified = (d_dots.flatten(0, 2) @ block.of_first(t.key)).view_as(modified)
    block.of_first(grads.key).add_(d_dots.flatten(0, 2).mT @ modified.flatten(0, 2))
    block.of_query(grads.query).add_((d_modified * chunk.read(t.key2)).sum(2))
    chunk.add(grads.key2, (d_modified * block.of_query(t.query)[:, :, None]).sum(0))


def add_bias(block: Block, buffer: Tensor, gradient: Tensor) -> None:
    """Add [G, R, J] to what the block reads of a bias, summed over the axes along which that is broadcast."""
    part = buffer[block.batch if buffer.shape[0] > 1 else 0]
    part = part[block.head if part.shape[0] > 1 else 0]
    part = part if part.shape[1] == 1 else part[:, block.rows.start : block.rows.stop]
    part = part if part.shape[2] == 1 else part[..., block.columns.start : block.columns.stop]
    part.add_(gradient.sum_to_size(part.shape))
