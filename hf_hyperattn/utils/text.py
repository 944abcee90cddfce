"""Shorten values for messages of one line."""

from __future__ import annotations

import reprlib
from typing import Any


def short(value: Any) -> str:
    """Return a value as text of at most 80 characters, however large or nested it is."""
    text = _BRIEF.repr(value).replace("\n", " ")
    return text if len(text) <= 80 else text[:77] + "..."


class _Brief(reprlib.Repr):
    """A `repr` with limits on depth and length."""

    def __init__(self):
        super().__init__()
        self.maxlevel = 3
        self.maxstring = 60
        self.maxother = 60

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print integers of more than 4,300 digits, with an error of its own.
        return str(x) if x.bit_length() < 128 else f"an integer of {x.bit_length()} bits"


_BRIEF = _Brief()
