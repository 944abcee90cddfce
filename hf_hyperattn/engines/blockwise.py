"""Attention in blocks of query rows, in plain torch: any device, forward and backward, no N x M buffer.

Each tile holds all keys that a block of query rows can see, so its softmax needs no running maximum. The backward
pass computes each tile again from the saved log-sum-exp. Results are deterministic: tiles are summed in a fixed
order, and dropout is drawn from one seed per tile. For the compiler and for export the engine is one operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .flops import count_flops
from .options import Options, full_precision, position_mask
from .score import PairScore
from .tiles import Call, Tensors, Tile

#: Elements of one tile: enough that the overhead of an operation vanishes, few enough for the cache of a core (2^18
#: float32 numbers are 1 MiB). Backward holds some twenty tiles at once. Dropout needs one size for both.
FORWARD_ELEMENTS = 2**18
BACKWARD_ELEMENTS = 2**17


def attend(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, None]:
    """softmax(S)·V without the full matrix; arguments as in `reference.attend`, weights are not returned.

    Extra memory is O(block x M) beside features, points, statistics and the output.
    """
    row, column, head = score.numbers()
    extras = extras_of(score, options)
    tensors = [score.query, score.key, value.to(score.query.dtype), *row, *column, *head, *extras.values()]
    out, _ = _forward(
        tensors,
        score.spec,
        " ".join(extras),
        options.is_causal,
        options.window,
        options.offset,
        options.softcap,
        options.dropout_p,
    )
    return out, None


def extras_of(score: PairScore, options: Options) -> dict[str, Tensor]:
    """The tensors of a call that not every call has, by the names that `Call.parse` knows."""
    extras = {"mask": options.mask, "bias": options.bias, "sinks": options.sinks}
    if score.points is not None:
        points = score.points()
        extras |= {"points_query": points.query, "points_key": points.key}
    if options.dropout_p:
        extras["seed"] = torch.randint(2**62, (1,))
    return {name: t for name, t in extras.items() if t is not None}


@torch.library.custom_op("hf_hyperattn::blockwise", mutates_args=())
def _forward(
    tensors: Sequence[Tensor],
    spec: str,
    extras: str,
    is_causal: bool,
    window: int | None,
    offset: int,
    softcap: float | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    call = Call.parse(
        tensors, spec, extras, Options(None, None, is_causal, window, offset, softcap, None, dropout_p)
    )
    t = call.tensors
    out = t.query.new_empty(*t.query.shape[:-1], t.value.shape[-1])
    lse = t.query.new_empty(t.query.shape[:-1])
    for tile in call.tiles(BACKWARD_ELEMENTS if dropout_p else FORWARD_ELEMENTS):
        weights, sums, tile_lse = softmax(tile, hide(tile, total(tile, pieces(tile, derive=False))))
        factors = keep(tile, weights)
        weights = weights if factors is None else weights.mul_(factors)
        tile.of_query(out).copy_(tile.product(weights, tile.of_key(t.value).mT).div_(sums))
        tile.of_row(lse).copy_(tile_lse)
    return out.flatten(1, 2), lse.flatten(1, 2)


@_forward.register_fake
def _(tensors, *_):
    query, _, value = tensors[:3]
    return query.new_empty(*query.shape[:3], value.shape[-1]), query.new_empty(query.shape[:3])


@torch.library.custom_op("hf_hyperattn::blockwise_backward", mutates_args=())
def _backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    wanted: Sequence[bool],
    spec: str,
    extras: str,
    is_causal: bool,
    window: int | None,
    offset: int,
    softcap: float | None,
    dropout_p: float,
) -> list[Tensor]:
    call = Call.parse(
        tensors, spec, extras, Options(None, None, is_causal, window, offset, softcap, None, dropout_p)
    )
    buffers = [
        t.new_zeros(shape, dtype=out.dtype) for t, shape in zip(tensors, _shapes(tensors, wanted, extras))
    ]
    grads = Call.parse(buffers, spec, extras, call.options, wanted).tensors
    group = call.tensors.query.shape[1:3]
    grad, out, lse = (x.unflatten(1, group) for x in (grad, out, lse))
    with full_precision(grad.device):  # backward may be called under autocast
        for tile in call.tiles(BACKWARD_ELEMENTS):
            backward(tile, grads, tile.of_query(grad), tile.of_query(out), tile.of_row(lse))
    return buffers


def _shapes(tensors: Sequence[Tensor], wanted: Sequence[bool], extras: str) -> list[tuple[int, ...]]:
    """Shapes of the gradients: as the tensors, but empty for an extra that needs none."""
    main = len(tensors) - len(extras.split())
    return [tuple(t.shape) if i < main or wanted[i] else (0,) for i, t in enumerate(tensors)]


def _save(ctx, inputs, output):
    tensors, *ctx.rest = inputs
    ctx.save_for_backward(*output, *tensors)


def _pullback(ctx, grad, _grad_lse):
    out, lse, *tensors = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[0])
    buffers = _backward(grad.contiguous(), out, lse, tensors, wanted, *ctx.rest)
    grads = [g.to(t.dtype) if w else None for g, t, w in zip(buffers, tensors, wanted)]
    return grads, *[None] * len(ctx.rest)


@_backward.register_fake
def _(grad, out, lse, tensors, wanted, spec, extras, *_):
    return [
        t.new_empty(shape, dtype=out.dtype) for t, shape in zip(tensors, _shapes(tensors, wanted, extras))
    ]


_forward.register_autograd(_pullback, setup_context=_save)


def pieces(tile: Tile, derive: bool) -> list[tuple]:
    """For each piece of the score: its logits, its gate or None, and where `derive`, its pullback."""
    t, found = tile.call.tensors, []
    dot = tile.product(tile.of_query(t.query), tile.of_key(t.key))
    rows, columns, heads = iter(t.row), iter(t.column), iter(t.head)
    gap = None if t.points_query is None else tile.gap
    for term, gated in tile.call.terms:
        row = [tile.of_row(next(rows)) for _ in range(term.rows)]
        column = [tile.of_column(next(columns)) for _ in range(term.columns)]
        head = [tile.of_head(next(heads)) for _ in range(term.heads)]
        numbers = (dot, row, column, head, gap)
        part, pull = term.vjp(*numbers) if derive else (term.logits(*numbers), None)
        found.append((part, tile.of_head(next(heads)) if gated else None, pull))
    return found


def total(tile: Tile, found: list[tuple]) -> Tensor:
    """The sum of the pieces, capped where they are to be; never the product itself, so that it may be overwritten."""
    softcap, logits = tile.call.options.softcap, None
    for (part, gate, _), capped in zip(found, tile.call.capped, strict=True):
        part = softcap * torch.tanh(part / softcap) if capped and softcap is not None else part
        part = part if gate is None else part * gate
        logits = part if logits is None else logits + part
    return logits


def hide(tile: Tile, logits: Tensor) -> Tensor:
    """`logits` after bias and masks, in place; hidden pairs are -inf."""
    t, options = tile.call.tensors, tile.call.options
    if t.bias is not None:
        logits.add_(tile.of_pair(t.bias))
    if t.mask is not None and t.mask.dtype != torch.bool:
        logits.add_(tile.of_pair(t.mask))
    elif t.mask is not None:
        logits.masked_fill_(~tile.of_pair(t.mask), float("-inf"))
    # without a window, causality cuts only the keys from the block's first row on
    start = (
        tile.columns.start if options.window else max(tile.columns.start, tile.rows.start + options.offset)
    )
    edge = range(min(start, tile.columns.stop), tile.columns.stop)
    visible = position_mask(
        options, (tile.rows.start, tile.rows.stop), (edge.start, edge.stop), logits.device
    )
    if visible is not None and len(edge):
        logits[..., edge.start - tile.columns.start :].masked_fill_(~visible, float("-inf"))
    return logits


def softmax(tile: Tile, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised weights (in place), their row sums, and the log-sum-exp; a row that sees nothing sums to 1."""
    lowest = torch.finfo(logits.dtype).min
    top = (
        logits.amax(-1, keepdim=True)
        if len(tile.columns)
        else logits.new_full((*logits.shape[:-1], 1), lowest)
    )
    sinks = tile.call.tensors.sinks
    if sinks is not None:
        top = torch.maximum(top, tile.of_head(sinks))
    top.clamp_min_(lowest)
    weights = logits.sub_(top).exp_()
    sums = weights.sum(-1, keepdim=True)
    if sinks is not None:
        sums = sums + torch.exp(tile.of_head(sinks) - top)
    return weights, sums.masked_fill(sums == 0, 1.0), top + sums.log()


