"""The CPU engine as an operator: one node for the compiler, for export and for checkpointing, with its own backward."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..options import Options
from ..score import PairScore, Source, parse_spec
from . import calls, library

DTYPES = (torch.float32, torch.bfloat16)
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


def source_of(score: PairScore) -> Source:
    """What the features are made of, or the features as they are."""
    raw = score.raw
    return raw if raw is not None else Source(score.query, score.key, 1.0, (score.query, score.key))


@dataclass
class Arguments:
    """The operator's tensors by their names; `table` is the score's."""

    query: Tensor
    key: Tensor
    value: Tensor
    row: list[Tensor]
    column: list[Tensor]
    head: list[Tensor]
    extras: dict[str, Tensor]
    table: int

    @classmethod
    def parse(cls, tensors: Sequence[Tensor], spec: str, extras: str, capped: bool) -> Arguments:
        terms, names = parse_spec(spec), extras.split()
        table = library.table(spec, capped)
        if table is None:
            raise RuntimeError(f"hf_hyperattn: the compiled score {spec} is not there; use backend='auto'")
        query, key, value = (rows_of(t) for t in tensors[:3])
        take = iter(tensors[3:])
        counts = [sum(t.rows for t, _ in terms), sum(t.columns for t, _ in terms)]
        row, column = ([rows_of(next(take)) for _ in range(n)] for n in counts)
        head = [next(take).contiguous() for _ in range(sum(t.heads + gated for t, gated in terms))]
        return cls(query, key, value, row, column, head, dict(zip(names, take, strict=True)), table)

    def call(self, out: Tensor, lse: Tensor, width: int, scale: float, options: Options):
        """`struct Call`, and what must live as long as it."""
        (batch, heads, n, _), (_, kv_heads, m, _) = self.query.shape, self.key.shape
        take = lambda name: self.extras[name].contiguous() if name in self.extras else None
        factors, sinks = (take("query_factor"), take("key_factor")), take("sinks")
        mask, bias = self.extras.get("mask"), self.extras.get("bias")
        tables = calls.numbers(self.row, heads), calls.numbers(self.column, heads), calls.pointers(self.head)
        shape = batch, heads, n, m
        drop = options.dropout_p
        call = calls.Call(
            self.table, batch, heads, kv_heads, n, m, width, self.value.shape[-1],
            *(calls.matrix(t) for t in (self.query, self.key, self.value)), self.query.dtype == torch.bfloat16,
            *map(calls.address, factors), *map(ctypes.addressof, tables),
            calls.pairs(mask, shape), calls.pairs(bias, shape), mask is not None and mask.dtype == torch.bool,
            options.is_causal, options.window or 0, options.offset, torch.get_num_threads(),
            calls.address(sinks), scale, options.softcap or 0.0,
            min(int(drop * 2**32), 2**32 - 1), int(self.extras["seed"]) if drop else 0, 1 / (1 - drop),
            out.data_ptr(), lse.data_ptr(),
        )  # fmt: skip
        return call, (factors, sinks, tables)


def rows_of(t: Tensor) -> Tensor:
    """The tensor with consecutive numbers in its last axis."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


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
    lse = out.new_empty(query.shape[:3])
    options = Options(None, None, is_causal, window, offset, softcap, None, dropout_p)
    call, kept = arguments.call(out, lse, width, scale, options)
    library.core().hyper_forward(ctypes.byref(call))
    del kept
    return out, lse


@_forward.register_fake
def _(tensors, *_):
    query, _, value = tensors[:3]
    out = query.new_empty(*query.shape[:3], value.shape[-1], dtype=torch.float32)
    return out, out.new_empty(query.shape[:3])


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
    delta = torch.empty_like(lse)
    core.hyper_deltas(ctypes.byref(call), calls.at(grad), calls.at(delta))
    chunks = chunks_of(batch * kv_heads, -(-m // core.hyper_tile_keys()))
    query, key, value = (torch.empty(t.shape, dtype=t.dtype) for t in (a.query, a.key, a.value))
    padded = core.hyper_padded(ctypes.c_int64(width))
    # where the sums have the shape of the gradient they need no memory of their own
    own = query.dtype == torch.float32 and chunks == 1 and padded == query.shape[-1]
    sums = query.zero_() if own else lse.new_zeros(chunks, batch, heads, n, padded)
    row = [lse.new_zeros(chunks, batch, heads, n) for _ in a.row]
    column = [lse.new_empty(batch, t.shape[1], m) for t in a.column]
    head = lse.new_zeros(chunks, batch, heads, len(a.head))
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
    if "sinks" in a.extras:
        factors["sinks"] = -(torch.exp(a.extras["sinks"][:, None] - lse) * delta).sum((0, 2))
    extras = [factors.get(name, lse.new_empty(0)) for name in a.extras]
    return [
        query,
        key,
        value,
        *(t.sum(0) for t in row),
        *column,
        *(t.clone() for t in head.sum((0, 1)).unbind(-1)),
        *extras,
    ]


def chunks_of(heads: int, blocks: int) -> int:
    """Into how many chunks the keys of a head are cut, so that every thread has something to do."""
    threads = torch.get_num_threads()
    if threads == 1 or heads % threads == 0 or heads >= TASKS * threads:
        return 1
    return min(blocks, -(-TASKS * threads // heads))


def _save(ctx, inputs, output):
    tensors, *ctx.rest = inputs
    ctx.save_for_backward(*output, *tensors)


def _pullback(ctx, grad, _grad_lse):
    out, lse, *tensors = ctx.saved_tensors
    found = _backward(grad, out, lse, tensors, *ctx.rest)
    wanted = ctx.needs_input_grad[0]
    return [g if w else None for g, w in zip(found, wanted, strict=True)], *[None] * len(ctx.rest)


_forward.register_autograd(_pullback, setup_context=_save)
