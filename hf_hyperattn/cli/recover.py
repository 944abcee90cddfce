"""`hyperattn recover`: brings interrupted saves into a folder to their end, and removes what they left."""

from __future__ import annotations

import argparse

from ..folders import recover


def run(args: argparse.Namespace) -> None:
    """Recover and say what was done; raises OSError where that cannot be."""
    for line in recover(args.folder) or [f"{args.folder}: nothing to recover"]:
        print(line)
