"""Load the compiled libraries of the CPU engine: the core, and one per score.

Here you learn how a score's library is found: in the wheel, or by compiling C++ that is written
from its terms.
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

# A score's source holds only the functors of its terms (emit_cpp.py). It shares nothing with the
# core but `struct Tile` (tile.h), so it compiles in a second or two.

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

#: The two readers that belong to an `Aggregation`, by what follows its name.
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
    """A loaded score.

    Args:
        library: The score's library.
        table: Address of its `ScoreTable`.
        core: The engine that runs it.
    """

    library: ctypes.CDLL
    table: int
    core: ctypes.CDLL


#: Loaded scores, by score key, whether there is a softcap, and reader.
TABLES: dict[tuple[str, bool, str], Loaded] = {}

#: The engine or None, by the value of the environment variable HF_HYPERATTN_NATIVE.
CORES: dict[str | None, Any] = {}


def core() -> Any:
    """Return the engine, a `ctypes.CDLL`.

    Returns None if it cannot be built, or if compiled kernels are turned off.
    """
    setting = os.environ.get(native.SETTING)
    if setting not in CORES:
        engine = native.load_library("cpu_core", *CORE, *SHARED) if native.is_enabled() else None
        if engine is not None:
            # ctypes takes results for 32-bit integers otherwise.
            engine.hyper_padded.restype = ctypes.c_int64
            engine.hyper_tile_keys.restype = ctypes.c_int64
        CORES[setting] = engine
    return CORES[setting]


def bfloat16_products() -> str | None:
    """Return how bfloat16 numbers are multiplied on this machine.

    Returns:
        "as float32", "by avx512_bf16" or "by AMX"; None without the engine.
    """
    engine = core()
    if engine is None:
        return None
    return ("as float32", "by avx512_bf16", "by AMX")[engine.hyper_bfloat16()]


@torch.compiler.assume_constant_result
def core_is_ready() -> bool:
    """Return whether the engine is loaded or can be built now.

    Traced calls treat the answer as a constant.
    """
    return core() is not None


def longs(values: Sequence[int]) -> Any:
    """Return an int64 array for a kernel to read.

    Calls share it: do not write to it.
    """
    return _make_longs(tuple(values))


@lru_cache(maxsize=512)
def _make_longs(values: tuple[int, ...]) -> Any:
    # At least one element, so that every array has an address.
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def load(score_key: str, capped: bool, reader: str = "") -> Loaded | None:
    """Return a score's library; None if the engine or the score cannot be built.

    Args:
        score_key: `PairScore.score_key`.
        capped: Whether there is a softcap.
        reader: For decoding, the index of the term whose statistics are read from the vectors, and
            its reader's name. With an `Aggregation` of values, " > " and its name follow.
    """
    kind = score_key, capped, reader
    if kind in TABLES and native.is_enabled():
        return TABLES[kind]
    # The wheel's library holds the engine and many scores; a score is a function and its argument.
    carried = native.load_prebuilt()
    function, argument = "", 0
    if carried is not None:
        function, argument = carried.scores.get(prebuilt_name(*kind), ("", 0))
    engine = core() if function or find_refusal(score_key) is None else None
    if engine is None:
        return None
    library = engine
    # If the engine was built here, the wheel's scores may not fit it: they are built here as well.
    if not function or carried is None or carried.library is not engine:
        library = native.load_library(
            "cpu_score", write_source(score_key, capped, reader), SCORE, *SHARED
        )
        function, argument = "hyper_score", 0
        if library is None:
            return None
    table = library[function]
    table.restype = ctypes.c_void_p
    TABLES[kind] = Loaded(library=library, table=table(argument), core=engine)
    return TABLES[kind]


def prebuilt_name(score_key: str, capped: bool, reader: str) -> str:
    """Return the name of a score in the manifest of a wheel."""
    return f"{score_key}|{capped:d}|{reader}"


def require_score(score_key: str, capped: bool) -> Loaded:
    """Return a score's library.

    Raises:
        RuntimeError: The library cannot be loaded or built. That happens in a program exported on
            another machine.
    """
    loaded = load(score_key, capped)
    if loaded is None:
        raise RuntimeError(
            f"hf_hyperattn: the compiled score {score_key} is not there; use backend='auto'"
        )
    return loaded


@torch.compiler.assume_constant_result
def find_refusal(score_key: str) -> str | None:
    """Return why a term of a score has no C++ functor; None if all terms have one.

    Traced calls treat the answer as a constant.
    """
    return next(
        (why for term, *_ in parse_score_key(score_key) if (why := emit_functor(term)[1])), None
    )


@torch.compiler.assume_constant_result
def can_load(score_key: str, capped: bool) -> bool:
    """Return whether a score's library is loaded or can be built now.

    Traced calls treat the answer as a constant.
    """
    return load(score_key, capped) is not None


def write_source(score_key: str, capped: bool, *readers: str) -> str:
    """Return the C++ source of a score's library.

    Args:
        score_key: `PairScore.score_key`.
        capped: Whether there is a softcap.
        readers: Readers as in `load`; "" is none. `hyper_score(i)` of the library returns the table
            for reader i.
    """
    boolean = lambda value: str(bool(value)).lower()
    pieces, functors = [], []
    for i, (term, gated, caps) in enumerate(parse_score_key(score_key)):
        # Two terms of one kind have functors of the same name, so each gets the number of its term.
        functors.append(emit_functor(term)[0].replace("struct Emitted ", f"struct Emitted{i} "))
        pieces.append(
            f"hyper::Piece<hyper::Emitted{i}, {boolean(gated)}, {boolean(caps and capped)}>"
        )
    tables = []
    for i, reader in enumerate(readers or ("",)):
        text, table = _write_reader(i, reader)
        functors.append(text)
        tables.append(table)
    return TEXT.format(
        score_key=score_key,
        # Relative to the package: the source, which names the library, is the same everywhere.
        header=SCORE.relative_to(native.PACKAGE).as_posix(),
        functors="".join(functors),
        pieces=", ".join(pieces),
        tables=", ".join(tables),
    )


def _write_reader(number: int, reader: str) -> tuple[str, str]:
    """Return the functors of a reader, and the C++ address of their table."""
    if not reader:
        return "", "&hyper::Passes<Score>::table"
    index, _, names = reader.partition(" ")
    name, _, average = names.partition(" > ")
    structs = {f"Reader{number}": name}
    if average:
        structs |= {f"{part.title()}{number}": f"{average} {part}" for part in PARTS}
    functors = "".join(emit_reader(READERS[of], struct) for struct, of in structs.items())
    read = f"hyper::ReadBy<{index}, hyper::Reader{number}>"
    if average:
        read = f"hyper::Averaging<{read}, hyper::Lift{number}, hyper::Land{number}>"
    return functors, f"&hyper::Passes<Score, {read}>::table"
