"""Talking-heads attention: dense where that is less to do or weights are returned, else in blocks of query rows.

Blocks are one operator with its gradient. A tile holds all heads of one batch element, a block of query rows, and all
keys that these can see: heads mix over whole tiles, and a row's softmax needs no running maximum. The backward pass
computes each tile again from the features; nothing of the size N x M is kept. Extra memory is O(block x M x H) beside
features, statistics and output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...engines import blockwise, serialize
from ...engines.dispatch import DENSE_ELEMENTS, check_options, check_transforms
from ...engines.options import Options, full_precision, key_range
from ...engines.score import PairScore
from ...engines.tiles import Call, Tile
from ...readable import is_exporting, is_transformed
from . import reference

BACKENDS = ("auto", "reference", "blockwise")

#: Logits of one tile, over all heads, and the fewest rows of one: fewer make the products with the keys slow. Backward
#: holds some eight tiles at once.
ELEMENTS = 2**19
LEAST_ROWS = 32
#: Logits of one tile at most, where more than one row is in it.
MOST_ELEMENTS = 2**22
#: How many times as large tiles are on a GPU, where the start of an operation costs more than its cache is worth (not
#: measured).
ON_GPU = 16


def talking_heads(
    score: PairScore,
    value: Tensor,
    options: Options | None = None,
    *,
    before: Tensor | None,
    after: Tensor | None,
    backend: str = "auto",
    weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention whose heads mix their logits before the softmax and their weights after it.

    Args:
        score, value, options, before, after: as in `reference.attend`; options None for none.
        backend: "reference" (dense), "blockwise", or "auto".
        weights: also return the mixed weights [B, H, N, M], which are dense.

    Returns:
        The output [B, H, N, dv] in the score's dtype (float32 or float64), and the weights or None.

    Raises:
        ValueError: an unknown backend, or weights from blocks, or blocks inside torch.func's transforms.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is unknown to talking heads, for which no fused kernel exists; allowed: "
            f"{', '.join(BACKENDS)}"
        )
    if weights and backend == "blockwise":
        raise ValueError(
            "backend='blockwise' returns no weights; use backend='reference' or 'auto'"
        )
    check_transforms(backend)
    options = check_options(options or Options(), score)
    before, after = (None if m is None else m.to(score.dtype) for m in (before, after))
    dense = backend == "reference" or weights or (backend == "auto" and small(score))
    with full_precision(score.device):
        attend = reference.attend if dense else in_blocks
        out, mixed_weights = attend(score, value, options, before, after)
    return out, mixed_weights if weights else None


def small(score: PairScore) -> bool:
    """Whether the call has less to do densely than in blocks. Not asked while tracing: no guard on lengths; an exported
    program has plain operators alone.
    """
    if torch.compiler.is_compiling():
        return is_exporting() or is_transformed()
    return is_transformed() or math.prod(score.shape) <= DENSE_ELEMENTS


def in_blocks(
    score: PairScore, value: Tensor, options: Options, before: Tensor | None, after: Tensor | None
) -> tuple[Tensor, None]:
    """Talking-heads attention without the full matrices; arguments as in `reference.attend`."""
    matrices = {name: m for name, m in (("before", before), ("after", after)) if m is not None}

    def run(tensors: list[Tensor], score_key: str, extras: str, *rest) -> tuple[Tensor, Tensor]:
        return forward(
            [*tensors, *matrices.values()], score_key, " ".join([*extras.split(), *matrices]), *rest
        )

    return serialize.call_operator(run, score.score_key, False, score, value, options)


class Talk:
    """The engine's call, or its gradients, with the bias apart, which comes before mixing, and P_l, P_w."""

    def __init__(
        self, tensors: Sequence[Tensor], score_key: str, extras: str, *rest, gradients=False
    ):
        self.call = Call.from_operator(
            serialize.read_arguments(tensors, score_key, extras, *rest), gradients
        )
        self.bias, self.call.tensors.bias = self.call.tensors.bias, None
        self.before, self.after = matrices_of(tensors, extras)

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

    def logits(self, tile: Tile, evaluated: list[tuple]) -> Tensor:
        """J [Hkv, G, R, C]: the score with its bias, before heads are mixed."""
        t, logits = self.call.tensors, blockwise.sum_terms(tile, evaluated)
        shape = (*t.query.shape[1:3], len(tile.rows), len(tile.columns))
        logits = logits.expand(shape).contiguous()
        if self.bias is not None:
            logits.add_(tile.of_pair(self.bias).clamp_min(reference.LOWEST))
        return logits

    def weights(self, tile: Tile, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """W, the softmax of the mixed and masked logits, and the sinks' share [Hkv, G, R, 1] where there are sinks."""
        logits = mixed(self.before, logits)
        logits = blockwise.hide_pairs(tile, logits.clone() if self.before is None else logits)
        sinks = self.call.tensors.sinks
        if sinks is not None:
            extra = tile.of_head(sinks).expand(*logits.shape[:-1], 1)
            weights = torch.softmax(torch.cat([logits, extra], -1), -1)
            return weights[..., :-1].contiguous(), weights[..., -1:]
        weights = torch.softmax(logits, -1)
        options, masked = self.call.options, self.call.tensors.mask is not None
        if logits.shape[-1] and (masked or options.window is not None or options.offset < 0):
            weights.masked_fill_(
                logits.amax(-1, keepdim=True) == float("-inf"), 0.0
            )  # rows that see no key
        return weights, None


def matrices_of(tensors: Sequence[Tensor], extras: str) -> list[Tensor | None]:
    """P_l and P_w out of the operator's tensors, or their gradients; None for what is not there, or needs none."""
    names = extras.split()
    named = dict(zip(names, tensors[len(tensors) - len(names) :], strict=True))
    matrices = (named.get(name) for name in ("before", "after"))
    return [None if m is None or m.dim() < 2 else m for m in matrices]


def rows_of(queries: int, logits: int, larger: int = 1) -> int:
    """Rows of a tile, where one row has so many logits over all heads, and tiles may be so many times as large."""
    logits = max(1, logits)
    rows = max(larger * ELEMENTS // logits, min(LEAST_ROWS, larger * MOST_ELEMENTS // logits))
    return max(1, min(queries, rows))


def mixed(matrix: Tensor | None, x: Tensor) -> Tensor:
    """[H', H] times [Hkv, G, R, C] over all heads, [Hkv, G, R, C] or [H', 1, R, C]; None is the identity."""
    if matrix is None:
        return x
    heads = x.shape[:2] if matrix.shape[0] == matrix.shape[1] else (len(matrix), 1)
    return torch.mm(matrix, x.view(matrix.shape[1], -1)).view(*heads, *x.shape[2:])


def output_heads(tensors: Sequence[Tensor], extras: str) -> int:
    """How many heads the output has: fewer than queries where P_l has fewer rows."""
    before, _ = matrices_of(tensors, extras)
    return tensors[0].shape[1] if before is None else before.shape[0]


@torch.library.custom_op("hf_hyperattn::talking_heads", mutates_args=(), schema=serialize.FORWARD)
def forward(tensors: Sequence[Tensor], score_key: str, extras: str, *rest) -> tuple[Tensor, Tensor]:
    """The operator: output [B, H, N, dv], and nothing beside it that gradients need; arguments as in `serialize`."""
    talk = Talk(tensors, score_key, extras, *rest)
    t, heads = talk.call.tensors, output_heads(tensors, extras)
    group = t.query.shape[1:3] if heads == tensors[0].shape[1] else (heads, 1)
    out = t.query.new_empty(len(t.query), *group, t.query.shape[3], t.value.shape[-1])
    for tile in talk.tiles():
        weights, _ = talk.weights(
            tile, talk.logits(tile, blockwise.evaluate_terms(tile, derive=False))
        )
        weights = mixed(talk.after, weights)
        factors = blockwise.draw_dropout(tile, weights)
        weights = weights if factors is None else weights.mul_(factors)
        tile.of_query(out).copy_(tile.multiply_keys(weights, tile.of_key(t.value).mT))
    return out.flatten(1, 2), out.new_empty(0)


@forward.register_fake
def _(tensors, score_key, extras, *_):
    query, _, value = tensors[:3]
    shape = (query.shape[0], output_heads(tensors, extras), query.shape[2], value.shape[-1])
    return query.new_empty(shape), query.new_empty(0)


@torch.library.custom_op(
    "hf_hyperattn::talking_heads_backward", mutates_args=(), schema=serialize.BACKWARD
)
def backward(
    grad: Tensor, out: Tensor, lse: Tensor, tensors, needs_grad, score_key: str, extras: str, *rest
):
    """Gradients of all tensors; empty for an extra that needs none."""
    talk = Talk(tensors, score_key, extras, *rest)
    buffers = [
        grad.new_zeros(shape) for shape in blockwise.gradient_shapes(tensors, needs_grad, extras)
    ]
    into = Talk(buffers, score_key, extras, *rest, gradients=True)
    group, heads = talk.call.tensors.query.shape[1:3], grad.shape[1]
    grad = grad.unflatten(1, group if heads == tensors[0].shape[1] else (heads, 1))
    with full_precision(grad.device):
        for tile in talk.tiles():
            backward_tile(talk, into, tile, tile.of_query(grad))
    return buffers


@backward.register_fake
def _(grad, out, lse, tensors, needs_grad, score_key, extras, *_):
    return [
        grad.new_empty(shape) for shape in blockwise.gradient_shapes(tensors, needs_grad, extras)
    ]


serialize.register_gradients(forward, backward, "blockwise")


def backward_tile(talk: Talk, into: Talk, tile: Tile, grad: Tensor) -> None:
    """Add this tile's share to all gradients; `grad` is [Hkv, G, R, dv]."""
    t, grads = talk.call.tensors, into.call.tensors
    evaluated = blockwise.evaluate_terms(tile, derive=True)
    logits = talk.logits(tile, evaluated)
    weights, sunk = talk.weights(tile, logits)
    spoken = mixed(talk.after, weights)
    factors = blockwise.draw_dropout(tile, spoken)
    d_spoken = tile.multiply_keys(grad, tile.of_key(t.value))
    if factors is not None:
        d_spoken.mul_(factors)
        spoken = spoken * factors
    tile.of_key(grads.value).add_(tile.sum_over_rows(spoken, grad))
    d_weights = through_mix(talk.after, into.after, weights, d_spoken)
    d_mixed = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
    if grads.sinks is not None and sunk is not None:
        share = -sunk * (d_weights * weights).sum(-1, keepdim=True)
        blockwise.add_reduced(tile.of_head(grads.sinks), share)
    if grads.mask is not None:
        blockwise.add_reduced(tile.of_pair(grads.mask), d_mixed)
    d_logits = through_mix(talk.before, into.before, logits, d_mixed)
    if into.bias is not None:
        blockwise.add_reduced(tile.of_pair(into.bias), d_logits)
    blockwise.backward_terms(tile, grads, evaluated, d_logits)


def through_mix(matrix: Tensor | None, into: Tensor | None, x: Tensor, grad: Tensor) -> Tensor:
    """From the gradient of `mixed(matrix, x)` to that of x; that of the matrix is added to `into`."""
    if matrix is None:
        return grad
    flat = grad.view(len(matrix), -1)
    if into is not None:
        into.addmm_(flat, x.view(matrix.shape[1], -1).T)
    return torch.mm(matrix.T, flat).view(x.shape)
