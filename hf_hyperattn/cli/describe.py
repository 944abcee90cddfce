"""Show the attention hosts of a model, what is patched, and where its gates stand.

Of a model that is not patched only config.json is read.
"""

from __future__ import annotations

import argparse
import json

HELP = "show a model's attention hosts and what is patched"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `hyperattn describe`."""
    parser.add_argument("model", metavar="MODEL", help="directory or Hub id of a model")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")


def run(args: argparse.Namespace) -> None:
    """Print the description; raises ValueError or OSError for what is no model."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    from ..integration.describe import describe
    from ..integration.loading import load_to_look_at

    found = describe(load_to_look_at(args.model))
    print(json.dumps(found, indent=2) if args.json else found)
