"""`hyperattn heal`: distil the original model into its injected version.

This module checks the input, shows the losses before and after `inject.heal`, and writes an adapter
or a checkpoint.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hub_cards
from hf_hyperattn.inject.heal import Healing, Losses
from hf_hyperattn.integration.loading.checkpoint_files import class_of, errors_as, load_config
from hf_hyperattn.integration.patching.checkpoint_config import recorded_hosts
from hf_hyperattn.utils.files import parts_of
from hf_hyperattn.utils.folders import check_replaceable

from ..shared.console import print_table, run_with_report, show_progress
from ..shared.inputs import (
    check_place,
    encode_text,
    prefix_of,
    read_text,
    read_tokenizer,
    silence_transformers,
    window_of,
    write_checkpoint,
)
from ..shared.models import device_of
from .inject_task import CHARACTERS, dtype_of, is_causal, list_results

REPORT = "hyperattn_heal.json"
#: Suffix of the file next to the output folder that holds the state of an unfinished run.
STATE = ".heal-state.safetensors"


def run(args: argparse.Namespace) -> int:
    """Heal, show and write; return 1 if the held-out texts do not improve."""
    return run_with_report(heal_model, args)


def heal_model(args: argparse.Namespace) -> int:
    """Heal, show and write; `args.report` gets the measurements."""
    state = check_options(args)
    silence_transformers()
    config = load_config(args.model, args.model)
    # Only a patched model has a teacher: itself without the patch.
    if recorded_hosts(config) is None or not is_causal(args.model, config):
        raise ValueError(
            f"{args.model}: not a patched causal LM; allowed: one, such as `hyperattn inject` writes"
        )
    tokenizer = read_tokenizer(args.model, args.model)
    # By default, train at the length for which the patch was chosen.
    length = window_of(config, args.length, max(find_tuned_lengths(config.hyperattn), default=2048))
    texts = read_texts(args, tokenizer, length)
    with errors_as(f"{args.model}: cannot load it"):
        model = class_of(config).from_pretrained(args.model, dtype=torch.float32).eval()
    model.to(device_of(args.device))
    healing = make_healing(args, model, texts, length, prefix_of(tokenizer))
    count = sum(p.numel() for p in healing.trained().values())
    print(
        f"{Path(args.model).name}: {count:,} trainable parameters, {args.steps} steps of {length:,} tokens, seed "
        f"{args.seed}\nTexts: {', '.join(texts)}",
        flush=True,
    )
    limit = max_tokens(args, length)
    for name in (name for name, ids in texts.items() if len(ids) == limit):
        print(f"{name}: only its first {limit:,} tokens are used; {args.steps} steps read no more")
    # Measure before training: the held-out loss must improve for the result to be written.
    before = healing.held_out()
    # Only now is all input known to be good, so that --force may delete an interrupted run.
    if not args.resume:
        state.unlink(missing_ok=True)
    with show_progress(args.steps) as bar:
        bar.describe("learning")
        # A resumed run begins with the losses of its first part, so the bar jumps ahead.
        healing.run(state, args.save_every, lambda _: bar.advance(len(healing.losses) - bar.n))
    after = healing.held_out()
    show_losses(before, after)
    args.report = build_report(args, healing, before, after)
    # KL to the original model is the training target, so it also decides.
    if sum(kl for *_, kl in after.values()) >= sum(kl for *_, kl in before.values()):
        print(
            "\nthe held-out texts gain nothing: nothing is written; use more or other text, or lower rates"
        )
        # Resuming from the end of this run would gain nothing again.
        state.unlink(missing_ok=True)
        return 1
    write_result(args, healing, tokenizer, dtype_of(config))
    state.unlink(missing_ok=True)
    return 0


def make_healing(
    args: argparse.Namespace,
    model: Any,
    texts: dict[str, Tensor],
    length: int,
    prefix: list[int],
) -> Healing:
    """Build the distillation from the options."""
    return Healing(
        model=model,
        texts=texts,
        length=length,
        steps=args.steps,
        rank=args.lora or 0,
        lr=args.lr,
        patch_lr=args.patch_lr,
        seed=args.seed,
        prefix=prefix,
        bf16=args.bf16,
    )


def check_options(args: argparse.Namespace) -> Path:
    """Check the options before anything is read.

    Returns:
        The file that holds the state while the run is unfinished.

    Raises:
        ValueError: The output folder cannot be replaced, or an interrupted run would be lost.
    """
    target = Path(args.output).absolute()
    check_place("--output", args.output)
    check_replaceable(target, args.force, args.model)
    state = target.with_name(target.name + STATE)
    if state.exists() and not args.resume and not args.force:
        raise ValueError(
            f"{state} holds an interrupted run; allowed: --resume to go on, --force to begin anew"
        )
    return state


def find_tuned_lengths(record: Any) -> Iterator[int]:
    """Yield the lengths that a patch was tuned for, from any depth of its record."""
    if isinstance(record, dict) and isinstance(record.get("tuned_length"), int):
        yield record["tuned_length"]
    for part in parts_of(record):
        yield from find_tuned_lengths(part)


def max_tokens(args: argparse.Namespace, length: int) -> int:
    """Return the number of tokens of a text that are used at most.

    They are one window per step, one held-out window, and one so that windows can start anywhere.
    """
    return (args.steps + 2) * length


def read_texts(args: argparse.Namespace, tokenizer: Any, length: int) -> dict[str, Tensor]:
    """Return the token ids of every text, truncated to `max_tokens`."""
    texts = {}
    tokens = max_tokens(args, length)
    for path in args.text:
        text, name = read_text(path, CHARACTERS * tokens)
        texts[name] = torch.tensor(encode_text(tokenizer, text, tokens, name))
    # Texts are reported by name, so names must differ.
    if len(texts) < len(args.text):
        raise ValueError(
            f"--text {' '.join(args.text)}: two files of one name; allowed: texts of different names"
        )
    return texts


def show_losses(before: Losses, after: Losses) -> None:
    """Print the losses on the held-out parts."""
    print("\nHeld-out text, perplexity, and KL from the untouched model in nats a token:")
    rows = []
    for name, (own, injected, kl) in before.items():
        _, healed, healed_kl = after[name]
        rows.append(
            [
                name,
                f"{math.exp(own):.3f}",
                format_perplexity(injected, own),
                format_perplexity(healed, own),
                f"{kl:.5f}",
                f"{healed_kl:.5f}",
            ]
        )
    print_table(("text", "untouched", "injected", "healed", "KL injected", "KL healed"), rows)


def format_perplexity(loss: float, own: float) -> str:
    """Return the perplexity of a loss, and its difference from the loss `own`."""
    return f"{math.exp(loss):.3f} ({math.expm1(loss - own):+.2%})"


def build_report(
    args: argparse.Namespace, healing: Healing, before: Losses, after: Losses
) -> dict[str, Any]:
    """Return the measurements as plain data."""
    texts = {
        name: {
            "before": math.exp(own),
            "after": math.exp(after[name][1]),
            "injected": math.exp(injected),
            "kl_injected": kl,
            "kl": after[name][2],
        }
        for name, (own, injected, kl) in before.items()
    }
    half = ", in bfloat16" if args.bf16 else ""
    notes = f"{healing.length} tokens, {args.steps} steps of distillation from the untouched model{half}."
    return {"metric": "perplexity", "notes": notes, "texts": texts, "losses": healing.losses}


def write_result(
    args: argparse.Namespace, healing: Healing, tokenizer: Any, dtype: torch.dtype
) -> None:
    """Write the folder: an adapter in float32, or the checkpoint in its own dtype."""
    healed: Any = healing.adapter
    # Without LoRA, all trained parameters belong to the patch and can be saved with it.
    if not (args.adapter or args.lora):
        healed = healed.merge_and_unload().to(dtype)
    base = hub_cards.hub_id_or_none(args.model)
    measured = list_results(args, args.report)
    save = lambda stage: healed.save_pretrained(str(stage))
    write_checkpoint(
        args.output, save, tokenizer, {REPORT: args.report}, base_model=base, results=measured
    )
    print(f"\nwritten: {Path(args.output)}")
