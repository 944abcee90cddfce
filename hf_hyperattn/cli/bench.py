"""`hyperattn bench`: time and memory of a causal LM with its own attention and patched, and whether they agree."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from ..analysis import PeakMemory, max_logit_difference, measure_generation, next_token_logits
from .console import ProgressBar, output, progress, table
from .inputs import positions_of, quiet
from .models import OWN, PATCHED, causal_config, check_request, load, measure_both

COMPARED = 128  # tokens over which logits are compared
#: Of tokens that random ones are not drawn from: control tokens mostly stand there.
CONTROL = 16


def run(args: argparse.Namespace) -> None:
    """Measure and print; raises ValueError or OSError for bad input."""
    quiet()
    config = causal_config(args.model)
    check_request(args, config, needs_patch=True)
    text_config: Any = config.get_text_config()
    positions = positions_of(config)
    if positions is not None and args.length + args.generate > positions:
        raise ValueError(
            f"--length {args.length} and --generate {args.generate} exceed what the model reads; allowed: "
            f"{positions} tokens together"
        )
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(
        min(CONTROL, text_config.vocab_size - 1),
        text_config.vocab_size,
        (args.length,),
        generator=draw,
    )
    with progress(2 * (args.repeats + 1)) as bar:
        bar.describe("loading")
        measured = measure_both(args, load(args), lambda model: measure(model, ids, args, bar))
    report = {
        "model": args.model,
        "length": args.length,
        "generate": args.generate,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        **compared(measured),
    }
    output(args, report, show)


def measure(
    model: Any, ids: torch.Tensor, args: argparse.Namespace, bar: ProgressBar
) -> dict[str, Any]:
    """Seconds of reading and of each new token after the first, None where the model stops at that; peak memory in
    bytes, logits and greedy tokens. After a warm-up.
    """
    bar.describe("measuring")
    logits = next_token_logits(model, ids[:COMPARED])
    measure_generation(model, ids.tolist(), 2)
    bar.advance(1)
    reading, generating = [], []
    with PeakMemory(next(model.parameters()).device) as memory:
        for _ in range(args.repeats):
            reading.append(prefill(model, ids))
            generation = measure_generation(model, ids.tolist(), args.generate)
            generating.append(max(generation.seconds - reading[-1], 0.0))
            bar.advance(1)
    later = len(generation.ids) - 1
    return {
        "prefill_seconds": min(reading),
        "seconds_a_new_token": min(generating) / later if later else None,
        "peak_memory": memory.peak,
        "logits": logits,
        "tokens": list(generation.ids),
    }


@torch.inference_mode()
def prefill(model: Any, ids: torch.Tensor) -> float:
    """Seconds of reading `ids` [N] with a cache, logits of the last token alone, as `generate` begins."""
    device = next(model.parameters()).device
    start = time.perf_counter()
    out = model(ids[None].to(device), use_cache=True, logits_to_keep=1)
    out.logits[0, -1].argmax().item()  # waits for a GPU
    return time.perf_counter() - start


def compared(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What was measured, without logits, and how far both are apart; None where there is one alone."""
    logits = [row.pop("logits") for row in measured.values()]
    if len(measured) < 2:
        return {"rows": measured, "logit_difference": None, "same_tokens": None}
    pairs = list(zip(measured[OWN]["tokens"], measured[PATCHED]["tokens"]))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return {
        "rows": measured,
        "logit_difference": max_logit_difference(*logits),
        "same_tokens": same,
    }


def show(report: dict[str, Any]) -> None:
    """Print the table and the match."""
    print(
        f"{Path(report['model']).name}: {report['length']:,} random tokens, {report['generate']} new ones, "
        f"{report['dtype']}, {report['threads']} threads\n"
    )
    first = next(iter(report["rows"].values()))
    new, of_first = (
        {n: row["seconds_a_new_token"] for n, row in report["rows"].items()},
        first["seconds_a_new_token"],
    )
    rows = [
        [
            name,
            f"{row['prefill_seconds']:.3f} s",
            f"{report['length'] / row['prefill_seconds']:,.0f}",
            "none" if new[name] is None else f"{1e3 * new[name]:.1f} ms",
            f"{row['peak_memory'] / 2**20:,.0f} MiB",
            f"x {row['prefill_seconds'] / first['prefill_seconds']:.2f}",
            "" if None in (new[name], of_first) else f"x {new[name] / max(of_first, 1e-9):.2f}",
        ]
        for name, row in report["rows"].items()
    ]
    table(
        ("attention", "prefill", "tokens/s", "a new token", "peak memory", "prefill", "new token"),
        rows,
    )
    if None in new.values():
        print("\nnone: one token came, and none after it; the model ends there on random tokens")
    if report["logit_difference"] is None:
        print("\nno match checked: its original is not in the checkpoint")
        return
    print(
        f"\nmax |Δ logit| {report['logit_difference']:.1e}; the first {report['same_tokens']} of "
        f"{len(first['tokens'])} greedy tokens are the same"
    )
