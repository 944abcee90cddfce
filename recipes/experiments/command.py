"""The command `python recipes/experiments`."""

from __future__ import annotations

import argparse
import importlib
import sys

#: Names and what they ask, in the order of docs/experiments.md; each is a module with an `EXPERIMENT`.
NAMES = {
    "alibi": "how far HyPE's bias is from ALiBi's",
    "flash": "what HyPE's bias costs and loses, computed in the kernel and as columns",
    "length": "language models trained at 128 tokens, read at up to 2,048",
    "depth": "depth of the lowest common ancestor, by attention with four scores",
}


def main(argv: list[str] | None = None) -> int:
    listing = "\n".join(f"  {name:8}{what}" for name, what in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="python recipes/experiments",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"Experiments on open questions, resumable run by run.\n\n{listing}\n"
        "  all     all four, one after the other\n  draw    tables and plots of docs/experiments.md from the results",
    )
    parser.add_argument("what", choices=[*NAMES, "all", "draw"])
    parser.add_argument(
        "--minutes", type=float, help="start no run after this long; the same command goes on"
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    args = parser.parse_args(argv)
    try:
        return act(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"experiments: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def act(args: argparse.Namespace) -> int:
    if args.what == "draw":
        from .draw import draw

        draw()
        return 0
    from .store import perform

    names = NAMES if args.what == "all" else (args.what,)
    for name in names:
        experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
        if not perform(experiment, minutes=args.minutes, fresh=args.fresh):
            return 0
    return 0
