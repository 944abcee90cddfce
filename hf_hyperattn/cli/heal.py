"""`hyperattn heal`: checks its input, shows what `inject.heal` did, and writes an adapter or a checkpoint."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hub_cards

from ..files import parts_of
from ..folders import check_replaceable
from ..inject.heal import Healing, Losses
from ..integration.checkpoint_config import recorded_hosts
from ..integration.checkpoint_files import class_of, errors_as, load_config
from .console import progress, reported, table
from .demo import device_of
from .inject_task import CHARACTERS, dtype_of, is_causal, results
from .inputs import (
    check_place,
    encode,
    prefix_of,
    quiet,
    read_text,
    read_tokenizer,
    window_of,
    write_checkpoint,
)

REPORT, STATE = (
    "hyperattn_heal.json",
    ".heal-state.safetensors",
)  # the state is beside the output, until it is there


def run(args: argparse.Namespace) -> int:
    """Heal, show and write; 1 where the held-out texts gain nothing and nothing is written."""
    return reported(heal, args)


def heal(args: argparse.Namespace) -> int:
    """Heal, show and write; what was measured goes to `args.report`."""
    state = check(args)
    quiet()
    config = load_config(args.model, args.model)
    if recorded_hosts(config) is None or not is_causal(args.model, config):
        raise ValueError(
            f"{args.model}: not a patched causal LM; allowed: one, such as `hyperattn inject` writes"
        )
    tokenizer = read_tokenizer(args.model, args.model)
    length = window_of(config, args.length, max(tuned_lengths(config.hyperattn), default=2048))
    texts = read_texts(args, tokenizer, length)
    with errors_as(f"{args.model}: cannot load it"):
        model = class_of(config).from_pretrained(args.model, dtype=torch.float32).eval()
    model.to(device_of(args.device))
    rates, prefix = (args.lr, args.patch_lr), prefix_of(tokenizer)
    healing = Healing(
        model, texts, length, args.steps, args.lora or 0, *rates, args.seed, prefix, args.bf16
    )
    count = sum(p.numel() for p in healing.trained().values())
    print(
        f"{Path(args.model).name}: {count:,} parameters learn, {args.steps} steps of {length:,} tokens, seed "
        f"{args.seed}\nTexts: {', '.join(texts)}",
        flush=True,
    )
    most = tokens_read(args, length)
    for name in (name for name, ids in texts.items() if len(ids) == most):
        print(f"{name}: its first {most:,} tokens, more than which {args.steps} steps do not read")
    before = healing.held_out()
    if not args.resume:  # with --force: all else is in order, so that the old work goes now
        state.unlink(missing_ok=True)
    with progress(args.steps) as bar:
        bar.describe("learning")
        healing.run(state, args.save_every, lambda _: bar.advance(len(healing.losses) - bar.n))
    after = healing.held_out()
    show(before, after)
    args.report = report_of(args, healing, before, after)
    if sum(kl for *_, kl in after.values()) >= sum(kl for *_, kl in before.values()):
        print(
            "\nthe held-out texts gain nothing: nothing is written; use more or other text, or lower rates"
        )
        state.unlink(missing_ok=True)  # to go on from its end would gain nothing again
        return 1
    write(args, healing, tokenizer, dtype_of(config))
    state.unlink(missing_ok=True)
    return 0


def check(args: argparse.Namespace) -> Path:
    """Refuse what is wrong in itself, before anything is read; the file that the work is kept in while it goes on."""
    target = Path(args.output).absolute()
    check_place("--output", args.output)
    check_replaceable(target, args.force, args.model)
    state = target.with_name(target.name + STATE)
    if state.exists() and not args.resume:
        if not args.force:
            raise ValueError(
                f"{state} holds an interrupted run; allowed: --resume to go on, --force to begin anew"
            )
    return state


def tuned_lengths(record: Any) -> Iterator[int]:
    """The lengths that a patch says it was chosen for."""
    if isinstance(record, dict) and isinstance(record.get("tuned_length"), int):
        yield record["tuned_length"]
    for part in parts_of(record):
        yield from tuned_lengths(part)


def tokens_read(args: argparse.Namespace, length: int) -> int:
    """Of each text at most: a window for every step, one to hold out, and one to draw from."""
    return (args.steps + 2) * length


def read_texts(args: argparse.Namespace, tokenizer: Any, length: int) -> dict[str, Tensor]:
    """Token ids of every text, no more than the steps can read."""
    texts, tokens = {}, tokens_read(args, length)
    for path in args.text:
        text, name = read_text(path, CHARACTERS * tokens)
        texts[name] = torch.tensor(encode(tokenizer, text, tokens, name))
    if len(texts) < len(args.text):
        raise ValueError(
            f"--text {' '.join(args.text)}: two files of one name; allowed: texts of different names"
        )
    return texts


def show(before: Losses, after: Losses) -> None:
    """The table of the held-out parts."""
    print("\nHeld-out text, perplexity, and KL from the untouched model in nats a token:")
    form = lambda own, x: f"{math.exp(x):.3f} ({math.expm1(x - own):+.2%})"
    rows = [
        [
            name,
            f"{math.exp(own):.3f}",
            form(own, old),
            form(own, new),
            f"{kl:.5f}",
            f"{healed_kl:.5f}",
        ]
        for (name, (own, old, kl)), (_, new, healed_kl) in zip(
            before.items(), after.values(), strict=True
        )
    ]
    table(("text", "untouched", "injected", "healed", "KL injected", "KL healed"), rows)


def report_of(
    args: argparse.Namespace, healing: Healing, before: Losses, after: Losses
) -> dict[str, Any]:
    """What was measured, as plain data."""
    texts = {
        name: {
            "before": math.exp(own),
            "after": math.exp(after[name][1]),
            "injected": math.exp(old),
        }
        | {"kl_injected": kl, "kl": after[name][2]}
        for name, (own, old, kl) in before.items()
    }
    half = ", in bfloat16" if args.bf16 else ""
    notes = f"{healing.length} tokens, {args.steps} steps of distillation from the untouched model{half}."
    return {"metric": "perplexity", "notes": notes, "texts": texts, "losses": healing.losses}


def write(args: argparse.Namespace, healing: Healing, tokenizer: Any, dtype: torch.dtype) -> None:
    """Write the folder: an adapter in float32, or the checkpoint in its own type."""
    healed: Any = healing.adapter
    healed = healed if args.adapter or args.lora else healed.merge_and_unload().to(dtype)
    base, measured = hub_cards.hub_id_or_none(args.model), results(args, args.report)
    save = lambda stage: healed.save_pretrained(str(stage))
    write_checkpoint(
        args.output, save, tokenizer, {REPORT: args.report}, base_model=base, results=measured
    )
    print(f"\nwritten: {Path(args.output)}")
