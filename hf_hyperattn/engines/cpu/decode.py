"""A few queries against many keys, as in generation: keys are read once, with all that scores need (decode.h).

Between two such calls a model reads all its weights, and finds nothing of ours in the caches of the CPU: what counts is
how little code there is to fetch. So the way to the kernel is a short one, which nothing else shares.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..flops import count_flops
from ..late import Late
from ..options import Options
from ..score import DistanceTerm, PairScore, parse_spec
from . import calls, library
from .arguments import DTYPES, Arguments, piece_of, rows_of

#: Up to this many queries.
FEW = 4


def few(query: Tensor, key: Tensor, value: Tensor, options: Options) -> bool:
    """Whether queries are few, keys are more, and the kernel takes all of them as they are."""
    return (
        not torch.compiler.is_compiling()  # first: no guard on lengths, which an exported call would be bound by
        and not torch.jit.is_tracing()  # it would miss the compiled kernel, which is no operator here
        and query.shape[2] <= FEW
        and query.shape[2] < key.shape[2]
        and not options.dropout_p
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and query.device.type == key.device.type == value.device.type == "cpu"
    )


def attend(score: PairScore, value: Tensor, options: Options) -> Tensor | None:
    """softmax(S)·V in float32, [B, H, N, dv]; None where queries are not few, something is learned, or keys cannot be
    read.
    """
    raw = score.raw
    if raw is None or not few(raw.query, raw.key, value, options) or learns(score, value, options):
        return None
    unread = [p for p in score.pieces if p.reader is None]
    if any(isinstance(p.given("column"), Late) or isinstance(p.term, DistanceTerm) for p in unread):
        return None  # here distances are taken from differences of what a reader reads
    reader, spec, capped = reader_of(score), score.spec, options.softcap is not None
    table = library.table(spec, capped, reader)
    if table is None:
        return None
    extras = {"mask": options.mask, "bias": options.bias, "sinks": options.sinks}
    extras = {name: t for name, t in extras.items() if t is not None}
    read, constants = piece_of(reader), []
    if read is not None:  # a parameter is a tensor, or a number for all heads
        for i, p in enumerate(score.pieces[read].reader.head):
            if isinstance(p, Tensor):
                extras[f"reader{i}"] = p.float()
            else:
                constants.append(p)
    given = [p for i, p in enumerate(score.pieces) if i != read]
    row, column = [t for p in given for t in p.row], [t for p in given for t in p.column]
    head = [t for p in score.pieces for t in p.head + ((p.gate,) if p.gate is not None else ())]
    if not _get_current_dispatch_mode():  # nobody watches: an operator would cost as much as a short cache
        vectors = (rows_of(t) for t in (raw.query, raw.key, value))
        statistics = ([rows_of(t) for t in found] for found in (row, column))
        arguments = Arguments(*vectors, *statistics, [t.contiguous() for t in head], extras, table)
        return _run(arguments, spec, reader, constants, raw.scale, options)
    return _decode(
        [raw.query, raw.key, value, *row, *column, *head, *extras.values()], spec, reader, " ".join(extras), constants,
        float(raw.scale), options.is_causal, options.window, options.offset, options.softcap,
    )  # fmt: skip


@dataclass(frozen=True)
class Alone:
    """A score of one piece, read from the vectors, whose parameters are the same numbers for all heads and learn
    nothing: what `attend` does, without the score.

    Args:
        term: the name of the piece's term.
        cpp: the type that reads vectors, as in `Reader`.
        parameters: what it takes.
        head: what the term takes.
    """

    term: str
    cpp: str
    parameters: tuple[float, ...]
    head: tuple[float, ...] = ()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor | None:
        """softmax(S)·V in float32, [B, H, N, dv]; None where `attend` should be asked, or something hides pairs."""
        if not few(query, key, value, options) or options.softcap or options.is_causal or options.window:
            return None
        if not (options.mask is options.bias is options.sinks is None) or _get_current_dispatch_mode():
            return None
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return None
        reader = f"0 {self.cpp}"
        table = library.table(self.term, False, reader)
        if table is None:
            return None
        vectors = (rows_of(t) for t in (query, key, value))
        head = [query.new_full((query.shape[1],), number, dtype=torch.float32) for number in self.head]
        return _run(
            Arguments(*vectors, [], [], head, {}, table), self.term, reader, self.parameters, 1.0, options
        )


def reader_of(score: PairScore) -> str:
    """Which piece reads its statistics from keys, and the type that does, for `library.table`."""
    for i, p in enumerate(score.pieces):
        if p.reader is not None:
            return f"{i} {p.reader.cpp}"
    return ""


def learns(score: PairScore, value: Tensor, options: Options) -> bool:
    """Whether a gradient is wanted of anything in the call."""
    if not torch.is_grad_enabled():
        return False
    numbers = [t for p in score.pieces for t in (*p.head, p.gate, *(p.reader.head if p.reader else p.row))]
    given = (score.raw.query, score.raw.key, value, options.mask, options.bias, options.sinks)
    return any(isinstance(t, Tensor) and t.requires_grad for t in (*given, *numbers))


@torch.library.custom_op("hf_hyperattn::cpu_decode", mutates_args=())
def _decode(
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
    options = Options(None, None, is_causal, window, offset, softcap, None)
    return _run(arguments, spec, reader, constants, scale, options)


def _run(
    arguments: Arguments, spec: str, reader: str, constants: Sequence[float], scale: float, options: Options
) -> Tensor:
    query = arguments.query
    out = query.new_empty(*query.shape[:3], arguments.value.shape[-1], dtype=torch.float32)
    lse = out.new_empty(query.shape[:3])
    call, kept = arguments.call(out, lse, query.shape[-1], scale, options)
    head = [t.contiguous() for name, t in arguments.extras.items() if name.startswith("reader")]
    numbers = (ctypes.c_float * len(constants))(*constants)
    parameters = (calls.Parameter * (len(head) + len(constants)))(
        *((t.data_ptr(), int(t.numel() > 1)) for t in head),
        *((ctypes.addressof(numbers) + 4 * i, 0) for i in range(len(constants))),
    )
    needs_dot, rows, columns = _layout(spec, reader)
    decode = calls.Decode(
        ctypes.addressof(parameters),
        len(parameters),
        needs_dot,
        ctypes.addressof(rows),
        ctypes.addressof(columns),
    )
    library.core().hyper_decode(ctypes.byref(call), ctypes.byref(decode))
    del kept
    return out


@lru_cache(maxsize=256)
def _layout(spec: str, reader: str):
    """Whether a score reads products, and the places of its statistics."""
    terms, read = [t for t, _ in parse_spec(spec)], piece_of(reader)
    rows, columns = ([getattr(t, name) for t in terms] for name in ("rows", "columns"))
    return read is None or len(terms) > 1, _places(rows, read), _places(columns, read)


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


count_flops(_decode)
