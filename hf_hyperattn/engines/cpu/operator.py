"""The CPU engine as an operator: one node for the compiler, for export and for checkpointing, with its own backward."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..flops import count_flops
from ..options import Options
from ..score import PairScore
from . import calls, library
from .arguments import DTYPES, Arguments, source_of

#: A backward pass is cut into at least this many tasks a thread, where there are more threads than heads to share.
TASKS = 4


def attend(score: PairScore, value: Tensor, options: Options) -> Tensor:
    """softmax(S)·V in float32, [B, H, N, dv], of a call that `choice.hindrance` has nothing against."""
    source = source_of(score)
    query, key = source.query, source.key
    if not (query.dtype == key.dtype == value.dtype and query.dtype in DTYPES):
        query, key, value = query.float(), key.float(), value.float()
    row, column, head = score.numbers()
    extras = {
        "query_factor": source.row, "key_factor": source.column, "mask": options.mask, "bias": options.bias,
        "sinks": options.sinks, "seed": torch.randint(2**31, (1,)) if options.dropout_p else None,
    }  # fmt: skip
    extras = {name: t for name, t in extras.items() if t is not None}
    out, _ = _forward(
        [query, key, value, *row, *column, *head, *extras.values()],
        score.spec,
        " ".join(extras),
        query.shape[-1] if source.width is None else source.width,
        float(source.scale),
        options.is_causal,
        options.window,
        options.offset,
        options.softcap,
        options.dropout_p,
    )
    return out


@torch.library.custom_op("hf_hyperattn::cpu", mutates_args=())
def _forward(
    tensors: Sequence[Tensor],
    spec: str,
    extras: str,
    width: int,
    scale: float,
    is_causal: bool,
    window: int | None,
    offset: int,
    softcap: float | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    arguments = Arguments.parse(tensors, spec, extras, softcap is not None)
    query = arguments.query
    out = query.new_empty(*query.shape[:3], arguments.value.shape[-1], dtype=torch.float32)
    lse = out.new_empty(2, *query.shape[:3])
    options = Options(None, None, is_causal, window, offset, softcap, None, dropout_p)
    call, kept = arguments.call(out, lse, width, scale, options)
    library.core().hyper_forward(ctypes.byref(call))
    del kept
    return out, lse


@_forward.register_fake
def _(tensors, *_):
    query, _, value = tensors[:3]
    out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=torch.float32)
    return out, out.new_empty(2, *query.shape[:3])


@torch.library.custom_op("hf_hyperattn::cpu_backward", mutates_args=())
def _backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    spec: str,
    extras: str,
    width: int,
    scale: float,
    is_causal: bool,
    window: int | None,
    offset: int,
    softcap: float | None,
    dropout_p: float,
) -> list[Tensor]:
    arguments = Arguments.parse(tensors, spec, extras, softcap is not None)
    options = Options(None, None, is_causal, window, offset, softcap, None, dropout_p)
    grad = grad.float().contiguous()
    call, kept = arguments.call(out, lse, width, scale, options)
    found = slopes(arguments, call, grad, lse, width)
    del kept
    return found


@_backward.register_fake
def _(grad, out, lse, tensors, spec, extras, *_):
    main = len(tensors) - len(extras.split())
    named = zip(extras.split(), tensors[main:], strict=True)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors[:main]] + [
        t.new_empty(t.shape if name in LEARNED else (0,)) for name, t in named
    ]


#: The extras that have gradients.
LEARNED = ("query_factor", "key_factor", "sinks")


def slopes(a: Arguments, call: calls.Call, grad: Tensor, lse: Tensor, width: int) -> list[Tensor]:
    """All gradients, in the order of the operator's tensors; empty ones for what has none."""
    core, (batch, heads, n, _), (_, kv_heads, m, _) = library.core(), a.query.shape, a.key.shape
    delta = lse.new_empty(a.query.shape[:3])
    core.hyper_deltas(ctypes.byref(call), calls.at(grad), calls.at(delta))
    chunks = chunks_of(batch * kv_heads, -(-m // core.hyper_tile_keys()))
    query, key, value = (torch.empty(t.shape, dtype=t.dtype) for t in (a.query, a.key, a.value))
    padded = core.hyper_padded(ctypes.c_int64(width))
    # where the sums have the shape of the gradient they need no memory of their own
    own = query.dtype == torch.float32 and chunks == 1 and padded == query.shape[-1]
    sums = query.zero_() if own else lse.new_zeros(chunks, batch, heads, n, padded)
    extra = 1 + len(a.head) if a.head else 0  # of each row the residue and the mean slopes (see backward.h)
    row = [lse.new_zeros(chunks, batch, heads, n) for _ in range(len(a.row) + extra)]
    column = [lse.new_empty(batch, t.shape[1], m) for t in a.column]
    head = lse.new_zeros(chunks, batch, heads, len(a.head), dtype=torch.float64)
    factors = {name: torch.empty(a.extras[name].shape) for name in LEARNED[:2] if name in a.extras}
    column_heads = (ctypes.c_int64 * len(column))(*(t.shape[1] for t in column))
    tables = calls.pointers(row), calls.pointers(column), column_heads
    core.hyper_backward(
        ctypes.byref(call),
        ctypes.byref(
            calls.Slots(
                grad.data_ptr(), delta.data_ptr(), chunks, sums.data_ptr(), *map(ctypes.addressof, tables),
                head.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(), query.shape[-1],
                *(calls.address(factors.get(name)) for name in LEARNED[:2]),
            )
        ),
    )  # fmt: skip
    row = [t.sum(0) for t in row]
    if "sinks" in a.extras:
        top = lse[0].masked_fill(lse[0] == float("-inf"), float("inf"))  # a row of nothing but a sink of -inf
        of_sinks = -torch.exp(a.extras["sinks"][:, None] - top) * lse[1] * delta
        factors["sinks"] = of_sinks.sum((0, 2))
    head = head.sum((0, 1))
    if a.head:
        residue, *means = row[len(a.row) :]
        if "sinks" in a.extras:  # a sink is a pair of its row, whose slopes are 0
            residue = residue + of_sinks
        head = centred(head, residue, means)
    extras = [factors.get(name, lse.new_empty(0)) for name in a.extras]
    return [
        query,
        key,
        value,
        *row[: len(a.row)],
        *column,
        *(t.clone() for t in head.float().unbind(-1)),
        *extras,
    ]


def centred(head: Tensor, residue: Tensor, means: list[Tensor]) -> Tensor:
    """Gradients of the parameters [H, heads], float64, as if the mean slope of each row had been taken off.

    Args:
        head: the gradients.
        residue: what the gradients of each row's logits add up to, [B, H, N]; 0 but for rounding.
        means: for each parameter the mean slope of each row, [B, H, N].
    """
    residue = residue.double()
    return head - torch.stack([(residue * mean).sum((0, 2)) for mean in means], -1)


def chunks_of(heads: int, blocks: int) -> int:
    """Into how many chunks the keys of a head are cut, so that every thread has something to do."""
    threads = torch.get_num_threads()
    if threads == 1 or heads % threads == 0 or heads >= TASKS * threads:
        return 1
    return max(1, min(blocks, -(-TASKS * threads // heads)))


def _save(ctx, inputs, output):
    tensors, *ctx.rest = inputs
    ctx.save_for_backward(*output, *tensors)


def _pullback(ctx, grad, _grad_lse):
    out, lse, *tensors = ctx.saved_tensors
    found = _backward(grad, out, lse, tensors, *ctx.rest)
    wanted = ctx.needs_input_grad[0]
    return [g if w else None for g, w in zip(found, wanted, strict=True)], *[None] * len(ctx.rest)


_forward.register_autograd(_pullback, setup_context=_save)
count_flops(_forward)
count_flops(_backward, at=3, backward=True)
