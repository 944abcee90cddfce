"""Bring interrupted saves into a folder to their end, and remove what they left.

Exit code 0: the folder is whole, also where there was nothing to do. 2: a process is saving there now, or what is left
cannot be put in its place; the message says what to do.
"""

from __future__ import annotations

import argparse

HELP = "bring interrupted saves into a folder to their end"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `hyperattn recover`."""
    parser.add_argument("folder", metavar="DIR", help="the folder that was saved into")


def run(args: argparse.Namespace) -> None:
    """Recover and say what was done; raises OSError where that cannot be."""
    from ..folders import recover

    for line in recover(args.folder) or [f"{args.folder}: nothing to recover"]:
        print(line)
