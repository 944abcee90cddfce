"""Print progress on stderr, and tables and reports on stdout.

Results can therefore be redirected to a file while progress stays visible.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm  # comes with Transformers


class ProgressBar(tqdm):
    """A progress bar with the time left, removed at the end.

    If stderr is not a terminal, it prints one line per description instead.

    Args:
        total: Number of steps.
    """

    def __init__(self, total: int):
        super().__init__(total=total, file=sys.stderr, leave=False, disable=None)
        # tqdm disables the bar if stderr is no terminal, and then counts nothing.
        self.begun = time.monotonic()
        self.finished = 0

    def describe(self, text: str) -> None:
        """Show the name of the current step."""
        if self.disable:
            print(f"{text}{self.describe_rest()}", file=sys.stderr, flush=True)
        else:
            self.set_description(text)

    def advance(self, steps: int) -> None:
        """Add finished steps."""
        self.finished += steps
        self.update(steps)

    def describe_rest(self) -> str:
        """Return the finished share and the time left, or "" while nothing is finished."""
        if not 0 < self.finished < self.total:
            return ""
        each = (time.monotonic() - self.begun) / self.finished
        left = each * (self.total - self.finished)
        amount = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
        return f" ({self.finished / self.total:.0%} done, about {amount} left)"


def show_progress(total: int) -> ProgressBar:
    """Return a context manager that shows progress over `total` steps."""
    return ProgressBar(total)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with its first column aligned left and the others right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        print("  ".join(cells).rstrip())


def print_report(args: argparse.Namespace, report: Any, show: Callable[[Any], object]) -> None:
    """Print a report: as JSON with --json, else with `show`."""
    if args.json:
        # ASCII only: a file name may hold bytes that stdout cannot encode, and the error would lose
        # the measurements.
        print(json.dumps(report, indent=2))
    else:
        show(report)


def run_with_report(work: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; with --json, send its text to stderr and print JSON on stdout.

    Args:
        work: The command. It returns the exit code, sets `args.report`, and writes to `args.output`
            if the exit code is 0.
        args: The command line.
    """
    if not args.json:
        return work(args)
    # The command sets it; it stays None if the command fails early.
    args.report = None
    # Only the JSON may reach stdout, so that programs can parse it.
    with contextlib.redirect_stdout(sys.stderr):
        code = work(args)
    print(
        json.dumps({"written": args.output if code == 0 else None, "report": args.report}, indent=2)
    )
    return code
