"""`hyperattn export`: write checkpoints or mechanisms to run without this package.

`integration.export.repositories` does the work; this module prints how to load the result.
"""

from __future__ import annotations

import argparse
import json

from hf_hyperattn.address import install
from hf_hyperattn.integration.export.repositories import export_kernel, export_remote_code

from ..shared.inputs import silence_transformers


def run(args: argparse.Namespace) -> None:
    """Export and print how to load the result; raise ValueError for bad input."""
    silence_transformers()
    # Exactly one of both options must be given.
    if args.remote_code == args.kernel:
        raise ValueError("what to write is not clear; allowed: one of --remote-code and --kernel")
    if args.kernel:
        if args.force:
            raise ValueError(
                "--force replaces checkpoints only; with --kernel choose an absent or empty directory"
            )
        names = export_kernel(args.model.split(","), args.out)
        text = f'{args.out}: a kernel repository; upload it, and load with attn_implementation="OWNER/REPO:{names[0]}"'
        print(json.dumps({"out": args.out, "names": names}, indent=2) if args.json else text)
        return
    packages, left_out = export_remote_code(args.model, args.out, args.force)
    if args.json:
        print(json.dumps({"out": args.out, "needs": packages, "left_out": left_out}, indent=2))
        return
    print(f'{args.out}: load it with from_pretrained("{args.out}", trust_remote_code=True)')
    # The user must notice files that the copy lacks.
    if left_out:
        print(
            f"left out, as foreign code or no part of a checkpoint: {', '.join(map(repr, left_out))}"
        )
    # The code of some families cannot be copied and is imported instead.
    if packages:
        print(f"it needs packages whose code cannot be copied ({', '.join(packages)}): {install()}")
    else:
        print("it needs Transformers and torch, and nothing of ours")
