"""A few queries against many keys, as in generation: keys are read once, with all that scores need (decode.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..late import Late
from ..options import Options
from ..score import PairScore, parse_spec
from . import calls, library
from .arguments import DTYPES, Arguments, piece_of

#: Up to this many queries.
FEW = 4


def reader_of(score: PairScore) -> str:
    """Which piece reads its statistics from keys, and the type that does, for `library.table`."""
    return next((f"{i} {p.reader.cpp}" for i, p in enumerate(score.pieces) if p.reader is not None), "")


def suits(score: PairScore, value: Tensor, options: Options) -> bool:
    """Whether the call, which the engine can compute, is one of these: nothing is learned, and keys can be read."""
    n, m = score.shape[2:]
    if torch.compiler.is_compiling() or n > FEW or m <= n or options.dropout_p or score.raw is None:
        return False
    query, key = score.raw.query, score.raw.key
    if not (query.dtype == key.dtype == value.dtype and value.dtype in DTYPES):
        return False
    if any(p.reader is None and isinstance(p.given("column"), Late) for p in score.pieces):
        return False
    if torch.is_grad_enabled():
        numbers = [
            t for p in score.pieces for t in (*p.head, p.gate, *(p.reader.head if p.reader else p.row))
        ]
        tensors = [t for t in (query, key, value, options.sinks, *numbers) if isinstance(t, Tensor)]
        if any(t.requires_grad for t in tensors):
            return False
    return library.ready(score.spec, options.softcap is not None, reader_of(score))


def attend(score: PairScore, value: Tensor, options: Options) -> Tensor:
    """softmax(S)·V in float32, [B, H, N, dv], of a call that suits."""
    reader, extras = reader_of(score), {"mask": options.mask, "bias": options.bias, "sinks": options.sinks}
    read, constants = piece_of(reader), []
    if read is not None:  # a parameter is a tensor, or a number for all heads
        parameters = score.pieces[read].reader.head
        constants = [p for p in parameters if not isinstance(p, Tensor)]
        extras |= {f"reader{i}": p.float() for i, p in enumerate(parameters) if isinstance(p, Tensor)}
    extras = {name: t for name, t in extras.items() if t is not None}
    given = [p for i, p in enumerate(score.pieces) if i != read]
    row, column = [t for p in given for t in p.row], [t for p in given for t in p.column]
    head = [t for p in score.pieces for t in p.head + ((p.gate,) if p.gate is not None else ())]
    # an operator costs as much as the call of a short cache: only where something may be watching
    compute = _decode if _get_current_dispatch_mode() else _compute
    return compute(
        [score.raw.query, score.raw.key, value, *row, *column, *head, *extras.values()],
        score.spec,
        reader,
        " ".join(extras),
        constants,
        float(score.raw.scale),
        options.is_causal,
        options.window,
        options.offset,
        options.softcap,
    )


def _compute(
    tensors: Sequence[Tensor],
    spec: str,
    reader: str,
    extras: str,
    constants: Sequence[float],
    scale: float,
    is_causal: bool,
    window: int | None,
    offset: int,
    softcap: float | None,
) -> Tensor:
    arguments = Arguments.parse(tensors, spec, extras, softcap is not None, reader)
    query, terms, read = arguments.query, [t for t, _ in parse_spec(spec)], piece_of(reader)
    out = query.new_empty(*query.shape[:3], arguments.value.shape[-1], dtype=torch.float32)
    lse = out.new_empty(query.shape[:3])
    options = Options(None, None, is_causal, window, offset, softcap, None)
    call, kept = arguments.call(out, lse, query.shape[-1], scale, options)
    head = [t.contiguous() for name, t in arguments.extras.items() if name.startswith("reader")]
    numbers = (ctypes.c_float * len(constants))(*constants)
    parameters = (calls.Parameter * (len(head) + len(constants)))(
        *((t.data_ptr(), int(t.numel() > 1)) for t in head),
        *((ctypes.addressof(numbers) + 4 * i, 0) for i in range(len(constants))),
    )
    rows, columns = _places([t.rows for t in terms], read), _places([t.columns for t in terms], read)
    decode = calls.Decode(
        ctypes.addressof(parameters), len(parameters), read is None or len(terms) > 1,
        ctypes.addressof(rows), ctypes.addressof(columns),
    )  # fmt: skip
    library.core().hyper_decode(ctypes.byref(call), ctypes.byref(decode))
    del kept
    return out


_decode = torch.library.custom_op("hf_hyperattn::cpu_decode", _compute, mutates_args=())


def _places(counts: list[int], read: int | None):
    """For each statistic its place among those that are given, or -1."""
    found, there = [], 0
    for i, n in enumerate(counts):
        found += [-1] * n if i == read else range(there, there + n)
        there += n * (i != read)
    return (ctypes.c_int64 * len(found))(*found)


@_decode.register_fake
def _(tensors, *_):
    query, _, value = tensors[:3]
    return query.new_empty(*query.shape[:3], value.shape[-1], dtype=torch.float32)
