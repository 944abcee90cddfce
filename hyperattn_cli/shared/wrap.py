"""Wrap text for a terminal. Only the standard library, so that light commands start at once."""

from __future__ import annotations

import shutil
import textwrap

#: Wider lines are hard to read.
WIDEST = 80
#: In narrower terminals, wrapping would break every word.
NARROWEST = 50


def wrap_text(label: str, text: str) -> str:
    """Return text behind a label, with further lines indented below the first."""
    width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns))
    indent = " " * len(label)
    return textwrap.fill(
        text, width, initial_indent=label, subsequent_indent=indent, break_on_hyphens=False
    )
