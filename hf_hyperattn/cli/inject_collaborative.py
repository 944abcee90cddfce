"""`hyperattn inject --mechanism collaborative`: shared queries and keys, by a decomposition of the projections.

The error of every layer is printed before anything is replaced. Texts are optional: with them the decomposition keeps
the logits on their first two thirds, and what the model loses is measured on the rest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer

import hub_cards

from ..folders import replace_folder
from ..integration.collaborative import conversion
from ..integration.loading import class_of, errors_as, load_config
from ..mechanisms.collaborative.config import CollaborativeConfig
from .command import check_count
from .console import table
from .inject_output import REPORT, public_name
from .inject_setting import Setting, prepare, read_config


def run(args: argparse.Namespace) -> int:
    """Decompose, report, replace, measure and write."""
    check(args)
    transformers.logging.set_verbosity_error()
    setting = prepare(args) if args.text else None
    path = args.model
    model, dtype = load(path)
    config = conversion.as_whole(CollaborativeConfig(rank=args.rank, seed=args.seed))
    print(f"{Path(path).name}: collaborative, rank {args.rank}, seed {args.seed}", flush=True)
    newly_routed = conversion.route(model)
    chosen, parts = conversion.plan(model, config)
    moments = None if setting is None else conversion.moments_of(model, parts, calls(setting))
    parts = conversion.solve(parts, moments)
    show(model, parts, dtype)
    before = None if setting is None else read(setting, model)
    conversion.install(model, config, chosen, parts, False, newly_routed)
    lost = {} if setting is None else compared(setting, before, read(setting, model))
    if lost:
        print(f"\nOn the last third of each text ({setting.length} tokens a piece):")
        name = "1 - cosine" if setting.encoder else "perplexity"
        table(
            ("text", f"{name} before", "after"), [[n, f"{a:.4f}", f"{b:.4f}"] for n, (a, b) in lost.items()]
        )
    write(args, model, dtype, parts, lost)
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse a missing rank, and options that say nothing here."""
    if args.rank is None:
        raise ValueError(
            "--mechanism collaborative needs --rank R; allowed: 1 to the heads times their dimension, half of it to "
            "begin with"
        )
    check_count("rank", args.rank, 1)
    for name in ("budget", "pairs", "rows"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} says nothing for --mechanism collaborative; leave it out, use --rank")
    if args.length is not None and not args.text:
        raise ValueError("--length says nothing without --text; leave it out")


def load(path: str) -> tuple[nn.Module, torch.dtype]:
    """The model as the class that it was saved as, in float32, and the dtype of the checkpoint."""
    config = read_config(path)
    dtype = getattr(config, "dtype", None)
    with errors_as(f"{path}: cannot load it"):
        model = class_of(config).from_pretrained(path, dtype=torch.float32).eval()
    return model, dtype if isinstance(dtype, torch.dtype) else torch.float32


def calls(setting: Setting) -> list[dict]:
    """The first two parts of every text, as calls of the model."""
    rows = (row for part in (0, 1) for row in pieces(setting, part).values())
    return [{"input_ids": row} for row in rows]


def pieces(setting: Setting, part: int) -> dict[str, torch.Tensor]:
    """One part of every text, [rows, N]: passages between special tokens for an encoder, one row for a causal LM."""
    if setting.encoder:
        from .inject_encoder import passages_of

        return passages_of(setting, part)
    return {name: ids[None] for name, ids in setting.part(part).items()}


@torch.no_grad()
def read(setting: Setting, model: nn.Module) -> dict[str, torch.Tensor]:
    """What the last parts come to: embeddings [rows, e] of an encoder, the perplexity [1] of a causal LM."""
    found = {}
    for name, row in pieces(setting, 2).items():
        if setting.encoder:
            found[name] = model.base_model(row).last_hidden_state.float().mean(1)
        else:
            logits = model(row, use_cache=False).logits[0, :-1].float()
            found[name] = F.cross_entropy(logits, row[0, 1:]).exp()[None]
    return found


def compared(setting: Setting, before: dict, after: dict) -> dict[str, tuple[float, float]]:
    """By text: perplexities, or 0 and 1 - cosine."""
    if setting.encoder:
        return {n: (0.0, 1 - F.cosine_similarity(before[n], after[n]).mean().item()) for n in before}
    return {n: (before[n].item(), after[n].item()) for n in before}


def show(model: nn.Module, parts: list, dtype: torch.dtype) -> None:
    """What is about to be replaced."""
    fitted = parts[0].result.logit_error is not None
    rows = [
        [p.host.name, f"{p.shape.rank} of {p.shape.width}", f"{p.result.error:.4f}"]
        + ([f"{p.result.logit_error:.4f}"] if fitted else [])
        + [f"{n:,}" for n in p.parameters]
        for p in parts
    ]
    table(("layer", "rank", "error", *(["of logits"] if fitted else []), "parameters", "after"), rows)
    total, after = conversion.sizes(model, parts)
    print(f"Whole model: {total:,} -> {after:,} parameters, "
          f"{total * dtype.itemsize / 1e6:.1f} -> {after * dtype.itemsize / 1e6:.1f} MB", flush=True)  # fmt: skip


def write(args: argparse.Namespace, model: nn.Module, dtype: torch.dtype, parts: list, lost: dict) -> None:
    """Write the folder, whole or not at all; without --output nothing is written."""
    if args.output is None:
        print("\nnothing is written: no --output")
        return
    target = Path(args.output)
    with replace_folder(target, keep_others=False) as stage:
        model.to(dtype).save_pretrained(stage)
        copy_tokenizer(args.model, stage)
        (stage / REPORT).write_text(json.dumps(said(args, parts, lost), indent=1) + "\n")
        hub_cards.write_card(stage, base_model=hub_cards.hub_id_or_none(args.model))
    print(f"\nwritten: {target}")


def copy_tokenizer(path: str, stage: Path) -> None:
    """The tokenizer, where the model has one."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, config=load_config(path), trust_remote_code=False)
    except Exception:
        return  # a model of images, or saved without one: the checkpoint is what counts
    tokenizer.save_pretrained(stage)


def said(args: argparse.Namespace, parts: list, lost: dict) -> dict:
    """What was asked, and what came of it."""
    layers = {
        p.host.name: {
            "rank": p.shape.rank,
            "error": p.result.error,
            "logit_error": p.result.logit_error,
            "parameters": p.parameters,
        }
        for p in parts
    }
    asked = {
        "mechanism": "collaborative",
        "rank": args.rank,
        "seed": args.seed,
        "texts": list(map(public_name, args.text or ())),
    }
    return {"asked": asked, "layers": layers, "texts": {n: list(pair) for n, pair in lost.items()}}
