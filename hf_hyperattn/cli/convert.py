"""`hyperattn convert`: a checkpoint turned into one of another architecture, by `hf_hyperattn.convert`."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import torch

import hf_hyperattn as ha
import hub_cards

from ..folders import check_replaceable, replace_folder
from ..integration.checkpoint_files import class_of, errors_as
from ..registry import MECHANISMS
from .inject_task import dtype_of, read_stock_config
from .inputs import quiet, read_tokenizer


def run(args: argparse.Namespace) -> None:
    """Convert and write; raises ValueError or OSError for bad input."""
    quiet()
    target, conversion = Path(args.out), conversion_config(args)
    check_replaceable(target, args.force, args.model)
    if not target.absolute().parent.is_dir():
        raise ValueError(
            f"{args.out}: {target.absolute().parent} is no folder; allowed: a place in an existing folder"
        )
    config = read_stock_config(args.model)
    with errors_as(f"{args.model}: cannot load it"):
        model: Any = class_of(config).from_pretrained(args.model, dtype=torch.float32).eval()
    before = count(model)
    with errors_as(f"{args.model}: cannot convert it"):
        model = ha.convert(model, conversion)
    tokenizer = None
    with contextlib.suppress(ValueError):  # a model of images, or saved without one: the checkpoint is what counts
        tokenizer = read_tokenizer(args.model, args.model)
    with replace_folder(target, keep_others=False) as stage:
        model.to(dtype_of(config)).save_pretrained(stage)
        if tokenizer is not None:
            tokenizer.save_pretrained(stage)
        record = getattr(model.config, "hyperattn", None) or ha.HyperAttnConfig([conversion]).to_dict()
        hub_cards.write_card(stage, config=record, base_model=hub_cards.hub_id_or_none(args.model))
    report = {"out": args.out, "class": type(model).__name__, "parameters": {"before": before, "after": count(model)},
              "tokenizer": tokenizer is not None}  # fmt: skip
    if args.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{args.out}: {type(model).__name__}, {before:,} parameters before, {count(model):,} now; it loads where "
          "hf_hyperattn is imported")  # fmt: skip


def conversion_config(args: argparse.Namespace) -> Any:
    """The config that --to and --set name; raises ValueError for settings that it does not have."""
    if args.to == "collaborative" and not dict(args.set).get("rank"):
        raise ValueError("--to collaborative replaces nothing without a rank; add --set rank=R, R at most heads times "
                         "their dimension")  # fmt: skip
    try:
        return MECHANISMS[args.to].config(**dict(args.set))
    except TypeError as error:
        raise ValueError(f"--set: {error}") from error


def count(model: torch.nn.Module) -> int:
    """Numbers in a model's parameters."""
    return sum(p.numel() for p in model.parameters())
