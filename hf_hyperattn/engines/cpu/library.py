"""The engine's libraries: the core, and one for each score, from the wheel or built when first met (see native.py).

A score's library is C++ that is written from its key: the functors of its terms (emit_cpp.py). They share nothing with
the core but `struct Tile` (tile.h), so that a score builds in a second or two.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import native
from ..emit_cpp import emit_functor, emit_reader
from ..score import READERS, parse_score_key

HERE = Path(__file__).parent
SCORE = HERE / "score.h"
SHARED = [HERE / name for name in ("vectors.h", "weights.h", "tile.h")]
CORE = [
    HERE / name
    for name in (
        "core.cpp",
        "listed/windows.cpp",
        "product.h",
        "tiles.h",
        "bf16.h",
        "call.h",
        "forward.h",
        "backward.h",
        "row_sums.h",
        "decode.h",
        "norms.h",
        "listed/backward.h",
        "listed/blocks.h",
        "listed/choice.h",
        "listed/decode.h",
        "listed/forward.h",
        "listed/largest.h",
        "listed/products.h",
        "listed/softmax.h",
        "listed/tile.h",
        "listed/windows.h",
        "listed/windows_backward.h",
    )
]

#: The readers that an `Aggregation` has under its name.
PARTS = ("lift", "land")

TEXT = """// {score_key}
#include "{header}"
{functors}
namespace {{
using Score = hyper::Score<{pieces}>;
const hyper::ScoreTable* const tables[] = {{{tables}}};
}}
extern "C" const hyper::ScoreTable* hyper_score(int reader) {{ return tables[reader]; }}
"""


class Loaded(NamedTuple):
    """A score's library, the address of its ScoreTable, and the engine that runs it."""

    library: ctypes.CDLL
    table: int
    core: ctypes.CDLL


#: What is loaded, by score key, whether there is a softcap, and reader.
TABLES: dict[tuple[str, bool, str], Loaded] = {}


#: The engine, by what the environment says of compiled kernels.
CORES: dict[str | None, Any] = {}


def core() -> Any:
    """The engine itself (a `ctypes.CDLL`), or None where it cannot be built or compiled kernels are turned off."""
    setting = os.environ.get(native.SETTING)
    if setting not in CORES:
        engine = CORES[setting] = (
            native.load_library("cpu_core", *CORE, *SHARED) if native.is_enabled() else None
        )
        if engine is not None:
            engine.hyper_padded.restype = engine.hyper_tile_keys.restype = ctypes.c_int64
    return CORES[setting]


def bfloat16_products() -> str | None:
    """How bfloat16 numbers are multiplied here: "as float32", "by avx512_bf16" or "by AMX"; None without the engine."""
    engine = core()
    return engine and ("as float32", "by avx512_bf16", "by AMX")[engine.hyper_bfloat16()]


@torch.compiler.assume_constant_result
def core_is_ready() -> bool:
    """Whether the engine is there, or can be built now. A constant while a call is traced."""
    return core() is not None


def longs(values: Sequence[int]) -> Any:
    """Return an array of int64 for a kernel to read. Calls may share it: do not write to it."""
    return _longs(tuple(values))


@lru_cache(maxsize=512)
def _longs(values: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def load(score_key: str, capped: bool, reader: str = "") -> Loaded | None:
    """A score's library; None where the engine or the score cannot be built.

    Args:
        score_key: `PairScore.score_key`.
        capped: whether there is a softcap.
        reader: for decoding, the index of the term that reads its statistics from keys, and its reader's name; then,
            after " > ", the name of the `Aggregation` of values, where there is one.
    """
    kind = score_key, capped, reader
    if kind in TABLES and native.is_enabled():
        return TABLES[kind]
    carried = native.load_prebuilt()
    name, at = carried.scores.get(prebuilt_name(*kind), ("", 0)) if carried is not None else ("", 0)
    engine = core() if name or refusal(score_key) is None else None
    if engine is None:
        return None
    library = engine
    if not name or carried is None or carried.library is not engine:
        text = text_of(score_key, capped, reader)
        library, name, at = native.load_library("cpu_score", text, SCORE, *SHARED), "hyper_score", 0
        if library is None:
            return None
    table = library[name]
    table.restype = ctypes.c_void_p
    TABLES[kind] = Loaded(library, table(at), engine)
    return TABLES[kind]


def prebuilt_name(score_key: str, capped: bool, reader: str) -> str:
    """What a score is called in the manifest of a wheel."""
    return f"{score_key}|{capped:d}|{reader}"


def require(score_key: str, capped: bool) -> Loaded:
    """A score's library.

    Raises:
        RuntimeError: it is not there, as in a program that was exported on another machine.
    """
    loaded = load(score_key, capped)
    if loaded is None:
        raise RuntimeError(
            f"hf_hyperattn: the compiled score {score_key} is not there; use backend='auto'"
        )
    return loaded


@torch.compiler.assume_constant_result
def refusal(score_key: str) -> str | None:
    """Why a term of a score has no C++ functor; None where all have one. A constant while a call is traced."""
    return next(
        (why for term, *_ in parse_score_key(score_key) if (why := emit_functor(term)[1])), None
    )


@torch.compiler.assume_constant_result
def ready(score_key: str, capped: bool) -> bool:
    """Whether a score's library is there, or can be built now. A constant while a call is traced."""
    return load(score_key, capped) is not None


def text_of(score_key: str, capped: bool, *readers: str) -> str:
    """The C++ source of a score's library, whose `hyper_score(i)` gives the table for reader i of these; "" is none."""
    boolean = lambda value: str(bool(value)).lower()
    pieces, tables, functors = [], [], ""
    for i, (term, gated, caps) in enumerate(parse_score_key(score_key)):
        functors += emit_functor(term)[0].replace("struct Emitted ", f"struct Emitted{i} ")
        pieces.append(
            f"hyper::Piece<hyper::Emitted{i}, {boolean(gated)}, {boolean(caps and capped)}>"
        )
    for i, reader in enumerate(readers or ("",)):
        index, _, names = reader.partition(" ")
        name, _, average = names.partition(" > ")
        structs = {f"Reader{i}": name} | {
            f"{part.title()}{i}": f"{average} {part}" for part in PARTS if average
        }
        functors += "".join(
            emit_reader(READERS[of], struct) for struct, of in structs.items() if reader
        )
        read = f"hyper::ReadBy<{index}, hyper::Reader{i}>"
        if average:
            read = f"hyper::Averaging<{read}, hyper::Lift{i}, hyper::Land{i}>"
        tables.append(f"&hyper::Passes<Score{', ' + read if reader else ''}>::table")
    return TEXT.format(
        score_key=score_key,
        header=SCORE.relative_to(native.PACKAGE).as_posix(),  # the same wherever the package is
        functors=functors,
        pieces=", ".join(pieces),
        tables=", ".join(tables),
    )
