"""The engine's libraries: the core, built once, and one for each score, built when it is first met (see native.py).

A score's library is a few lines of C++ made from its spec, which name the functors of its terms, and the functors of
terms that have none by hand (emit_cpp.py). They share nothing with the core but `struct Tile` (tile.h), so that a score
builds in a second or two.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from .. import native
from ..emit_cpp import emitted
from ..score import capped_in, parse_spec

HERE = Path(__file__).parent
EMITTED = HERE / "emitted.h"
SHARED = [HERE / name for name in ("vectors.h", "tile.h")]
CORE = [
    HERE / name
    for name in (
        "core.cpp",
        "product.h",
        "call.h",
        "forward.h",
        "backward.h",
        "row_sums.h",
        "decode.h",
        "norms.h",
    )
]

TEXT = """// {spec}
{includes}
{emitted}
extern "C" const hyper::ScoreTable* hyper_score() {{
  return &hyper::Passes<hyper::Score<{pieces}>{reader}>::table;
}}
"""

_tables: dict[tuple[str, bool, str], tuple[ctypes.CDLL, int]] = {}


def core() -> ctypes.CDLL | None:
    """The engine itself, or None where it cannot be built or compiled kernels are turned off."""
    found = native.load("cpu_core", *CORE, *SHARED) if native.enabled() else None
    if found is not None:
        found.hyper_padded.restype = found.hyper_tile_keys.restype = ctypes.c_int64
    return found


def table(spec: str, capped: bool, reader: str = "") -> int | None:
    """The address of a score's ScoreTable; None where the engine or the score cannot be built.

    Args:
        spec: `PairScore.spec`.
        capped: whether there is a softcap.
        reader: for decoding, `"index type"` of the piece that reads its statistics from keys (score.h).
    """
    if (spec, capped, reader) in _tables and native.enabled():
        return _tables[spec, capped, reader][1]
    terms = [term for term, _ in parse_spec(spec)]
    if reader and terms[int(reader.split()[0])].cpp is None:  # a reader stands in the header of its term
        return None
    if refusal(spec) is not None or core() is None:
        return None
    text = text_of(spec, capped, reader)
    headers = sorted({term.cpp[0] if term.cpp else EMITTED for term in terms} | {HERE / "score.h"})
    library = native.load("cpu_score", text, *headers, *SHARED)
    if library is None:
        return None
    library.hyper_score.restype = ctypes.c_void_p
    _tables[spec, capped, reader] = library, library.hyper_score()
    return _tables[spec, capped, reader][1]


@torch.compiler.assume_constant_result
def refusal(spec: str) -> str | None:
    """Why a term of a score has no C++ functor; None where all have one. A constant while a call is traced."""
    return next((why for term, _ in parse_spec(spec) if not term.cpp and (why := emitted(term)[1])), None)


@torch.compiler.assume_constant_result
def ready(spec: str, capped: bool, reader: str = "") -> bool:
    """Whether a score's library is there, or can be built now. A constant while a call is traced."""
    return table(spec, capped, reader) is not None


def text_of(spec: str, capped: bool, reader: str = "") -> str:
    """The C++ source of a score's library."""
    boolean = lambda value: str(bool(value)).lower()
    pieces, headers, texts = [], [HERE / "score.h"], []
    for (term, gated), caps in zip(parse_spec(spec), capped_in(spec), strict=True):
        header, functor = term.cpp or (EMITTED, f"hyper::Emitted{len(pieces)}")
        if term.cpp is None:
            texts.append(emitted(term)[0].replace("struct Emitted ", f"struct Emitted{len(pieces)} "))
        headers.append(header)
        pieces.append(f"hyper::Piece<{functor}, {boolean(gated)}, {boolean(caps and capped)}>")
    includes = "\n".join(f'#include "{header.as_posix()}"' for header in dict.fromkeys(headers))
    index, _, kind = reader.partition(" ")
    read = f", hyper::ReadBy<{index}, {kind}>" if reader else ""
    return TEXT.format(
        spec=spec, includes=includes, emitted="".join(texts), pieces=", ".join(pieces), reader=read
    )
