"""Write a patched checkpoint that loads on machines without this package.

The copy in OUT holds the checkpoint, modeling_hyperattn.py, and the modules that patching needs; it loads with
trust_remote_code=True and computes the same. Only known files are copied, no code but ours, and no link is followed
out of the checkpoint; hyperattn_manifest.json holds their SHA-256. What cannot be copied (the routing of some
families) is imported from this package, and the command says so.
"""

from __future__ import annotations

import argparse

HELP = "write a patched checkpoint that loads without this package"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `hyperattn export`."""
    parser.add_argument("model", metavar="MODEL", help="directory or Hub id of a saved patched model")
    parser.add_argument("out", metavar="OUT", help="directory to write, absent or empty")
    add = parser.add_argument
    add(
        "--remote-code",
        action="store_true",
        required=True,
        help="as code for trust_remote_code=True (the one form)",
    )
    add("--force", action="store_true", help="replace the checkpoint in OUT, and all else there")


def run(args: argparse.Namespace) -> None:
    """Export and say how to load it; raises ValueError or OSError for bad input."""
    import transformers

    transformers.logging.set_verbosity_error()
    from ..address import install
    from ..integration.export import export_remote_code

    packages, left_out = export_remote_code(args.model, args.out, args.force)
    print(f'{args.out}: load it with from_pretrained("{args.out}", trust_remote_code=True)')
    if left_out:
        print(f"left out, as no part of a checkpoint or as code of others: {', '.join(map(repr, left_out))}")
    if packages:
        print(f"it needs packages whose code cannot be copied ({', '.join(packages)}): {install()}")
    else:
        print("it needs Transformers and torch, and nothing of ours")
