"""Talking-heads attention: dense for small calls, else an operator over blocks.

A tile holds all heads of one batch element, a block of query rows, and all keys that these rows can
see. Heads mix over whole tiles, and a row's softmax needs no running maximum. The backward pass
computes each tile again from the features, so nothing of size N x M is stored. Extra memory is
O(block x M x H), besides features, statistics and output.
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
from ...utils.readable import is_exporting, is_transformed
from . import reference

BACKENDS = ("auto", "reference", "blockwise")

#: Usual number of logits per tile, over all heads. Backward holds about eight tiles at once.
ELEMENTS = 2**19
#: Least number of rows of a tile: with fewer rows, products with the keys are slow.
LEAST_ROWS = 32
#: Largest number of logits of a tile with more than one row.
MOST_ELEMENTS = 2**22
#: Factor of the tile size on a GPU, where starting an operation costs more than missing the cache.
#: The value is a guess and was not measured.
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
    """Compute attention whose heads mix logits and weights.

    Args:
        score: As in `reference.attend`.
        value: As in `reference.attend`.
        options: As in `reference.attend`; None means the defaults.
        before: As in `reference.attend`.
        after: As in `reference.attend`.
        backend: "reference" (dense), "blockwise", or "auto".
        weights: Also return the mixed weights [B, H, N, M]; they are dense.

    Returns:
        Output [B, H, N, dv] in the score's dtype (float32 or float64), and the weights or None.

    Raises:
        ValueError: The backend is unknown, "blockwise" cannot return weights, or it is used inside
            torch.func transforms.
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
    # Mixing happens in the dtype of the score, which is at least float32.
    before, after = (None if m is None else m.to(score.dtype) for m in (before, after))
    dense = backend == "reference" or weights or (backend == "auto" and is_small(score))
    with full_precision(score.device):
        attend = reference.attend if dense else attend_in_blocks
        out, mixed_weights = attend(score, value, options, before, after)
    return out, mixed_weights if weights else None


def is_small(score: PairScore) -> bool:
    """Return whether a dense computation is cheaper than blocks.

    While tracing, lengths are not read: that would add guards. An exported program uses only plain
    operators.
    """
    if torch.compiler.is_compiling():
        return is_exporting() or is_transformed()
    return is_transformed() or math.prod(score.shape) <= DENSE_ELEMENTS


def attend_in_blocks(
    score: PairScore, value: Tensor, options: Options, before: Tensor | None, after: Tensor | None
) -> tuple[Tensor, None]:
    """Compute `reference.attend` without N x M matrices; no weights are returned."""
    # The operator takes a list of tensors; `extras` names the optional ones.
    matrices = {name: m for name, m in (("before", before), ("after", after)) if m is not None}

    def call_operator(
        tensors: list[Tensor], score_key: str, extras: str, *rest
    ) -> tuple[Tensor, Tensor]:
        """Append the mixing matrices to the tensors, and their names to `extras`."""
        names = " ".join([*extras.split(), *matrices])
        return forward([*tensors, *matrices.values()], score_key, names, *rest)

    return serialize.call_operator(call_operator, score.score_key, False, score, value, options)


