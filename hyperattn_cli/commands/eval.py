"""`hyperattn eval`: measure the perplexity of a causal LM and its patch.

The difference is reported with its standard error over windows.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hf_hyperattn.analysis import perplexity

from ..shared.console import ProgressBar, print_report, print_table, show_progress
from ..shared.inputs import (
    encode_text,
    prefix_of,
    read_text,
    read_tokenizer,
    silence_transformers,
    window_of,
)
from ..shared.models import (
    OWN,
    PATCHED,
    causal_config,
    check_request,
    is_patched,
    load_model,
    measure_both,
)

CHARACTERS = 64  # characters to read per token; texts have about 4
WINDOWS = 8  # windows of the text, without --tokens


def run(args: argparse.Namespace) -> None:
    """Measure and print; raise ValueError or OSError for bad input."""
    silence_transformers()
    config = causal_config(args.model)
    check_request(args, config, needs_patch=False)
    tokenizer = read_tokenizer(args.model, args.model)
    prefix = prefix_of(tokenizer)
    window = window_of(config, args.length, 1024, len(prefix))
    # Read only as much of the text as its tokens can need.
    tokens = args.tokens or WINDOWS * window
    text, name = read_text(args.text, CHARACTERS * tokens)
    ids = encode_text(tokenizer, text, tokens, name)
    # A patched model is measured unpatched too.
    passes = 2 if args.mechanism or is_patched(config) else 1
    with show_progress(passes * len(ids)) as bar:
        bar.describe("loading")
        measured = measure_both(
            args, load_model(args), lambda model: measure_model(model, ids, window, prefix, bar)
        )
    report = {
        "model": args.model,
        "text": name,
        "tokens": len(ids),
        "window": window,
        **summarize_models(measured),
    }
    print_report(args, report, print_result)


def measure_model(
    model: Any, ids: list[int], window: int, prefix: list[int], bar: ProgressBar
) -> dict[str, Any]:
    """Measure perplexity, loss in nats, speed, and the loss of every whole window."""
    bar.describe("reading")
    result = perplexity(model, ids, window, prefix=prefix, on_window=bar.advance)
    # A short last window would weigh as much as the others in the standard error, so leave it out.
    whole = list(result.by_window[: max(1, len(ids) // window)])
    return {
        "perplexity": result.value,
        "loss": result.loss,
        "tokens_per_second": result.tokens_per_second,
        "windows": whole,
    }


def summarize_models(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the measurements, and the difference patched minus own in nats per token.

    The standard error is over whole windows. It is None for one window, and the difference is None
    for one model.
    """
    if len(measured) < 2:
        return {"rows": measured, "difference": None, "standard_error": None}
    # Windows are paired, so that the difficulty of a window cancels.
    differences = [b - a for a, b in zip(measured[OWN]["windows"], measured[PATCHED]["windows"])]
    # The standard error of a mean needs two values at least.
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None
    difference = measured[PATCHED]["loss"] - measured[OWN]["loss"]
    return {
        "rows": measured,
        "difference": difference,
        "mean_of_windows": mean(differences),
        "standard_error": error,
    }


def print_result(report: dict[str, Any]) -> None:
    """Print the table and the difference."""
    print(
        f"{Path(report['model']).name}: {report['text']}, {report['tokens']:,} tokens, context {report['window']:,}\n"
    )
    rows = [
        [
            name,
            f"{row['perplexity']:,.3f}",
            f"{row['loss']:.4f}",
            f"{row['tokens_per_second']:,.0f}",
        ]
        for name, row in report["rows"].items()
    ]
    print_table(("attention", "perplexity", "nats a token", "tokens/s"), rows)
    if report["difference"] is None:
        if OWN in report["rows"]:
            print("\nOne row: the model has one attention; --mechanism patches another in")
        else:
            print("\nOne row: the checkpoint does not contain its original attention")
        return
    error = report["standard_error"]
    uncertainty = "one window, no error known"
    if error is not None:
        uncertainty = f"standard error {error:.4f} over windows"
    print(
        f"\nPatched less own: {report['difference']:+.4f} nats a token ({uncertainty}), "
        f"perplexity {math.expm1(report['difference']):+.2%}"
    )