def keep(tile: Tile, weights: Tensor) -> Tensor | None:
    """What dropout leaves, as factors 0 or 1/(1-p); the same for forward and backward."""
    p = tile.call.options.dropout_p
    if not p:
        return None
    generator = torch.Generator(weights.device).manual_seed((tile.call.seed + tile.index) % 2**63)
    return torch.empty_like(weights).bernoulli_(1 - p, generator=generator).div_(1 - p)


def backward(tile: Tile, grads: Tensors, grad: Tensor, out: Tensor, lse: Tensor) -> None:
    """Add this tile's share to all gradients; `grad`, `out` are [hc, G, R, dv], `lse` is [hc, G, R, 1]."""
    t = tile.call.tensors
    found = pieces(tile, derive=True)
    logits = hide(tile, total(tile, found))
    weights = logits.sub_(lse.masked_fill(lse == float("-inf"), float("inf"))).exp_()
    d_weights = tile.product(grad, tile.of_key(t.value))
    factors = keep(tile, weights)
    if factors is not None:
        d_weights.mul_(factors)
    delta = deltas(tile, weights, d_weights, grad, out, lse)
    tile.of_key(grads.value).add_(
        tile.transposed_product(weights if factors is None else weights * factors, grad)
    )
    d_logits = d_weights.sub_(delta).mul_(weights)
    if grads.sinks is not None:
        share = -torch.exp(tile.of_head(t.sinks) - lse) * delta
        add(tile.of_head(grads.sinks), share)
    for name in ("bias", "mask"):
        if getattr(grads, name) is not None:
            add(tile.of_pair(getattr(grads, name)), d_logits)
    through_pieces(tile, grads, found, d_logits)


