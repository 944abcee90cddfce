"""Talking-heads attention in blocks of query rows, as one operator with its gradient.

A tile holds all heads of one batch element, a block of query rows, and all keys that these can see: heads mix over
whole tiles, and a row's softmax needs no running maximum. The backward pass computes each tile again from the
features; nothing of the size N x M is kept. Extra memory is O(block x M x H) beside features, statistics and output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...engines import blockwise, serialize
from ...engines.flops import count_flops
from ...engines.options import Options, full_precision, key_range
from ...engines.score import PairScore
from ...engines.tiles import Call, Tile
from .definition import LOWEST

#: Logits of one tile, over all heads, and the fewest rows of one: fewer make the products with the keys slow. Backward
#: holds some eight tiles at once.
ELEMENTS = 2**19
LEAST_ROWS = 32
#: Logits of one tile at most, where more than one row is in it.
MOST_ELEMENTS = 2**22
#: How many times as large tiles are on a GPU, where the start of an operation costs more than its cache is worth (not
#: measured).
ON_GPU = 16


def attend(
    score: PairScore, value: Tensor, options: Options, before: Tensor | None, after: Tensor | None
) -> tuple[Tensor, None]:
    """Talking-heads attention without the full matrices; arguments as in `definition.attend`."""
    run = lambda tensors, *rest: (forward(tensors, before, after, *rest), None)
    return serialize.call(run, score.score_key, False, score, value, options)


class Talk:
    """A call taken apart: the engine's call, whose bias is kept apart since it comes before the mixing."""

    def __init__(self, tensors: Sequence[Tensor], before, after, *rest, gradients: bool = False):
        self.call = Call.of(serialize.read(tensors, *rest), gradients)
        self.bias, self.call.tensors.bias = self.call.tensors.bias, None
        self.before, self.after = before, after

    def tiles(self) -> Iterator[Tile]:
        """Tiles of about `ELEMENTS` logits, each of all heads; the same for forward and backward."""
        batch, kv_heads, group, n, _ = self.call.tensors.query.shape
        keys, index = self.call.tensors.key.shape[2], 0
        on_cpu = self.call.tensors.query.device.type == "cpu"
        rows = rows_of(n, kv_heads * group * keys, 1 if on_cpu else ON_GPU)
        for b in range(batch):
            for i in range(0, n, rows):
                block = range(i, min(i + rows, n))
                columns = key_range(self.call.options, block, keys)
                yield Tile(self.call, b, slice(0, kv_heads), block, columns, index)
                index += 1

    def logits(self, tile: Tile, found: list[tuple]) -> Tensor:
        """J [Hkv, G, R, C]: the score with its bias, before heads are mixed."""
        t, logits = self.call.tensors, blockwise.total(tile, found)
        shape = (*t.query.shape[1:3], len(tile.rows), len(tile.columns))
        logits = logits.expand(shape).contiguous()
        if self.bias is not None:
            logits.add_(tile.of_pair(self.bias).clamp_min(LOWEST))
        return logits

    def weights(self, tile: Tile, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """W, the softmax of the mixed and masked logits, and the sinks' share [Hkv, G, R, 1] where there are sinks."""
        logits = mixed(self.before, logits)
        logits = blockwise.hide(tile, logits.clone() if self.before is None else logits)
        sinks = self.call.tensors.sinks
        if sinks is not None:
            extra = tile.of_head(sinks).expand(*logits.shape[:-1], 1)
            found = torch.softmax(torch.cat([logits, extra], -1), -1)
            return found[..., :-1].contiguous(), found[..., -1:]
        empty = self.empty_rows(logits)
        found = torch.softmax(logits, -1)
        return (found if empty is None else found.masked_fill_(empty, 0.0)), None

    def empty_rows(self, logits: Tensor) -> Tensor | None:
        """Which rows see no key, bool [Hkv, G, R, 1]; None where every row sees one."""
        options, sees = self.call.options, self.call.tensors.mask is None
        if sees and options.window is None and options.offset >= 0 or not logits.shape[-1]:
            return None
        return logits.amax(-1, keepdim=True) == float("-inf")


def rows_of(queries: int, logits: int, larger: int = 1) -> int:
    """Rows of a tile, where one row has so many logits over all heads, and tiles may be so many times as large."""
    logits = max(1, logits)
    rows = max(larger * ELEMENTS // logits, min(LEAST_ROWS, larger * MOST_ELEMENTS // logits))
    return max(1, min(queries, rows))


def mixed(matrix: Tensor | None, x: Tensor) -> Tensor:
    """[H, H] times [Hkv, G, R, C] over all heads; None is the identity."""
    return x if matrix is None else torch.mm(matrix, x.view(len(matrix), -1)).view(x.shape)


@torch.library.custom_op("hf_hyperattn::talking_heads", mutates_args=())
def forward(
    tensors: Sequence[Tensor],
    before: Tensor | None,
    after: Tensor | None,
    score_key: str,
    extras: str,
    width: int,
    scale: float,
    is_causal: bool,
    window: int | None,
    offset: int,
    softcap: float | None,
    dropout_p: float,
) -> Tensor:
    """The operator: output [B, H, N, dv]."""
    rest = score_key, extras, width, scale, is_causal, window, offset, softcap, dropout_p
    talk = Talk(tensors, before, after, *rest)
    t = talk.call.tensors
    out = t.query.new_empty(*t.query.shape[:-1], t.value.shape[-1])
    for tile in talk.tiles():
        weights, _ = talk.weights(tile, talk.logits(tile, blockwise.evaluate_terms(tile, derive=False)))
        weights = mixed(after, weights)
        factors = blockwise.keep(tile, weights)
        weights = weights if factors is None else weights.mul_(factors)
        tile.of_query(out).copy_(tile.product(weights, tile.of_key(t.value).mT))
    return out.flatten(1, 2)


@forward.register_fake
def _(tensors, *_):
    query, _, value = tensors[:3]
    return query.new_empty(*query.shape[:3], value.shape[-1])


@torch.library.custom_op("hf_hyperattn::talking_heads_backward", mutates_args=())
def backward(
    grad: Tensor,
    tensors: Sequence[Tensor],
    before: Tensor | None,
    after: Tensor | None,
    wanted: Sequence[bool],
    score_key: str,
    extras: str,
    width: int,
    scale: float,
    is_causal: bool,
    window: int | None,
    offset: int,
    softcap: float | None,
    dropout_p: float,
) -> list[Tensor]:
    """Gradients of all tensors, then of P_l and P_w; empty for what needs none."""
    rest = score_key, extras, width, scale, is_causal, window, offset, softcap, dropout_p
    talk = Talk(tensors, before, after, *rest)
    shapes = blockwise._shapes(tensors, wanted, extras)
    buffers = [t.new_zeros(shape, dtype=grad.dtype) for t, shape in zip(tensors, shapes)]
    matrices = [grad.new_zeros(0 if m is None else m.shape) for m in (before, after)]
    into = Talk(buffers, *matrices, *rest, gradients=True)
    grad = grad.unflatten(1, talk.call.tensors.query.shape[1:3])
    with full_precision(grad.device):
        for tile in talk.tiles():
            backward_tile(talk, into, tile, tile.of_query(grad))
    return [*buffers, *matrices]


@backward.register_fake
def _(grad, tensors, before, after, wanted, score_key, extras, *_):
    shapes = blockwise._shapes(tensors, wanted, extras)
    found = [t.new_empty(shape, dtype=grad.dtype) for t, shape in zip(tensors, shapes)]
    return [*found, *(grad.new_empty(0 if m is None else m.shape) for m in (before, after))]


def backward_tile(talk: Talk, into: Talk, tile: Tile, grad: Tensor) -> None:
    """Add this tile's share to all gradients; `grad` is [Hkv, G, R, dv]."""
    t, grads = talk.call.tensors, into.call.tensors
    found = blockwise.evaluate_terms(tile, derive=True)
    logits = talk.logits(tile, found)
    weights, sunk = talk.weights(tile, logits)
    spoken = mixed(talk.after, weights)
    factors = blockwise.keep(tile, spoken)
    d_spoken = tile.product(grad, tile.of_key(t.value))
    if factors is not None:
        d_spoken.mul_(factors)
        spoken = spoken * factors
    tile.of_key(grads.value).add_(tile.transposed_product(spoken, grad))
    d_weights = through_mix(talk.after, into.after, weights, d_spoken)
    d_mixed = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
    if grads.sinks is not None:
        share = -sunk * (d_weights * weights).sum(-1, keepdim=True)
        blockwise.add(tile.of_head(grads.sinks), share)
    if grads.mask is not None:
        blockwise.add(tile.of_pair(grads.mask), d_mixed)
    d_logits = through_mix(talk.before, into.before, logits, d_mixed)
    if into.bias is not None:
        blockwise.add(tile.of_pair(into.bias), d_logits)
    blockwise.backward_terms(tile, grads, found, d_logits)


def through_mix(matrix: Tensor | None, into: Tensor, x: Tensor, grad: Tensor) -> Tensor:
    """From the gradient of `mixed(matrix, x)` to that of x; that of the matrix is added to `into`."""
    if matrix is None:
        return grad
    flat = grad.view(len(matrix), -1)
    into.addmm_(flat, x.view(len(matrix), -1).T)
    return torch.mm(matrix.T, flat).view(grad.shape)


def _save(ctx, inputs, output):
    tensors, before, after, *ctx.rest = inputs
    ctx.save_for_backward(before, after, *tensors)


def _pullback(ctx, grad):
    before, after, *tensors = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[0])
    *buffers, d_before, d_after = backward(grad.contiguous(), tensors, before, after, wanted, *ctx.rest)
    grads = [g.to(t.dtype) if w else None for g, t, w in zip(buffers, tensors, wanted)]
    matrices = [None if m is None else g for g, m in ((d_before, before), (d_after, after))]
    return grads, *matrices, *[None] * len(ctx.rest)


forward.register_autograd(_pullback, setup_context=_save)
count_flops(forward)
count_flops(backward, at=1, backward=True)
