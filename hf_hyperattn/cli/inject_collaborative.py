"""`hyperattn inject --mechanism collaborative`: shared queries and keys, by a decomposition of the projections.

The error of every layer is printed before anything is replaced. Texts are optional: with them the decomposition keeps
the logits on their first two thirds, and what the model loses is measured on the rest.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ..analysis import perplexity
from ..inject.encoder import cosine_distance, embed_passages
from ..integration.checkpoint_files import class_of, errors_as
from ..integration.collaborative.conversion import format_report, share_heads
from ..mechanisms.collaborative.config import CollaborativeConfig
from . import device_map
from .console import table
from .inject_task import Task, dtype_of, prepare, public_name, read_stock_config, write
from .inputs import tokenizer_or_none


def inject_collaborative(args: argparse.Namespace) -> int:
    """Decompose, report, replace, measure and write."""
    check(args)
    task = prepare(args) if args.text else None
    model_config = read_stock_config(args.model)
    tokenizer = tokenizer_or_none(args.model)
    with errors_as(f"{args.model}: cannot load it"):
        model = device_map.load(class_of(model_config), args)
    dtype = dtype_of(model_config)
    args.seed = args.seed or 0
    config = CollaborativeConfig(rank=args.rank, seed=args.seed)
    print(f"{Path(args.model).name}: collaborative, rank {args.rank}, seed {args.seed}", flush=True)
    if tokenizer is None:
        print(f"no tokenizer: {args.model} has none", flush=True)
    before: dict[str, Any] = {}

    def show_and_measure(parts: list) -> None:
        print(format_report(model, parts, dtype), flush=True)
        before.update({} if task is None else read(task, model))

    examples = None
    if task is not None:  # the first two parts of every text
        read_parts = [
            ids if task.is_encoder else ids[None]
            for part in task.texts[:2]
            for ids in part.values()
        ]
        examples = [{"input_ids": ids} for ids in read_parts]
    parts = share_heads(model, config, False, examples, show_and_measure)
    losses: dict[str, list[float]] = {}
    if task is not None:
        for text, value in read(task, model).items():
            losses[text] = (
                [0.0, cosine_distance(before[text], value)]
                if task.is_encoder
                else [before[text], value]
            )
        print(f"\nOn the last third of each text ({task.length} tokens a piece):")
        name = "1 - cosine" if task.is_encoder else "perplexity"
        rows = [[text, f"{a:.4f}", f"{b:.4f}"] for text, (a, b) in losses.items()]
        table(("text", f"{name} before", "after"), rows)
    write(args, model, dtype, tokenizer, report_of(args, parts, losses))
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse a missing rank, and options that say nothing here."""
    if args.rank is None:
        raise ValueError(
            "--mechanism collaborative needs --rank R; allowed: 1 to the heads times their dimension, half of it to "
            "begin with"
        )
    for name in ("budget", "pairs", "rows"):
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name} says nothing for --mechanism collaborative; leave it out, use --rank"
            )
    if args.length is not None and not args.text:
        raise ValueError("--length says nothing without --text; leave it out")


@torch.no_grad()
def read(task: Task, model: Any) -> dict[str, Any]:
    """What the last parts come to: embeddings [B, e] of an encoder, the perplexity of a causal LM."""
    if task.is_encoder:
        return {name: embed_passages(model, ids) for name, ids in task.texts[2].items()}
    return {name: perplexity(model, ids, len(ids)).value for name, ids in task.texts[2].items()}


def report_of(
    args: argparse.Namespace, parts: list, losses: dict[str, list[float]]
) -> dict[str, Any]:
    """The request, and what came of it."""
    layers = {
        p.host.name: {
            "rank": p.shape.rank,
            "error": p.result.error,
            "logit_error": p.result.logit_error,
            "parameters": p.parameters,
        }
        for p in parts
    }
    texts = list(map(public_name, args.text or ()))
    request = {"mechanism": "collaborative", "rank": args.rank, "seed": args.seed, "texts": texts}
    return {"asked": request, "layers": layers, "texts": losses}
