"""`hyperattn describe`: show attention layers, patches and gates of a model."""

from __future__ import annotations

import argparse
import json
from typing import Any

from peft import get_peft_model_state_dict

from hf_hyperattn.integration.loading.checkpoint_files import load_to_look_at
from hf_hyperattn.integration.patching.describe import describe

from ..shared.adapters import find_base, is_adapter, load_adapter
from ..shared.inputs import silence_transformers


def run(args: argparse.Namespace) -> None:
    """Print the description; raise ValueError or OSError if there is no model."""
    silence_transformers()
    adapted = is_adapter(args.model)
    model = load_adapter(args.model) if adapted else load_to_look_at(args.model)
    description = describe(model, heads=args.heads)
    print(json.dumps(description, indent=2) if args.json else description)
    if args.json:
        return
    if adapted:
        print(
            f"adapter: {args.model} on {find_base(args.model)}, {count_adapter(model):,} parameters"
        )
    if args.heads and not any(host["by_head"] for host in description["hosts"]):
        print("--heads shows nothing, because no head has parameters of its own.")


def count_adapter(model: Any) -> int:
    """Return the number of parameters that the adapter folder contains."""
    return sum(tensor.numel() for tensor in get_peft_model_state_dict(model).values())
