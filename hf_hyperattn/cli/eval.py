"""`hyperattn eval`: the perplexity of a causal LM on a text, with its own attention and patched."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ..analysis import perplexity
from .console import ProgressBar, output, progress, table
from .inputs import encode, prefix_of, quiet, read_text, read_tokenizer, window_of
from .models import OWN, PATCHED, causal_config, check_request, is_patched, load, measure_both

CHARACTERS = 64  # of the text are read for a token; texts have about 4
WINDOWS = 8  # of the text are read without --tokens


def run(args: argparse.Namespace) -> None:
    """Measure and print; raises ValueError or OSError for bad input."""
    quiet()
    config = causal_config(args.model)
    check_request(args, config, needs_patch=False)
    tokenizer = read_tokenizer(args.model, args.model)
    prefix = prefix_of(tokenizer)
    window = window_of(config, args.length, 1024, len(prefix))
    tokens = args.tokens or WINDOWS * window
    text, name = read_text(args.text, CHARACTERS * tokens)
    ids = encode(tokenizer, text, tokens, name)
    passes = 2 if args.mechanism or is_patched(config) else 1
    with progress(passes * len(ids)) as bar:
        bar.describe("loading")
        measured = measure_both(
            args, load(args), lambda model: read(model, ids, window, prefix, bar)
        )
    report = {
        "model": args.model,
        "text": name,
        "tokens": len(ids),
        "window": window,
        **summary(measured),
    }
    output(args, report, show)


def read(
    model: Any, ids: list[int], window: int, prefix: list[int], bar: ProgressBar
) -> dict[str, Any]:
    """Perplexity, loss in nats, speed, and the loss of every whole window."""
    bar.describe("reading")
    read = perplexity(model, ids, window, prefix=prefix, on_window=bar.advance)
    whole = list(
        read.by_window[: max(1, len(ids) // window)]
    )  # a short last one would count as much
    speed = read.tokens_per_second
    return {
        "perplexity": read.value,
        "loss": read.loss,
        "tokens_per_second": speed,
        "windows": whole,
    }


def summary(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What was measured of each, and patched less own: nats a token, and its standard error over whole windows."""
    if len(measured) < 2:
        return {"rows": measured, "difference": None, "standard_error": None}
    differences = [b - a for a, b in zip(measured[OWN]["windows"], measured[PATCHED]["windows"])]
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None
    difference = measured[PATCHED]["loss"] - measured[OWN]["loss"]
    return {
        "rows": measured,
        "difference": difference,
        "mean_of_windows": mean(differences),
        "standard_error": error,
    }


def show(report: dict[str, Any]) -> None:
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
    table(("attention", "perplexity", "nats a token", "tokens/s"), rows)
    if report["difference"] is None:
        print(
            "\nOne row: the model has one attention; --mechanism patches another in"
            if OWN in report["rows"]
            else "\nOne row: it was converted or saved so that its original is not in it"
        )
        return
    error = report["standard_error"]
    sure = (
        "one window, no error known"
        if error is None
        else f"standard error {error:.4f} over windows"
    )
    print(
        f"\nPatched less own: {report['difference']:+.4f} nats a token ({sure}), "
        f"perplexity {math.expm1(report['difference']):+.2%}"
    )
