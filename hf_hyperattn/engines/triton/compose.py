"""From a score's key to the Triton functions of its sum of terms.

Which terms a score has, and how many statistics they read, differs from score to score, and Triton functions have no
variable arguments; so the few lines that call the terms one after another are written out as source text for each
score. The text is kept where Python looks for the source of what was not read from a file (`linecache`), because Triton
parses the source of its functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..score import parse_score_key
from .terms import indented, triton_form, written
from .tile import tanh

NUMBERS = "noise: tl.constexpr, row, column, head, softcap, CAP: tl.constexpr"


@dataclass(frozen=True)
class Functions:
    """The Triton functions of a score, and which of its statistics and parameters have gradients, gates among these."""

    score: Callable
    pull: Callable
    inexact: Callable | None
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    heads: tuple[int, ...]
    counts: tuple[int, int, int]  # of row statistics, column statistics, head parameters with gates
    long: bool  # see `TritonTerm`


@dataclass(frozen=True)
class Part:
    """One term of a score, and where its numbers stand among all."""

    index: int
    gate: int | None
    capped: bool
    dot: bool
    asks: bool
    numbers: tuple[str, ...]  # what its functions are called with after dot, gap, near, noise
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    heads: tuple[int, ...]
    long: bool  # see `TritonTerm`

    def value(self) -> list[str]:
        """Lines that leave the term's logits, capped where they are to be, in x<index>."""
        x = f"x{self.index}"
        lines = [f"{x} = value{self.index}({', '.join(('dot', 'gap', 'near', 'noise', *self.numbers))})"]
        if self.capped:
            lines += [
                "if CAP:",
                f"    t{self.index} = tanh({x} / softcap)",
                f"    {x} = softcap * t{self.index}",
            ]
        return lines

    def pull(self) -> list[str]:
        """Lines that leave the gradients of the term's numbers in g<index>."""
        g = f"g{self.index}"
        lines = [f"{g} = grad" if self.gate is None else f"{g} = grad * head[{self.gate}]"]
        if self.capped:
            lines += ["if CAP:", f"    {g} = {g} * (1 - t{self.index} * t{self.index})"]
        called = ", ".join((g, "dot", "gap", "near", "noise", *self.numbers))
        return [*lines, f"{g} = pull{self.index}({called})"]

    def gradients(self) -> tuple[list[str], ...]:
        """Of dot, rows, columns and head parameters: the expressions of their gradients."""
        counts = (int(self.dot), len(self.rows), len(self.columns), len(self.heads))
        gradients: list[list[str]] = []
        start = 0
        for count in counts:
            gradients.append([f"g{self.index}[{n}]" for n in range(start, start + count)])
            start += count
        if self.gate is not None:
            gradients[3].append(f"grad * x{self.index}")
        return tuple(gradients)


@functools.cache
def functions(score_key: str) -> Functions:
    """The Triton functions of a score all of whose terms have a Triton form."""
    parts, names = parts_of(score_key)
    summed = " + ".join(f"x{p.index}" if p.gate is None else f"x{p.index} * head[{p.gate}]" for p in parts)
    values = [line for p in parts for line in p.value()]
    by_dot, by_row, by_column, by_head = map(joined, zip(*(p.gradients() for p in parts), strict=True))
    score = [f"def score(dot, gap, near, {NUMBERS}):", *indented(values), f"    return {summed}"]
    pull = [
        f"def pull(grad, dot, gap, near, {NUMBERS}):",
        *indented(values + [line for p in parts for line in p.pull()]),
        f"    return {' + '.join(by_dot) or 'None'}, {listed(by_row)}, {listed(by_column)}, {listed(by_head)}",
    ]
    asking = [f"inexact{p.index}({', '.join(('dot', 'noise', *p.numbers))})" for p in parts if p.asks]
    inexact = ["def inexact(dot, noise: tl.constexpr, row, column, head):"] if asking else []
    inexact += [f"    return {' | '.join(asking)}"] if asking else []
    names |= {"tanh": tanh}
    make = lambda lines: written(f"score {score_key}", lines, names)
    counts = tuple(
        sum(getattr(t, kind) for t, *_ in parse_score_key(score_key)) for kind in ("rows", "columns", "heads")
    )
    gates = sum(p.gate is not None for p in parts)
    return Functions(
        make(score),
        make(pull),
        make(inexact) if inexact else None,
        joined(p.rows for p in parts),
        joined(p.columns for p in parts),
        joined((*p.heads, p.gate) if p.gate is not None else p.heads for p in parts),
        (counts[0], counts[1], counts[2] + gates),
        any(p.long for p in parts),
    )


def parts_of(score_key: str) -> tuple[list[Part], dict[str, Any]]:
    """The parts of a score, and the terms' functions by the names that the text gives them."""
    rows = columns = heads = 0
    parts: list[Part] = []
    names: dict[str, Any] = {}
    for index, (term, gated, capped) in enumerate(parse_score_key(score_key)):
        form = triton_form(term)
        assert form is not None  # see `functions`
        moving_rows, moving_columns, moving_heads = form.moving(term)
        numbers = [f"row[{rows + n}]" for n in range(term.rows)]
        numbers += [f"column[{columns + n}]" for n in range(term.columns)]
        numbers += [f"head[{heads + n}]" for n in range(term.heads)]
        part = Part(
            index,
            heads + term.heads if gated else None,
            capped,
            form.dot,
            form.inexact is not None,
            tuple(numbers),
            tuple(rows + n for n in moving_rows),
            tuple(columns + n for n in moving_columns),
            tuple(heads + n for n in moving_heads),
            form.long,
        )
        parts.append(part)
        names |= {f"value{index}": form.value, f"pull{index}": form.pull, f"inexact{index}": form.inexact}
        rows, columns, heads = rows + term.rows, columns + term.columns, heads + term.heads + gated
    return parts, names


def joined(lists: Iterable[Iterable]) -> tuple:
    """One tuple of all."""
    return tuple(x for some in lists for x in some)


def listed(expressions: Iterable[str]) -> str:
    """A tuple display, also of none or one."""
    return "(" + "".join(f"{e}, " for e in expressions) + ")"
