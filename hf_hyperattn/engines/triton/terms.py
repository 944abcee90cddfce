"""What a room gives so that the GPU kernels can compute its terms.

A term `name` defined in a module of package `room` has a Triton form where there is a module `room.triton_terms` with a
dictionary `TRITON_TERMS: dict[str, TritonTerm]` that has the name. It is imported with the first call that needs it,
and imports Triton; nothing else in a room does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import linecache
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..score import Term


@dataclass(frozen=True)
class TritonTerm:
    """A term's arithmetic on a tile, as `@triton.jit` functions.

    They are called with `dot, gap, near, noise`, then the term's row statistics, column statistics and head parameters.
    All are float32; statistics broadcast against the tile, whichever way it lies. Where the scalar `near` is true,
    `gap` is the squared distance of the two points from differences (see `score.Term`). `noise` is a constant: what
    rounding may leave of |q|² + |k|² - 2 q·k where q = k, as a share of |q|².

    Args:
        value: returns the logits.
        pull: called with their gradient before all else; returns a tuple of gradients, tile-shaped (the engine sums
            them up): of dot, of the row statistics, of the column statistics, of the head parameters, as far as they
            have one.
        dot: whether there is a gradient of dot.
        rows, columns, heads: which statistics and parameters have a gradient; None: all.
        inexact: returns the pairs on which the product form is too inexact; called with `dot, noise` and the
            numbers. Given such a pair, the engine takes the whole tile from differences. None: there are none.
        long: whether gradients need so many registers that tiles of the backward kernels have to be smaller.
    """

    value: Callable
    pull: Callable
    dot: bool = True
    rows: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    inexact: Callable | None = None
    long: bool = False

    def moving(self, term: Term) -> tuple[tuple[int, ...], ...]:
        """The numbers of the row statistics, column statistics and head parameters that have a gradient."""
        counts = {"rows": term.rows, "columns": term.columns, "heads": term.heads}
        return tuple(
            tuple(range(n)) if (places := getattr(self, name)) is None else places for name, n in counts.items()
        )


@functools.cache
def known(module: str) -> bool:
    """Whether the package of this module has Triton forms; nothing is imported to find out."""
    package = module.rpartition(".")[0]
    try:
        return bool(package) and importlib.util.find_spec(f"{package}.triton_terms") is not None
    except (ImportError, ValueError):
        return False


def triton_form(term: Term) -> TritonTerm | None:
    """The Triton form of a term; None where its room gives none."""
    if not known(type(term).__module__):
        return None
    package = type(term).__module__.rpartition(".")[0]
    return importlib.import_module(f"{package}.triton_terms").TRITON_TERMS.get(term.name)


def written(owner: str, lines: list[str], names: Mapping[str, object]) -> Callable:
    """The `@triton.jit` function of these source lines, which Triton reads again from where Python keeps such text.

    Args:
        owner: says what it belongs to; with its first line it names the text.
        names: what the lines speak of.
    """
    import triton
    import triton.language as tl

    file = f"<hf_hyperattn Triton {owner}: {lines[0]}>"
    text = "\n".join(["@triton.jit", *lines]) + "\n"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = {"triton": triton, "tl": tl, "__name__": __name__, **names}
    exec(compile(text, file, "exec"), space)  # noqa: S102  text of ours, from registered names
    return space[lines[0][4 : lines[0].index("(")]]


def term_of(
    name: str,
    names: Mapping[str, object],
    numbers: Iterable[str],
    value: str,
    pull: list[str],
    inexact: str,
    **more,
) -> TritonTerm:
    """The Triton form of a term whose functions differ from others' by what they read alone.

    Args:
        name: the term's.
        names: the functions that the texts call.
        numbers: names of the statistics and parameters, in order.
        value, inexact: what these functions return; pull: the lines of that one.
        more: further arguments of `TritonTerm`.
    """
    names_of = ", ".join(numbers)
    make = lambda kind, first, body: written(name, [f"def {kind}({first}, {names_of}):", *indented(body)], names)
    return TritonTerm(
        make("value", "dot, gap, near, noise", [f"return {value}"]),
        make("pull", "grad, dot, gap, near, noise", pull),
        inexact=make("inexact", "dot, noise", [f"return {inexact}"]),
        **more,
    )


def indented(lines: Iterable[str]) -> list[str]:
    """Lines of a function's body."""
    return ["    " + line for line in lines]
