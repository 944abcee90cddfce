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
#: The same, in the order of docs/hsa_experiments.md.
HSA = {
    "hsa_minilm": "hierarchical attention injected into three of MiniLM's six layers",
    "hsa_probe": "the same model read by a linear probe on IMDB",
    "hsa_joined": "HsaEncoder on images joined with texts, each partly corrupted",
}


def main(argv: list[str] | None = None) -> int:
    listing = "\n".join(f"  {name:11}{what}" for name, what in (NAMES | HSA).items())
    parser = argparse.ArgumentParser(
        prog="python recipes/experiments",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"Experiments on open questions, resumable run by run.\n\n{listing}\n"
        "  all        the first four, one after the other\n"
        "  draw       tables and plots of docs/experiments.md and docs/hsa_experiments.md from the results",
    )
    parser.add_argument("what", choices=[*NAMES, *HSA, "all", "draw"])
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
        from . import hsa_tables
        from .draw import draw

        draw()
        hsa_tables.draw()
        return 0
    from .store import perform

    names = NAMES if args.what == "all" else (args.what,)
    for name in names:
        experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
        if not perform(experiment, minutes=args.minutes, fresh=args.fresh):
            return 0
    return 0
