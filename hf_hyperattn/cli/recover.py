"""`hyperattn recover`: brings interrupted saves into a folder to their end, and removes what they left."""

from __future__ import annotations

import argparse
import json

from ..folders import recover


def run(args: argparse.Namespace) -> None:
    """Recover and say what was done; raises OSError where that cannot be."""
    done = recover(args.folder)
    said = "\n".join(done) or f"{args.folder}: nothing to recover"
    print(json.dumps({"folder": args.folder, "done": done}, indent=2) if args.json else said)
