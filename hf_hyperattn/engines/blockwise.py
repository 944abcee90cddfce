"""Attention in blocks of query rows, in plain torch: any device, forward and backward, no N x M buffer.

Each tile holds all keys that a block of query rows can see, so its softmax needs no running maximum. The backward
pass computes each tile again from the saved log-sum-exp. Results are deterministic: tiles are summed in a fixed
order, and dropout is drawn from one seed per tile. For the compiler and for export the engine is one operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import serialize
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
    return serialize.call(forward, score.score_key, False, score, value, options)


@torch.library.custom_op("hf_hyperattn::blockwise", mutates_args=(), schema=serialize.FORWARD)
def forward(tensors: Sequence[Tensor], *settings) -> tuple[Tensor, Tensor]:
    """Output [B, H, N, dv] and log-sum-exp [B, H, N]; arguments as `serialize` has them."""
    call = Call.of(serialize.read(tensors, *settings))
    t = call.tensors
    out = t.query.new_empty(*t.query.shape[:-1], t.value.shape[-1])
    lse = t.query.new_empty(t.query.shape[:-1])
    for tile in call.tiles(BACKWARD_ELEMENTS if call.options.dropout_p else FORWARD_ELEMENTS):
        weights, sums, tile_lse = softmax(
            tile, hide(tile, total(tile, evaluate_terms(tile, derive=False)))
        )
        factors = keep(tile, weights)
        weights = weights if factors is None else weights.mul_(factors)
        tile.of_query(out).copy_(tile.product(weights, tile.of_key(t.value).mT).div_(sums))
        tile.of_row(lse).copy_(tile_lse)
    return out.flatten(1, 2), lse.flatten(1, 2)


@forward.register_fake
def _(tensors, *_):
    query, _, value = tensors[:3]
    return query.new_empty(*query.shape[:3], value.shape[-1]), query.new_empty(query.shape[:3])


@torch.library.custom_op(
    "hf_hyperattn::blockwise_backward", mutates_args=(), schema=serialize.BACKWARD
)
def gradients(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    needs_grad: Sequence[bool],
    *settings,
) -> list[Tensor]:
    """Gradients of all tensors; empty for an extra that needs none."""
    call = Call.of(serialize.read(tensors, *settings))
    shapes = gradient_shapes(tensors, needs_grad, settings[1])
    buffers = [out.new_zeros(shape) for shape in shapes]
    grads = Call.of(serialize.read(buffers, *settings), gradients=True).tensors
    group = call.tensors.query.shape[1:3]
    grad, out, lse = (x.unflatten(1, group) for x in (grad, out, lse))
    with full_precision(grad.device):  # backward may be called under autocast
        for tile in call.tiles(BACKWARD_ELEMENTS):
            backward(tile, grads, tile.of_query(grad), tile.of_query(out), tile.of_row(lse))
    return buffers


def gradient_shapes(
    tensors: Sequence[Tensor], needs_grad: Sequence[bool], extras: str
) -> list[tuple[int, ...]]:
    """Shapes of the gradients of an operator's tensors, empty for an extra that needs none."""
    names = extras.split()
    learned = dict(zip(names, needs_grad[len(tensors) - len(names) :], strict=True))
    return serialize.shapes(tensors, extras, learned.__getitem__)


@gradients.register_fake
def _(grad, out, lse, tensors, needs_grad, score_key, extras, *_):
    return [out.new_empty(shape) for shape in gradient_shapes(tensors, needs_grad, extras)]


serialize.differentiable(forward, gradients, "blockwise")


def evaluate_terms(tile: Tile, derive: bool) -> list[tuple]:
    """For each term of the score: its logits, its gate or None, and where `derive`, its pullback."""
    t, evaluated = tile.call.tensors, []
    dot = tile.product(tile.of_query(t.query), tile.of_key(t.key))
    rows, columns, heads = iter(t.row), iter(t.column), iter(t.head)
    squared_distance = None if t.points_query is None else tile.squared_distance
    for term, gated, _ in tile.call.terms:
        row = [tile.of_row(next(rows)) for _ in range(term.rows)]
        column = [tile.of_column(next(columns)) for _ in range(term.columns)]
        head = [tile.of_head(next(heads)) for _ in range(term.heads)]
        numbers = (dot, row, column, head, squared_distance)
        part, pull = term.vjp(*numbers) if derive else (term.logits(*numbers), None)
        evaluated.append((part, tile.of_head(next(heads)) if gated else None, pull))
    return evaluated


def total(tile: Tile, evaluated: list[tuple]) -> Tensor:
    """The sum of the terms, capped where they are to be; never the product itself, so that it may be overwritten."""
    softcap, logits = tile.call.options.softcap, torch.empty(0)
    for index, ((part, gate, _), (_, _, capped)) in enumerate(
        zip(evaluated, tile.call.terms, strict=True)
    ):
        part = softcap * torch.tanh(part / softcap) if capped and softcap is not None else part
        part = part if gate is None else part * gate
        logits = logits + part if index else part
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
        tile.columns.start
        if options.window
        else max(tile.columns.start, tile.rows.start + options.offset)
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
    evaluated = evaluate_terms(tile, derive=True)
    # not by the log-sum-exp: beside logits of -1e9, of a row that an additive mask hides, the log is lost to rounding
    weights, sums, _ = softmax(tile, hide(tile, total(tile, evaluated)))
    weights.div_(sums)
    d_weights = tile.product(grad, tile.of_key(t.value))
    factors = keep(tile, weights)
    if factors is not None:
        d_weights.mul_(factors)
    delta = deltas(tile, weights, d_weights, grad, out, lse)
    tile.of_key(grads.value).add_(
        tile.transposed_product(weights if factors is None else weights * factors, grad)
    )
    d_logits = d_weights.sub_(delta).mul_(weights)
    if grads.sinks is not None and t.sinks is not None:
        share = -torch.exp(tile.of_head(t.sinks) - lse) * delta
        add(tile.of_head(grads.sinks), share)
    for name in ("bias", "mask"):
        if getattr(grads, name) is not None:
            add(tile.of_pair(getattr(grads, name)), d_logits)
    backward_terms(tile, grads, evaluated, d_logits)


def deltas(
    tile: Tile, weights: Tensor, d_weights: Tensor, grad: Tensor, out: Tensor, lse: Tensor
) -> Tensor:
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


def backward_terms(tile: Tile, grads: Tensors, evaluated: list[tuple], d_logits: Tensor) -> None:
    """From the gradient of the logits to those of features, statistics and parameters."""
    rows, columns, heads = iter(grads.row), iter(grads.column), iter(grads.head)
    d_dot, softcap = None, tile.call.options.softcap
    for (part, gate, pull), (term, _, caps) in zip(evaluated, tile.call.terms, strict=True):
        d_part = d_logits
        if caps and softcap is not None:
            capped = torch.tanh(part / softcap)
            d_part = d_logits * (1 - capped.square())
            part = softcap * capped
        d_product, d_row, d_column, d_head, *d_distance = pull(
            d_part if gate is None else d_part * gate
        )
        if d_distance:
            tile.backward_distances(grads, *d_distance)
        if d_product is not None:
            d_dot = d_product if d_dot is None else d_dot + d_product
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
