"""One attention for all heads: the weighted kernels summed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...engines import DOT, Options, PairScore, Piece, Term, repeat_heads
from ...engines.options import full_precision, position_mask
from ...engines.reference import total_logits
from ...readable import is_recorded
from .score import combined

#: Logits of all heads in one block of queries, where they are not one dot product.
ELEMENTS = 2**20


def combined_attention(
    attend, score: PairScore, value: Tensor, options: Options, backend: str = "auto", weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """softmax(Σ_m S^m)·V, the same weights for the values of every head.

    Args:
        attend: computes a pair score of one head, as `engines.attention` does.
        score: the weighted kernels; features [B, H, N, d].
        value: [B, Hkv, M, dv].
        options: masks that are the same for all heads, and a bias that is already the sum over heads; no sinks.
        backend, weights: as in `engines.attention`.

    Returns:
        [B, H, N, dv], and the weights [B, H, N, M] where asked for.
    """
    check(options)
    heads, groups, width = score.query.shape[1], value.shape[1], value.shape[-1]
    together = value.transpose(1, 2).flatten(2)[:, None]  # [B, 1, M, Hkv · dv]
    if options.softcap is None and all(p.term is DOT for p in score.pieces):
        out, found = attend(one_product(score), together, options, backend=backend, weights=weights)
    else:
        with full_precision(value.device):
            out, found = summed(score, together.to(score.query.dtype), options, weights)
    out = repeat_heads(out[:, 0].unflatten(-1, (groups, width)).transpose(1, 2), heads)
    return out, found if found is None else found.expand(-1, heads, -1, -1)


def check(options: Options) -> None:
    """Refuse what differs between heads that share their attention."""
    per_head = {
        "attention sinks, which differ between heads": options.sinks is not None,
        "a mask for every head": options.mask is not None
        and options.mask.dim() == 4
        and options.mask.shape[1] > 1,
    }
    for what, there in per_head.items():
        if there:
            raise ValueError(
                f"mkl with combine=True makes one attention for all heads, and was called with {what}; allowed: "
                "combine=False"
            )


def one_product(score: PairScore) -> PairScore:
    """Dot products of all heads as one; queries of a group are summed, since they share their keys."""
    gates = [1.0 if p.gate is None else p.gate[:, None, None] for p in score.pieces]
    query, groups = score.query * sum(gates), score.key.shape[1]
    query = query.unflatten(1, (groups, -1)).sum(2)
    q, k = (t.transpose(1, 2).flatten(2)[:, None] for t in (query, score.key))
    return PairScore(q, k, (Piece(DOT, lambda: combined(total_logits(score))),))


def summed(score: PairScore, value: Tensor, options: Options, weights: bool) -> tuple[Tensor, Tensor | None]:
    """The same for any score: blocks of queries with the logits of all heads, computed again in the backward pass.

    From differences of points, or while the call is recorded, there is one block with the definition of every piece.
    """
    n, keys = score.query.shape[2], score.key.shape[2]
    if score.points is not None or weights or is_recorded():
        found = softmax(hidden(combined(total_logits(score, options.softcap)), options, range(n)))
        return dropped(found, options) @ value, found if weights else None
    size = max(1, ELEMENTS // max(1, score.query.shape[1] * keys))
    run = partial(block, score, value, options)
    learning = torch.is_grad_enabled()
    parts = [range(i, min(i + size, n)) for i in range(0, n, size)]
    found = [checkpoint(run, rows, use_reentrant=False) if learning else run(rows) for rows in parts]
    return torch.cat(found, 2), None


def block(score: PairScore, value: Tensor, options: Options, rows: range) -> Tensor:
    """Output [B, 1, R, dv] of a block of queries."""
    cut, heads = slice(rows.start, rows.stop), score.query.shape[1]
    dot = score.query[:, :, cut] @ repeat_heads(score.key, heads).mT
    total = 0.0
    for index, piece in enumerate(score.pieces):
        row = [t[:, :, cut, None] for t in piece.row]
        column = [repeat_heads(t, heads)[:, :, None] for t in piece.column]
        part = Tile.apply(
            piece.term, len(row), len(column), dot, *row, *column, *(t[:, None, None] for t in piece.head)
        )
        if options.softcap is not None and (index == 0 or piece.capped):
            part = options.softcap * torch.tanh(part / options.softcap)
        total = total + (part if piece.gate is None else piece.gate[:, None, None] * part)
    return dropped(softmax(hidden(combined(total), options, rows)), options) @ value


class Tile(torch.autograd.Function):
    """A term's logits with its own derivative, which knows the points where the plain one is not finite."""

    @staticmethod
    def forward(ctx, term: Term, rows: int, columns: int, dot: Tensor, *numbers: Tensor) -> Tensor:
        row, column, head = numbers[:rows], numbers[rows : rows + columns], numbers[rows + columns :]
        ctx.shapes = [t.shape for t in (dot, *numbers)]
        if not any(ctx.needs_input_grad):
            return term.logits(dot, row, column, head).clone()
        out, ctx.pull = term.vjp(dot, row, column, head)
        return out.clone() if out is dot else out

    @staticmethod
    def backward(ctx, grad):
        d_dot, *others = ctx.pull(grad)
        found: Sequence[Tensor | None] = (d_dot, *(g for group in others for g in group))
        return None, None, None, *(g if g is None else g.sum_to_size(s) for g, s in zip(found, ctx.shapes))


def hidden(logits: Tensor, options: Options, rows: range) -> Tensor:
    """[B, 1, R, M] after bias and masks."""
    for t in (options.bias, options.mask):
        if t is None:
            continue
        t = t.reshape((1,) * (4 - t.dim()) + tuple(t.shape))
        t = t[:, :, rows.start : rows.stop] if t.shape[2] > 1 else t
        logits = logits + t if t.dtype != torch.bool else logits.masked_fill(~t, float("-inf"))
    visible = position_mask(options, (rows.start, rows.stop), (0, logits.shape[-1]), logits.device)
    return logits if visible is None else logits.masked_fill(~visible, float("-inf"))


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis; where all is -inf, zeros with zero gradients."""
    top = logits.detach().amax(-1, keepdim=True) if logits.shape[-1] else logits.sum(-1, keepdim=True)
    e = torch.exp(logits - top.clamp_min(torch.finfo(logits.dtype).min))
    total = e.sum(-1, keepdim=True)
    return e / total.masked_fill(total == 0, 1.0)


def dropped(weights: Tensor, options: Options) -> Tensor:
    """The weights after dropout."""
    return torch.nn.functional.dropout(weights, options.dropout_p) if options.dropout_p else weights
