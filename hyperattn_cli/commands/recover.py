"""`hyperattn recover`: finish interrupted saves into a folder."""

from __future__ import annotations

import argparse
import json

from hf_hyperattn.utils.folders import recover


def run(args: argparse.Namespace) -> None:
    """Recover and print what was done; raise OSError if that fails."""
    done = recover(args.folder)
    text = "\n".join(done) or f"{args.folder}: nothing to recover"
    print(json.dumps({"folder": args.folder, "done": done}, indent=2) if args.json else text)
