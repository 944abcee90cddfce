"""`hyperattn describe`: show attention layers, patches and gates of a model."""

from __future__ import annotations

import argparse
import json

from hf_hyperattn.integration.loading.checkpoint_files import load_to_look_at
from hf_hyperattn.integration.patching.describe import describe

from ..shared.inputs import silence_transformers


def run(args: argparse.Namespace) -> None:
    """Print the description; raise ValueError or OSError if there is no model."""
    silence_transformers()
    description = describe(load_to_look_at(args.model), heads=args.heads)
    print(json.dumps(description, indent=2) if args.json else description)
    if args.heads and not args.json and not any(host["by_head"] for host in description["hosts"]):
        print("--heads shows nothing: no head has parameters of its own")
