"""A few queries against many keys, as in generation: keys are read once, with all that scores need (decode.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

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
        numbers = [t for p in score.pieces for t in (*p.row, *p.head, p.gate)]
        if any(t is not None and t.requires_grad for t in (query, key, value, options.sinks, *numbers)):
            return False
    return library.ready(score.spec, options.softcap is not None, reader_of(score))


def attend(score: PairScore, value: Tensor, options: Options) -> Tensor:
    """softmax(S)·V in float32, [B, H, N, dv], of a call that suits."""
    reader, extras = reader_of(score), {"mask": options.mask, "bias": options.bias, "sinks": options.sinks}
    read = piece_of(reader)
    if read is not None:
        used = score.pieces[read].reader
        extras["points"], extras["scale"] = used.points()
        extras |= {f"reader{i}": t for i, t in enumerate(used.head())}
    extras = {name: t for name, t in extras.items() if t is not None}
    row = [t for p in score.pieces for t in p.row]
    column = [t for i, p in enumerate(score.pieces) if i != read for t in p.column]
    head = [t for p in score.pieces for t in p.head + ((p.gate,) if p.gate is not None else ())]
    return _decode(
        [score.raw.query, score.raw.key, value, *row, *column, *head, *extras.values()],
        score.spec,
        reader,
        " ".join(extras),
        float(score.raw.scale),
        options.is_causal,
        options.window,
        options.offset,
        options.softcap,
    )


@torch.library.custom_op("hf_hyperattn::cpu_decode", mutates_args=())
def _decode(
    tensors: Sequence[Tensor],
    spec: str,
    reader: str,
    extras: str,
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
    given = [i != read for i, t in enumerate(terms) for _ in range(t.columns)]
    # the statistics that are read have places among the others
    take = iter(arguments.column)
    arguments.column = [next(take) if there else arguments.key[..., 0] for there in given]
    options = Options(None, None, is_causal, window, offset, softcap, None)
    call, kept = arguments.call(out, lse, query.shape[-1], scale, options)
    points, factor = (arguments.extras.get(name) for name in ("points", "scale"))
    head = [t.contiguous() for name, t in arguments.extras.items() if name.startswith("reader")]
    points, factor = (None if t is None else t.contiguous() for t in (points, factor))
    parameters, places = calls.pointers(head), (ctypes.c_int64 * len(given))(*given)
    decode = calls.Decode(
        calls.address(points), calls.address(factor), 0 if points is None else points.shape[-1],
        ctypes.addressof(parameters), len(head), any(i != read for i in range(len(terms))),
        ctypes.addressof(places),
    )  # fmt: skip
    library.core().hyper_decode(ctypes.byref(call), ctypes.byref(decode))
    del kept
    return out


@_decode.register_fake
def _(tensors, *_):
    query, _, value = tensors[:3]
    return query.new_empty(*query.shape[:3], value.shape[-1], dtype=torch.float32)