class Talk:
    """A call of the operator, or its gradients, with the mixing matrices.

    The bias is taken out of the engine's call, because it is added before mixing.

    Args:
        tensors: The operator's tensors, or buffers for their gradients.
        score_key: As in `serialize`.
        extras: As in `serialize`.
        rest: As in `serialize`.
        gradients: Whether `tensors` are gradients.
    """

    def __init__(
        self, tensors: Sequence[Tensor], score_key: str, extras: str, *rest, gradients=False
    ):
        self.call = Call.from_operator(
            serialize.read_arguments(tensors, score_key, extras, *rest), gradients
        )
        self.bias = self.call.tensors.bias
        self.call.tensors.bias = None
        self.before, self.after = read_matrices(tensors, extras)

    def iterate_tiles(self) -> Iterator[Tile]:
        """Yield tiles of about `ELEMENTS` logits and all heads, equal in both passes."""
        batch, kv_heads, group, n, _ = self.call.tensors.query.shape
        keys = self.call.tensors.key.shape[2]
        index = 0
        on_cpu = self.call.tensors.query.device.type == "cpu"
        # Tiles are cut by rows only, since heads mix over all keys of a row.
        rows = count_tile_rows(n, kv_heads * group * keys, 1 if on_cpu else ON_GPU)
        for b in range(batch):
            for i in range(0, n, rows):
                block = range(i, min(i + rows, n))
                columns = key_range(self.call.options, block, keys)
                yield Tile(self.call, b, slice(0, kv_heads), block, columns, index)
                index += 1

    def compute_logits(self, tile: Tile, evaluated: list[tuple]) -> Tensor:
        """Return J [Hkv, G, R, C]: score and bias, before heads are mixed."""
        t = self.call.tensors
        logits = blockwise.sum_terms(tile, evaluated)
        shape = (*t.query.shape[1:3], len(tile.rows), len(tile.columns))
        logits = logits.expand(shape).contiguous()
        if self.bias is not None:
            # Without the limit, mixing would turn a bias of -inf into nan (-inf · 0).
            logits.add_(tile.of_pair(self.bias).clamp_min(reference.LOWEST))
        return logits

    def compute_weights(self, tile: Tile, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return W, the softmax of the mixed and masked logits, and the sinks' share.

        Returns:
            W [Hkv, G, R, C], and the sinks' weight [Hkv, G, R, 1] or None.
        """
        logits = mix_heads(self.before, logits)
        # `hide_pairs` works in place. Without mixing, the logits are still needed for the backward pass.
        logits = blockwise.hide_pairs(tile, logits.clone() if self.before is None else logits)
        sinks = self.call.tensors.sinks
        if sinks is not None:
            extra = tile.of_head(sinks).expand(*logits.shape[:-1], 1)
            weights = torch.softmax(torch.cat([logits, extra], -1), -1)
            return weights[..., :-1].contiguous(), weights[..., -1:]
        weights = torch.softmax(logits, -1)
        options = self.call.options
        is_masked = self.call.tensors.mask is not None
        # Rows that see no key have weights of nan; they become 0. Other calls have no such rows.
        if logits.shape[-1] and (is_masked or options.window is not None or options.offset < 0):
            weights.masked_fill_(logits.amax(-1, keepdim=True) == float("-inf"), 0.0)
        return weights, None


def read_matrices(tensors: Sequence[Tensor], extras: str) -> list[Tensor | None]:
    """Return P_l and P_w from the operator's tensors, or their gradients.

    They are None if absent, or if their gradient is not needed.
    """
    names = extras.split()
    # The optional tensors are the last ones.
    named = dict(zip(names, tensors[len(tensors) - len(names) :], strict=True))
    matrices = (named.get(name) for name in ("before", "after"))
    return [None if m is None or m.dim() < 2 else m for m in matrices]


def count_tile_rows(queries: int, logits: int, larger: int = 1) -> int:
    """Return the number of rows of a tile.

    Args:
        queries: Number of queries.
        logits: Logits of one row, over all heads.
        larger: Factor of the tile size.
    """
    logits = max(1, logits)
    # Aim for `ELEMENTS`, but take enough rows for fast products, up to the memory limit.
    rows = max(larger * ELEMENTS // logits, min(LEAST_ROWS, larger * MOST_ELEMENTS // logits))
    return max(1, min(queries, rows))


def mix_heads(matrix: Tensor | None, x: Tensor) -> Tensor:
    """Multiply a mixing matrix with all heads.

    Args:
        matrix: Shape [H', H]; None means the identity.
        x: Shape [Hkv, G, R, C].

    Returns:
        Shape [Hkv, G, R, C] for H' = H, else [H', 1, R, C].
    """
    if matrix is None:
        return x
    # Flattened, mixing is one matrix product over all pairs of the tile.
    heads = x.shape[:2] if matrix.shape[0] == matrix.shape[1] else (len(matrix), 1)
    return torch.mm(matrix, x.view(matrix.shape[1], -1)).view(*heads, *x.shape[2:])


def count_output_heads(tensors: Sequence[Tensor], extras: str) -> int:
    """Return the number of output heads, which is smaller if P_l has fewer rows."""
    before, _ = read_matrices(tensors, extras)
    return tensors[0].shape[1] if before is None else before.shape[0]


@torch.library.custom_op("hf_hyperattn::talking_heads", mutates_args=(), schema=serialize.FORWARD)
def forward(tensors: Sequence[Tensor], score_key: str, extras: str, *rest) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, N, dv]; arguments as in `serialize`.

    The second result is empty: the backward pass needs no statistics.
    """
    talk = Talk(tensors, score_key, extras, *rest)
    t = talk.call.tensors
    heads = count_output_heads(tensors, extras)
    group = t.query.shape[1:3] if heads == tensors[0].shape[1] else (heads, 1)
    out = t.query.new_empty(len(t.query), *group, t.query.shape[3], t.value.shape[-1])
    for tile in talk.iterate_tiles():
        logits = talk.compute_logits(tile, blockwise.evaluate_terms(tile, derive=False))
        weights, _ = talk.compute_weights(tile, logits)
        # Dropout acts on the mixed weights, as in the paper.
        weights = mix_heads(talk.after, weights)
        factors = blockwise.draw_dropout(tile, weights)
        weights = weights if factors is None else weights.mul_(factors)
        tile.of_query(out).copy_(tile.multiply_keys(weights, tile.of_key(t.value).mT))
    return out.flatten(1, 2), out.new_empty(0)


@forward.register_fake
def _(tensors, score_key, extras, *_):
    query, _, value = tensors[:3]
    shape = (query.shape[0], count_output_heads(tensors, extras), query.shape[2], value.shape[-1])
    return query.new_empty(shape), query.new_empty(0)


@torch.library.custom_op(
    "hf_hyperattn::talking_heads_backward", mutates_args=(), schema=serialize.BACKWARD
)
def backward(
    grad: Tensor, out: Tensor, lse: Tensor, tensors, needs_grad, score_key: str, extras: str, *rest
):
    """Compute the gradients of all tensors; empty for an extra that needs none."""
    talk = Talk(tensors, score_key, extras, *rest)
    shapes = blockwise.gradient_shapes(tensors, needs_grad, extras)
    buffers = [grad.new_zeros(shape) for shape in shapes]
    # `into` holds views of the buffers, into which tiles add.
    into = Talk(buffers, score_key, extras, *rest, gradients=True)
    group, heads = talk.call.tensors.query.shape[1:3], grad.shape[1]
    grad = grad.unflatten(1, group if heads == tensors[0].shape[1] else (heads, 1))
    # Backward may be called under autocast.
    with full_precision(grad.device):
        for tile in talk.iterate_tiles():
            backward_tile(talk, into, tile, tile.of_query(grad))
    return buffers


@backward.register_fake
def _(grad, out, lse, tensors, needs_grad, score_key, extras, *_):
    return [
        grad.new_empty(shape) for shape in blockwise.gradient_shapes(tensors, needs_grad, extras)
    ]


serialize.register_gradients(forward, backward, "blockwise")


def backward_tile(talk: Talk, into: Talk, tile: Tile, grad: Tensor) -> None:
    """Add a tile's share to all gradients.

    Args:
        talk: The call.
        into: The gradients to add to.
        tile: The tile.
        grad: Gradient of the output, [Hkv, G, R, dv].
    """
    t = talk.call.tensors
    grads = into.call.tensors
    # Compute the tile again: logits, weights, mixed weights.
    evaluated = blockwise.evaluate_terms(tile, derive=True)
    logits = talk.compute_logits(tile, evaluated)
    weights, sunk = talk.compute_weights(tile, logits)
    mixed_weights = mix_heads(talk.after, weights)
    factors = blockwise.draw_dropout(tile, mixed_weights)
    # Output and dropout.
    d_mixed_weights = tile.multiply_keys(grad, tile.of_key(t.value))
    if factors is not None:
        d_mixed_weights.mul_(factors)
        mixed_weights = mixed_weights * factors
    tile.of_key(grads.value).add_(tile.sum_over_rows(mixed_weights, grad))
    # P_w, then the softmax.
    d_weights = backward_mix(talk.after, into.after, weights, d_mixed_weights)
    # The derivative of the softmax, from its output.
    d_mixed_logits = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
    if grads.sinks is not None and sunk is not None:
        # A sink is one more logit of the softmax, without a value.
        share = -sunk * (d_weights * weights).sum(-1, keepdim=True)
        blockwise.add_reduced(tile.of_head(grads.sinks), share)
    if grads.mask is not None:
        blockwise.add_reduced(tile.of_pair(grads.mask), d_mixed_logits)
    # P_l, then bias and score, which come before mixing.
    d_logits = backward_mix(talk.before, into.before, logits, d_mixed_logits)
    if into.bias is not None:
        blockwise.add_reduced(tile.of_pair(into.bias), d_logits)
    blockwise.backward_terms(tile, grads, evaluated, d_logits)


def backward_mix(matrix: Tensor | None, into: Tensor | None, x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of x, from the gradient of `mix_heads(matrix, x)`.

    The gradient of the matrix is added to `into`, unless that is None.
    """
    if matrix is None:
        return grad
    # y = P x has the gradients dx = Pᵀ dy and dP = dy xᵀ.
    flat = grad.view(len(matrix), -1)
    if into is not None:
        into.addmm_(flat, x.view(matrix.shape[1], -1).T)
    return torch.mm(matrix.T, flat).view(x.shape)
