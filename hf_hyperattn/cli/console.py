"""Progress and tables: by rich on a terminal that has it, as plain lines elsewhere.

Progress goes to stderr and results to stdout, so that results can be redirected.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager


class ProgressLines(AbstractContextManager):
    """One line on stderr for each description."""

    def __exit__(self, *error) -> None:
        pass

    def describe(self, text: str) -> None:
        """Say what is being done now."""
        print(text, file=sys.stderr, flush=True)

    def advance(self, steps: int) -> None:
        """Take note of work done; nothing to show in plain lines."""


class ProgressBar(ProgressLines):
    """A bar with the time left on stderr, gone when the work is."""

    def __init__(self, total: int):
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        self._bar.stop()

    def describe(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def advance(self, steps: int) -> None:
        self._bar.advance(self._task, steps)


def progress(total: int) -> ProgressLines:
    """A context whose value has `describe(text)` and `advance(steps)`, over `total` steps."""
    return ProgressBar(total) if is_rich(sys.stderr) else ProgressLines()


def is_rich(stream) -> bool:
    """Whether a stream is a terminal, and rich is there to draw on it."""
    return stream.isatty() and importlib.util.find_spec("rich") is not None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is aligned left, numbers right."""
    if is_rich(sys.stdout):
        _rich_table(header, rows)
        return
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))]
        print("  ".join(cells).rstrip())


def _rich_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = Table(header_style="bold")
    for i, name in enumerate(header):
        out.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        out.add_row(*map(Text, row))
    Console().print(out)
