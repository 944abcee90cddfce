"""`hyperattn inject --mechanism collaborative`: share queries and keys.

The error of every layer is printed before anything is replaced. Texts are optional. With texts, the
decomposition preserves the logits on their first two thirds, and the loss is measured on the last
third.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from hf_hyperattn.analysis import perplexity
from hf_hyperattn.inject.encoder import cosine_distance, embed_passages
from hf_hyperattn.integration.architectures.collaborative.conversion import (
    format_report,
    share_heads,
)
from hf_hyperattn.integration.loading.checkpoint_files import class_of, errors_as
from hf_hyperattn.mechanisms.collaborative.config import CollaborativeConfig

from ..shared import device_map
from ..shared.console import print_table
from ..shared.inputs import tokenizer_or_none
from .inject_task import (
    Task,
    dtype_of,
    prepare_task,
    public_name,
    read_stock_config,
    write_model,
)


def inject_collaborative(args: argparse.Namespace) -> int:
    """Decompose, report, replace, measure and write; return the exit code 0."""
    check_options(args)
    task = prepare_task(args) if args.text else None
    model_config = read_stock_config(args.model)
    tokenizer = tokenizer_or_none(args.model)
    with errors_as(f"{args.model}: cannot load it"):
        model = device_map.load_model(class_of(model_config), args)
    dtype = dtype_of(model_config)
    args.seed = args.seed or 0
    config = CollaborativeConfig(rank=args.rank, seed=args.seed)
    print(f"{Path(args.model).name}: collaborative, rank {args.rank}, seed {args.seed}", flush=True)
    if tokenizer is None:
        print(f"no tokenizer: {args.model} has none", flush=True)
    # Filled while the model still has its original projections.
    before: dict[str, Any] = {}

    # `share_heads` calls this after the decomposition, before the projections are replaced.
    def show_and_measure(parts: list) -> None:
        print(format_report(model, parts, dtype), flush=True)
        before.update({} if task is None else measure_texts(task, model))

    examples = None
    if task is not None:
        # The decomposition sees the first two parts of every text; the third measures the loss.
        pieces = (ids for part in task.texts[:2] for ids in part.values())
        batches = (ids if task.is_encoder else ids[None] for ids in pieces)
        examples = [{"input_ids": ids} for ids in batches]
    parts = share_heads(model, config, False, examples, show_and_measure)
    losses: dict[str, list[float]] = {}
    if task is not None:
        for text, value in measure_texts(task, model).items():
            if task.is_encoder:
                # An encoder is compared with itself before the change, which has distance 0.
                losses[text] = [0.0, cosine_distance(before[text], value)]
            else:
                losses[text] = [before[text], value]
        print(f"\nOn the last third of each text ({task.length} tokens a piece):")
        name = "1 - cosine" if task.is_encoder else "perplexity"
        rows = [[text, f"{a:.4f}", f"{b:.4f}"] for text, (a, b) in losses.items()]
        print_table(("text", f"{name} before", "after"), rows)
    write_model(args, model, dtype, tokenizer, build_report(args, parts, losses))
    return 0


def check_options(args: argparse.Namespace) -> None:
    """Check that --rank is given, and that no option is given without effect."""
    if args.rank is None:
        raise ValueError(
            "--mechanism collaborative needs --rank R; allowed: 1 to the heads times their dimension, half of it to "
            "begin with"
        )
    # The rank alone decides about the size, so these options would have no effect.
    for name in ("budget", "pairs", "rows"):
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name} says nothing for --mechanism collaborative; leave it out, use --rank"
            )
    if args.length is not None and not args.text:
        raise ValueError("--length says nothing without --text; leave it out")


@torch.no_grad()
def measure_texts(task: Task, model: Any) -> dict[str, Any]:
    """Measure the model on the last part of each text.

    Returns:
        By text name: embeddings [B, e] of an encoder, or the perplexity of a causal LM.
    """
    if task.is_encoder:
        return {name: embed_passages(model, ids) for name, ids in task.texts[2].items()}
    return {name: perplexity(model, ids, len(ids)).value for name, ids in task.texts[2].items()}


def build_report(
    args: argparse.Namespace, parts: list, losses: dict[str, list[float]]
) -> dict[str, Any]:
    """Return the request, the error of every layer, and the losses."""
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
