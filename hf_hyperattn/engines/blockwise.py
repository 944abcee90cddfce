"""Compute attention in blocks of query rows, in plain torch on any device.

A tile holds all keys that a block of query rows sees, so its softmax needs no running maximum. The
backward pass computes each tile again, and no N x M buffer is needed.

Results are deterministic: tiles are summed in a fixed order, and each tile draws its dropout from
its own seed. For the compiler and for export, the engine is one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import serialize
from .options import Options, full_precision, position_mask
from .score import PairScore
from .tiles import Call, Tensors, Tile

#: Elements of one tile: enough to hide the overhead of an operation, few enough for the cache of a
#: core (2^18 float32 numbers are 1 MiB). Backward holds about twenty tiles at once. Dropout needs
#: the same size in both passes.
FORWARD_ELEMENTS = 2**18
BACKWARD_ELEMENTS = 2**17


def attend(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, None]:
    """Compute softmax(S)·V without the full matrix.

    Extra memory is O(block x M) besides features, points, statistics and the output.

    Args:
        score, value, options: As in `reference.attend`.

    Returns:
        The output [B, H, N, dv], and None for the weights.
    """
    return serialize.call_operator(compute_output, score.score_key, False, score, value, options)


@torch.library.custom_op("hf_hyperattn::blockwise", mutates_args=(), schema=serialize.FORWARD)
def compute_output(tensors: Sequence[Tensor], *settings) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, N, dv] and the log-sum-exp [B, H, N].

    Args:
        tensors, settings: As written by `serialize.call_operator`.
    """
    call = Call.from_operator(serialize.read_arguments(tensors, *settings))
    t = call.tensors
    out = t.query.new_empty(*t.query.shape[:-1], t.value.shape[-1])
    lse = t.query.new_empty(t.query.shape[:-1])
    # Dropout is drawn per tile, so forward must cut the same tiles as backward.
    elements = BACKWARD_ELEMENTS if call.options.dropout_p else FORWARD_ELEMENTS
    for tile in call.cut_tiles(elements):
        logits = hide_pairs(tile, sum_terms(tile, evaluate_terms(tile, derive=False)))
        weights, sums, tile_lse = softmax_rows(tile, logits)
        factors = draw_dropout(tile, weights)
        weights = weights if factors is None else weights.mul_(factors)
        # Dividing the output instead of the weights touches R x dv numbers, not R x C.
        average = tile.multiply_keys(weights, tile.of_key(t.value).mT).div_(sums)
        tile.of_query(out).copy_(average)
        tile.of_row(lse).copy_(tile_lse)
    return out.flatten(1, 2), lse.flatten(1, 2)


@compute_output.register_fake
def fake_output(tensors, *_):
    """Return the outputs without computing them, for the compiler."""
    query, _, value = tensors[:3]
    return query.new_empty(*query.shape[:3], value.shape[-1]), query.new_empty(query.shape[:3])


@torch.library.custom_op(
    "hf_hyperattn::blockwise_backward", mutates_args=(), schema=serialize.BACKWARD
)
def compute_gradients(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    needs_grad: Sequence[bool],
    *settings,
) -> list[Tensor]:
    """Return the gradients of all tensors; shape (0,) for an unneeded extra.

    Args:
        grad: Gradient of the output [B, H, N, dv].
        out, lse: Results of `compute_output`.
        tensors, settings: As in `compute_output`.
        needs_grad: Which tensors need a gradient.
    """
    call = Call.from_operator(serialize.read_arguments(tensors, *settings))
    shapes = gradient_shapes(tensors, needs_grad, settings[1])
    buffers = [out.new_zeros(shape) for shape in shapes]
    # The same slices as for the tensors, but of the buffers: tiles add to them in place.
    grads = Call.from_operator(serialize.read_arguments(buffers, *settings), gradients=True).tensors
    group = call.tensors.query.shape[1:3]
    grad, out, lse = (x.unflatten(1, group) for x in (grad, out, lse))
    # Autograd may run the backward pass under autocast.
    with full_precision(grad.device):
        for tile in call.cut_tiles(BACKWARD_ELEMENTS):
            backward_tile(tile, grads, tile.of_query(grad), tile.of_query(out), tile.of_row(lse))
    return buffers


def gradient_shapes(
    tensors: Sequence[Tensor], needs_grad: Sequence[bool], extras: str
) -> list[tuple[int, ...]]:
    """Return the shapes of the gradients of an operator's tensors.

    Args:
        tensors: The tensors.
        needs_grad: Which of them need a gradient.
        extras: Names of the last ones. The shape is (0,) for an extra that needs no gradient.
    """
    names = extras.split()
    learned = dict(zip(names, needs_grad[len(tensors) - len(names) :], strict=True))
    return serialize.shape_gradients(tensors, extras, learned.__getitem__)


@compute_gradients.register_fake
def fake_gradients(grad, out, lse, tensors, needs_grad, score_key, extras, *_):
    """Return the gradients without computing them, for the compiler."""
    return [out.new_empty(shape) for shape in gradient_shapes(tensors, needs_grad, extras)]


serialize.register_gradients(compute_output, compute_gradients, "blockwise")


