"""`hyperattn convert`: turn a checkpoint into another architecture.

`hf_hyperattn.convert` does the work; this module checks the input and writes the result.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import hf_hyperattn as ha
import hub_cards
from hf_hyperattn.config.registry import MECHANISMS
from hf_hyperattn.integration.loading.checkpoint_files import class_of, errors_as
from hf_hyperattn.utils.folders import check_replaceable

from ..shared.inputs import check_place, silence_transformers, tokenizer_or_none, write_checkpoint
from .inject_task import dtype_of, read_stock_config


def run(args: argparse.Namespace) -> None:
    """Convert and write; raise ValueError or OSError for bad input."""
    silence_transformers()
    conversion = make_conversion_config(args)
    # Check the target before loading, which may take minutes.
    check_replaceable(Path(args.output), args.force, args.model)
    check_place("--output", args.output)
    config = read_stock_config(args.model)
    tokenizer = tokenizer_or_none(args.model)
    with errors_as(f"{args.model}: cannot load it"):
        model: Any = class_of(config).from_pretrained(args.model, dtype=torch.float32).eval()
    # Conversion changes the model in place, so count first.
    before = count_parameters(model)
    with errors_as(f"{args.model}: cannot convert it"):
        model = ha.convert(model, conversion)
    after = count_parameters(model)
    # A new model class may keep no record in its config, but the card needs one.
    record = getattr(model.config, "hyperattn", None) or ha.HyperAttnConfig([conversion]).to_dict()
    base = hub_cards.hub_id_or_none(args.model)
    # The conversion computed in float32; the checkpoint keeps its dtype.
    save = model.to(dtype_of(config)).save_pretrained
    write_checkpoint(args.output, save, tokenizer, config=record, base_model=base)
    report = {
        "output": args.output,
        "class": type(model).__name__,
        "parameters": {"before": before, "after": after},
        "tokenizer": tokenizer is not None,
    }
    if args.json:
        print(json.dumps(report, indent=2))
        return
    print(
        f"Wrote {args.output}: a {type(model).__name__} with {after:,} parameters ({before:,} before)."
    )
    if tokenizer is None:
        print(f"no tokenizer: {args.model} has none")
    print("It loads with from_pretrained after `import hf_hyperattn`.")


def make_conversion_config(args: argparse.Namespace) -> Any:
    """Return the config that --to and --set describe.

    Raises:
        ValueError: A setting is unknown, out of range, missing or given twice.
    """
    # `rank=None` is valid for `patch_model`, but a conversion would change nothing.
    if args.to == "collaborative" and not dict(args.set).get("rank"):
        raise ValueError(
            "--to collaborative replaces nothing without a rank; add --set rank=R, R at most heads times "
            "their dimension"
        )
    names = [name for name, _ in args.set]
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ValueError(f"--set {twice[0]} is given twice; leave one out")
    try:
        return MECHANISMS[args.to].config(**dict(args.set))
    except TypeError as error:
        raise ValueError(f"--set: {error}") from error


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters of a model."""
    return sum(p.numel() for p in model.parameters())
