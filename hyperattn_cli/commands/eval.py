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

from ..shared.adapters import find_base, is_adapter
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
    causal_config,
    check_request,
    is_patched,
    load_model,
    measure_both,
)
from ..shared.wrap import wrap_text

CHARACTERS = 64  # characters to read per token; texts have about 4
WINDOWS = 8  # windows of the text, without --tokens


def run(args: argparse.Namespace) -> None:
    """Measure and print; raise ValueError or OSError for bad input."""
    silence_transformers()
    config = causal_config(args.model)
    check_request(args, config, needs_patch=False)
    adapted = is_adapter(args.model)
    # Adapter folders need not hold a tokenizer.
    tokenizer = read_tokenizer(find_base(args.model) if adapted else args.model, args.model)
    prefix = prefix_of(tokenizer)
    window = window_of(config, args.length, 1024, len(prefix))
    # Read only as much of the text as its tokens can need.
    tokens = args.tokens or WINDOWS * window
    text, name = read_text(args.text, CHARACTERS * tokens)
    ids = encode_text(tokenizer, text, tokens, name)
    # A patched model is measured unpatched too, and an adapter without itself.
    passes = 2 if args.mechanism or adapted or is_patched(config) else 1
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
    before, after = measured.values()
    differences = [b - a for a, b in zip(before["windows"], after["windows"])]
    # The standard error of a mean needs two values at least.
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None
    difference = after["loss"] - before["loss"]
    return {
        "rows": measured,
        "difference": difference,
        "mean_of_windows": mean(differences),
        "standard_error": error,
    }


def print_result(report: dict[str, Any]) -> None:
    """Print the table, the difference and its uncertainty."""
    print(
        f"{Path(report['model']).name} reads {report['tokens']:,} tokens of {report['text']}, "
        f"in windows of {report['window']:,}.\n"
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
    print_table(("model", "perplexity", "loss (nats per token)", "tokens per second"), rows)
    print("\n" + wrap_text("", describe_difference(report)))


def describe_difference(report: dict[str, Any]) -> str:
    """Return sentences about the difference of the two rows, or why there is one row."""
    if report["difference"] is None:
        if OWN in report["rows"]:
            return "The model is not patched. To compare it with a patch, add --mechanism NAME."
        return "There is one row, because the checkpoint does not contain its original attention."
    _, name = report["rows"]
    windows = len(report["rows"][name]["windows"])
    change = report["difference"]
    error = report["standard_error"]
    sentence = (
        f"Perplexity changes by {math.expm1(change):+.2%} ({name}). The loss changes by {change:+.4f} nats "
        "per token"
    )
    if error is None:
        return f"{sentence}. One window was read, so the uncertainty is unknown."
    sentence += f", with a standard error of {error:.4f} over {windows} windows."
    if not change and not error:
        return f"{sentence} Both models compute the same: the gates of a fresh patch are 0."
    # Two standard errors: about 95 % of differences by chance are smaller.
    if abs(change) < 2 * error:
        return f"{sentence} That is less than two standard errors, so it may be chance."
    return sentence