def evaluate_terms(tile: Tile, derive: bool) -> list[tuple]:
    """Evaluate every term of the score on a tile.

    Args:
        tile: The tile.
        derive: Also return the derivatives.

    Returns:
        For each term its logits, its gate or None, and the function of `Term.vjp` or None.
    """
    t = tile.call.tensors
    dot = tile.multiply_keys(tile.of_query(t.query), tile.of_key(t.key))
    # The numbers of all terms stand in one list per kind, in the order of the terms.
    rows, columns, heads = iter(t.row), iter(t.column), iter(t.head)
    squared_distance = None if t.points_query is None else tile.squared_distance
    evaluated = []
    for term, gated, _ in tile.call.terms:
        row = [tile.of_row(next(rows)) for _ in range(term.rows)]
        column = [tile.of_column(next(columns)) for _ in range(term.columns)]
        head = [tile.of_head(next(heads)) for _ in range(term.heads)]
        numbers = (dot, row, column, head, squared_distance)
        part, pull = term.vjp(*numbers) if derive else (term.logits(*numbers), None)
        # A gate stands behind the head parameters of its term.
        gate = tile.of_head(next(heads)) if gated else None
        evaluated.append((part, gate, pull))
    return evaluated


def sum_terms(tile: Tile, evaluated: list[tuple]) -> Tensor:
    """Return the sum of the terms, with caps and gates.

    The result is never the product itself, so that the caller may overwrite it.

    Args:
        tile: The tile.
        evaluated: Result of `evaluate_terms`.
    """
    softcap = tile.call.options.softcap
    logits = torch.empty(0)
    for index, (values, (_, _, capped)) in enumerate(zip(evaluated, tile.call.terms, strict=True)):
        part, gate, _ = values
        if capped and softcap is not None:
            part = softcap * torch.tanh(part / softcap)
        part = part if gate is None else part * gate
        logits = logits + part if index else part
    return logits


def hide_pairs(tile: Tile, logits: Tensor) -> Tensor:
    """Add bias and mask to the logits in place, with -inf at hidden pairs."""
    t, options = tile.call.tensors, tile.call.options
    if t.bias is not None:
        logits.add_(tile.of_pair(t.bias))
    if t.mask is not None and t.mask.dtype != torch.bool:
        logits.add_(tile.of_pair(t.mask))
    elif t.mask is not None:
        logits.masked_fill_(~tile.of_pair(t.mask), float("-inf"))
    # Without a window, every row of the block sees the keys before its first row. Only later keys
    # are compared.
    start = tile.columns.start
    if not options.window:
        start = max(start, tile.rows.start + options.offset)
    edge = range(min(start, tile.columns.stop), tile.columns.stop)
    visible = position_mask(
        options, (tile.rows.start, tile.rows.stop), (edge.start, edge.stop), logits.device
    )
    if visible is not None and len(edge):
        logits[..., edge.start - tile.columns.start :].masked_fill_(~visible, float("-inf"))
    return logits