def deltas(tile: Tile, weights: Tensor, d_weights: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The mean of `d_weights` in each row, [hc, G, R, 1], which is grad · out.

    Parameters may have slopes so large that these multiply what rounding leaves of a row's gradients, which should add
    up to 0: for them it is the mean by these very weights, the sum of which is 1 but for the rounding of `lse`.
    """
    if not tile.call.tensors.head:
        return (grad * out).sum(-1, keepdim=True)
    total, sinks = weights.sum(-1, keepdim=True), tile.call.tensors.sinks
    if sinks is not None:
        total = total + torch.exp(tile.of_head(sinks) - lse)
    return (weights * d_weights).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1.0)


def through_pieces(tile: Tile, grads: Tensors, found: list[tuple], d_logits: Tensor) -> None:
    """From the gradient of the logits to those of features, statistics and parameters."""
    rows, columns, heads = iter(grads.row), iter(grads.column), iter(grads.head)
    d_dot, softcap = None, tile.call.options.softcap
    for index, (part, gate, pull) in enumerate(found):
        term = tile.call.terms[index][0]
        d_part = d_logits
        if tile.call.capped[index] and softcap is not None:
            capped = torch.tanh(part / softcap)
            d_part = d_logits * (1 - capped.square())
            part = softcap * capped
        d_piece, d_row, d_column, d_head, *d_gap = pull(d_part if gate is None else d_part * gate)
        if d_gap:
            tile.through_gap(grads, *d_gap)
        if d_piece is not None:
            d_dot = d_piece if d_dot is None else d_dot + d_piece
        for n, gradients, buffers, cut in (
            (term.rows, d_row, rows, tile.of_row),
            (term.columns, d_column, columns, tile.of_column),
            (term.heads, d_head, heads, tile.of_head),
        ):
            for _, gradient in zip(range(n), gradients, strict=True):
                buffer = next(buffers)
                if gradient is not None:
                    add(cut(buffer), gradient)
        if gate is not None:
            add(tile.of_head(next(heads)), d_logits * part)
    if d_dot is not None:
        t = tile.call.tensors
        tile.of_query(grads.query).add_(tile.product(d_dot, tile.of_key(t.key).mT))
        tile.of_key(grads.key).add_(tile.transposed_product(d_dot, tile.of_query(t.query)))


def add(target: Tensor, gradient: Tensor) -> None:
    """Add a gradient to a slice of a buffer, summed over the axes along which the slice is broadcast."""
    target.add_(gradient.sum_to_size(target.shape))


count_flops(_forward)
count_flops(_backward, at=3, backward=True)
