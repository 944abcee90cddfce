"""Measure a real model with its own attention, with cone attention patched in and in its place, and with tied keys.

Without --model: SmolLM2-135M-Instruct from the package index, converted once into a cache folder
($HF_HYPERATTN_CACHE, else hf_hyperattn in the user's cache).
"""

from __future__ import annotations

import argparse

from .command import check_count
from .console import progress, table

HELP = "measure a real model with stock, patched and replaced attention"
HEADER = ("attention", "perplexity", "prefill tok/s", "generate tok/s", "peak memory", "max |Δ logit|")
ADVICE = """\
"cone, patched in" adds the cone score behind gates that start at 0: the model is still the stock model,
and training moves the gates. "cone, replaced" computes every attention by the cone formula, with weights
that were trained for dot products: without training this loses the model's quality, as its perplexity and
its text show. To keep the quality, patch and train:
    accelerate launch recipes/finetune.py --config recipes/smollm2/cone_lora.yaml
and use attn_implementation="cone" for models that were trained with it.
"hsa" ties distant keys to the means of their windows, without training. "injected": with the settings that
were found for each head at 2,048 or 8,192 tokens; find them for your model and texts:
    hyperattn inject MODEL --mechanism hsa --text FILE --budget 0.02 --output DIR"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `hyperattn demo`."""
    add = parser.add_argument
    add("--model", metavar="HUB_ID_OR_DIR", help="any causal LM (default: SmolLM2-135M-Instruct)")
    add("--text", metavar="FILE", help="UTF-8 text to measure on (default: argparse.py of this Python)")
    add("--length", type=int, metavar="N", help="tokens a window (default: 1024, or the model's limit)")
    add("--tokens", type=int, metavar="N", help="tokens of the text (default: two windows, one above 2048)")
    add("--generate", type=int, default=32, metavar="N", help="new tokens (default: 32)")
    add("--prompt", default="The capital of France is", help="text to continue")
    add("--device", default="auto", help="torch device (default: cuda where there is one, else cpu)")


def run(args: argparse.Namespace) -> None:
    """Measure and print; raises ValueError or OSError for bad input."""
    _check(args)
    from .demo_rows import measure, steps
    from .demo_setting import prepare

    setting = prepare(args)
    print(setting.title(), flush=True)
    with progress(steps(setting)) as bar:
        rows = measure(setting, bar)
    print()
    table(HEADER, [row.cells() for row in rows])
    print(f'\n"{args.prompt}" goes on, greedily:')
    width = max(len(row.label) for row in rows)
    for row in rows:
        print(f"  {row.label.ljust(width)}  {row.text!r}")
    print(f"\n{ADVICE}")


def _check(args: argparse.Namespace) -> None:
    for name, least in (("length", 2), ("tokens", 32), ("generate", 1)):
        value = getattr(args, name)
        if value is not None:
            check_count(name, value, least)
    if not args.prompt.strip():
        raise ValueError("--prompt is empty; allowed: any text")
