"""`hyperattn bench`: measure time and memory of a causal LM and its patch.

It also compares the logits and the generated tokens of both models.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from hf_hyperattn.analysis import (
    PeakMemory,
    max_logit_difference,
    measure_generation,
    next_token_logits,
)

from ..shared.console import ProgressBar, print_report, print_table, show_progress
from ..shared.inputs import positions_of, silence_transformers
from ..shared.models import OWN, PATCHED, causal_config, check_request, load_model, measure_both

COMPARED = 128  # tokens over which logits are compared
#: Random tokens are drawn from this id on: lower ids are mostly control tokens.
CONTROL = 16


def run(args: argparse.Namespace) -> None:
    """Measure and print; raise ValueError or OSError for bad input."""
    silence_transformers()
    config = causal_config(args.model)
    check_request(args, config, needs_patch=True)
    text_config: Any = config.get_text_config()
    positions = positions_of(config)
    if positions is not None and args.length + args.generate > positions:
        raise ValueError(
            f"--length {args.length} and --generate {args.generate} exceed what the model reads; allowed: "
            f"{positions} tokens together"
        )
    # A fixed seed, so that two runs measure the same prompt.
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(
        min(CONTROL, text_config.vocab_size - 1),
        text_config.vocab_size,
        (args.length,),
        generator=draw,
    )
    # For each of two models: one step for the warm-up, one for each repeat.
    with show_progress(2 * (args.repeats + 1)) as bar:
        bar.describe("loading")
        measured = measure_both(
            args, load_model(args), lambda model: measure_model(model, ids, args, bar)
        )
    report = {
        "model": args.model,
        "length": args.length,
        "generate": args.generate,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        **compare_models(measured),
    }
    print_report(args, report, print_result)


def measure_model(
    model: Any, ids: torch.Tensor, args: argparse.Namespace, bar: ProgressBar
) -> dict[str, Any]:
    """Measure time and memory of a model after a warm-up.

    Args:
        model: A causal LM.
        ids: Token ids of the prompt, shape [N].
        args: The command line.
        bar: Progress of the work.

    Returns:
        A dict with the seconds of prefill, the seconds per new token after the first (None if the
        model stops there), the peak memory in bytes, logits and greedy tokens.
    """
    bar.describe("measuring")
    # These two calls also warm up: kernels are compiled before anything is timed.
    logits = next_token_logits(model, ids[:COMPARED])
    measure_generation(model, ids.tolist(), 2)
    bar.advance(1)
    reading = []
    generating = []
    with PeakMemory(next(model.parameters()).device) as memory:
        for _ in range(args.repeats):
            reading.append(time_prefill(model, ids))
            generation = measure_generation(model, ids.tolist(), args.generate)
            # Generation includes a prefill; the difference is the time of the new tokens only.
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
def time_prefill(model: Any, ids: torch.Tensor) -> float:
    """Time prefill of `ids` with a cache, in seconds.

    Logits are computed for the last token only, as `generate` does.
    """
    device = next(model.parameters()).device
    start = time.perf_counter()
    out = model(ids[None].to(device), use_cache=True, logits_to_keep=1)
    # Reading a value waits for the GPU, which runs asynchronously.
    out.logits[0, -1].argmax().item()
    return time.perf_counter() - start


def compare_models(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the measurements without logits, and how far both models differ.

    The differences are None if only one model was measured.
    """
    # Logits are too large for the report.
    logits = [row.pop("logits") for row in measured.values()]
    if len(measured) < 2:
        return {"rows": measured, "logit_difference": None, "same_tokens": None}
    pairs = list(zip(measured[OWN]["tokens"], measured[PATCHED]["tokens"]))
    # Greedy decoding diverges for good after the first different token, so count the tokens
    # before it.
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return {
        "rows": measured,
        "logit_difference": max_logit_difference(*logits),
        "same_tokens": same,
    }


def print_result(report: dict[str, Any]) -> None:
    """Print the table and the comparison of outputs."""
    print(
        f"{Path(report['model']).name}: {report['length']:,} random tokens, {report['generate']} new ones, "
        f"{report['dtype']}, {report['threads']} threads\n"
    )
    # Ratios are relative to the first row, the model's own attention if it was measured.
    first = next(iter(report["rows"].values()))
    new = {name: row["seconds_a_new_token"] for name, row in report["rows"].items()}
    new_of_first = first["seconds_a_new_token"]
    rows = []
    for name, row in report["rows"].items():
        has_ratio = None not in (new[name], new_of_first)
        rows.append(
            [
                name,
                f"{row['prefill_seconds']:.3f} s",
                f"{report['length'] / row['prefill_seconds']:,.0f}",
                "none" if new[name] is None else f"{1e3 * new[name]:.1f} ms",
                f"{row['peak_memory'] / 2**20:,.0f} MiB",
                f"x {row['prefill_seconds'] / first['prefill_seconds']:.2f}",
                # A generation shorter than the timer's resolution has time 0.
                f"x {new[name] / max(new_of_first, 1e-9):.2f}" if has_ratio else "",
            ]
        )
    print_table(
        ("attention", "prefill", "tokens/s", "a new token", "peak memory", "prefill", "new token"),
        rows,
    )
    if None in new.values():
        print("\nnone: one token came, and none after it; the model ends there on random tokens")
    if report["logit_difference"] is None:
        print("\nOutputs not compared: the checkpoint does not contain its original attention")
        return
    print(
        f"\nmax |Δ logit| {report['logit_difference']:.1e}; the first {report['same_tokens']} of "
        f"{len(first['tokens'])} greedy tokens are the same"
    )