def softmax_rows(tile: Tile, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return unnormalised weights, their row sums, and the log-sum-exp.

    Args:
        tile: The tile.
        logits: Logits [hc, G, R, C]; the weights overwrite them.

    Returns:
        Weights [hc, G, R, C], sums [hc, G, R, 1] and log-sum-exp [hc, G, R, 1]. The sum is 1 for a
        row that sees nothing.
    """
    lowest = torch.finfo(logits.dtype).min
    if len(tile.columns):
        top = logits.amax(-1, keepdim=True)
    else:
        top = logits.new_full((*logits.shape[:-1], 1), lowest)
    sinks = tile.call.tensors.sinks
    if sinks is not None:
        top = torch.maximum(top, tile.of_head(sinks))
    # A finite maximum avoids -inf - -inf = NaN in rows that see nothing.
    top.clamp_min_(lowest)
    weights = logits.sub_(top).exp_()
    sums = weights.sum(-1, keepdim=True)
    if sinks is not None:
        sums = sums + torch.exp(tile.of_head(sinks) - top)
    return weights, sums.masked_fill(sums == 0, 1.0), top + sums.log()


def draw_dropout(tile: Tile, weights: Tensor) -> Tensor | None:
    """Return dropout factors 0 or 1/(1-p), or None without dropout.

    Forward and backward draw the same factors, from a seed per tile.
    """
    p = tile.call.options.dropout_p
    if not p:
        return None
    generator = torch.Generator(weights.device).manual_seed((tile.call.seed + tile.index) % 2**63)
    return torch.empty_like(weights).bernoulli_(1 - p, generator=generator).div_(1 - p)


def backward_tile(tile: Tile, grads: Tensors, grad: Tensor, out: Tensor, lse: Tensor) -> None:
    """Add this tile's share to all gradients.

    Args:
        tile: The tile.
        grads: Gradients of the whole call, changed in place.
        grad: Gradient of the tile's output [hc, G, R, dv].
        out: Output of the tile [hc, G, R, dv].
        lse: Log-sum-exp of the tile [hc, G, R, 1].
    """
    t = tile.call.tensors
    evaluated = evaluate_terms(tile, derive=True)
    # Weights are normalised again, not by `lse`: next to the logits of -1e9 of a row that an
    # additive mask hides, its logarithm is lost to rounding.
    weights, sums, _ = softmax_rows(tile, hide_pairs(tile, sum_terms(tile, evaluated)))
    weights.div_(sums)
    d_weights = tile.multiply_keys(grad, tile.of_key(t.value))
    factors = draw_dropout(tile, weights)
    if factors is not None:
        d_weights.mul_(factors)
    # Before `d_weights` is overwritten below.
    mean = average_gradient(tile, weights, d_weights, grad, out, lse)
    dropped = weights if factors is None else weights * factors
    tile.of_key(grads.value).add_(tile.sum_over_rows(dropped, grad))
    # Derivative of softmax: dS = W (dW - mean of dW under W).
    d_logits = d_weights.sub_(mean).mul_(weights)
    if grads.sinks is not None and t.sinks is not None:
        # A sink is a pair without a value, so its gradient is -W · mean.
        share = -torch.exp(tile.of_head(t.sinks) - lse) * mean
        add_reduced(tile.of_head(grads.sinks), share)
    for d_pair in (grads.bias, grads.mask):
        if d_pair is not None:
            add_reduced(tile.of_pair(d_pair), d_logits)
    backward_terms(tile, grads, evaluated, d_logits)


def average_gradient(
    tile: Tile, weights: Tensor, d_weights: Tensor, grad: Tensor, out: Tensor, lse: Tensor
) -> Tensor:
    """Return the mean of `d_weights` under the weights in each row, [hc, G, R, 1].

    It equals grad · out. Scores with head parameters need it more exactly: rounding leaves a
    residue in the sum of a row's gradients, which should be 0, and large slopes of the parameters
    multiply it. For them the mean is computed from these very weights, whose sum is 1 up to the
    rounding of `lse`.

    Args:
        tile: The tile.
        weights: Weights [hc, G, R, C] before dropout.
        d_weights: Gradient of the weights [hc, G, R, C].
        grad, out, lse: As in `backward_tile`.
    """
    if not tile.call.tensors.head:
        return (grad * out).sum(-1, keepdim=True)
    total = weights.sum(-1, keepdim=True)
    sinks = tile.call.tensors.sinks
    if sinks is not None:
        total = total + torch.exp(tile.of_head(sinks) - lse)
    return (weights * d_weights).sum(-1, keepdim=True) / total.masked_fill(total == 0, 1.0)


def backward_terms(tile: Tile, grads: Tensors, evaluated: list[tuple], d_logits: Tensor) -> None:
    """Add the gradients of features, statistics and parameters.

    Args:
        tile: The tile.
        grads: Gradients of the whole call, changed in place.
        evaluated: Result of `evaluate_terms` with `derive`.
        d_logits: Gradient of the logits [hc, G, R, C].
    """
    t = tile.call.tensors
    rows, columns, heads = iter(grads.row), iter(grads.column), iter(grads.head)
    softcap = tile.call.options.softcap
    d_dot = None
    for (part, gate, pull), (term, _, caps) in zip(evaluated, tile.call.terms, strict=True):
        # Backwards through cap and gate, in the reverse order of `sum_terms`.
        d_part = d_logits
        if caps and softcap is not None:
            capped = torch.tanh(part / softcap)
            d_part = d_logits * (1 - capped.square())
            part = softcap * capped
        d_part = d_part if gate is None else d_part * gate
        d_product, d_row, d_column, d_head, *d_distance = pull(d_part)
        if d_distance:
            tile.backward_distances(grads, *d_distance)
        if d_product is not None:
            d_dot = d_product if d_dot is None else d_dot + d_product
        add_slices([next(rows) for _ in range(term.rows)], d_row, tile.of_row)
        add_slices([next(columns) for _ in range(term.columns)], d_column, tile.of_column)
        add_slices([next(heads) for _ in range(term.heads)], d_head, tile.of_head)
        if gate is not None:
            add_reduced(tile.of_head(next(heads)), d_logits * part)
    # All terms read the same product, so its gradient is multiplied once.
    if d_dot is not None:
        tile.of_query(grads.query).add_(tile.multiply_keys(d_dot, tile.of_key(t.key).mT))
        tile.of_key(grads.key).add_(tile.sum_over_rows(d_dot, tile.of_query(t.query)))


def add_slices(
    buffers: list[Tensor], gradients: Sequence[Tensor | None], cut: Callable[[Tensor], Tensor]
) -> None:
    """Add gradients of a tile to buffers.

    Args:
        buffers: Gradients of the whole call.
        gradients: Gradients of the tile, one for each buffer; None for zero.
        cut: Slices a buffer for the tile.
    """
    for buffer, gradient in zip(buffers, gradients, strict=True):
        if gradient is not None:
            add_reduced(cut(buffer), gradient)


def add_reduced(target: Tensor, gradient: Tensor) -> None:
    """Add a gradient to a slice of a buffer.

    It is summed over the axes along which the slice is broadcast.
    """
    target.add_(gradient.sum_to_size(target.shape))
