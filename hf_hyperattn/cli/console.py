"""Progress on stderr and tables on stdout, so that results can be redirected."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm  # comes with Transformers


class ProgressBar(tqdm):
    """A bar with the time left, gone when the work is; where stderr is no terminal, one line for each description."""

    def describe(self, text: str) -> None:
        """Say what is being done now."""
        if self.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self.set_description(text)

    def advance(self, steps: int) -> None:
        """Take note of work done."""
        self.update(steps)


def progress(total: int) -> ProgressBar:
    """A context whose value has `describe(text)` and `advance(steps)`, over `total` steps."""
    return ProgressBar(total=total, file=sys.stderr, leave=False, disable=None)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is aligned left, numbers right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        print("  ".join(cells).rstrip())


def output(args: argparse.Namespace, report: Any, show: Callable[[Any], object]) -> None:
    """Print a report: as JSON with --json, else as `show` prints it."""
    # in ASCII: the name of a file may hold bytes that no terminal takes, and what was measured would be lost
    print(json.dumps(report, indent=2)) if args.json else show(report)


def reported(work: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Do the work; with --json what it prints goes to stderr, and JSON of `args.report` to stdout.

    Args:
        work: returns the exit code; leaves in `args.report` what it measured, and where that is 0 wrote to
            `args.output`.
    """
    if not args.json:
        return work(args)
    args.report = None
    with contextlib.redirect_stdout(sys.stderr):
        code = work(args)
    print(
        json.dumps({"written": args.output if code == 0 else None, "report": args.report}, indent=2)
    )
    return code
