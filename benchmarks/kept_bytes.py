"""Compare sparse rules with the presses of kvpress, at the same bytes of cache, on SmolLM2-135M.

    make kvpress                                  # environments, measurements, table; again until all is done
    python benchmarks/kept_bytes.py --kvpress PYTHON --shares 0.3 0.1 --minutes 30
    python benchmarks/kept_bytes.py --draw        # the tables of docs/results/kvpress.md

A context of 6,144 tokens is read and its cache compressed. The next 1,024 tokens are then predicted.
The presses run by kvpress's own code, under another Python (`frontiers/presses.py`). The sparse rules
are windows chosen by head for a share of the bytes, as `hyperattn inject --cost bytes` chooses them
without its corrections, and run with `HierarchicalCache(evict=True)`. No text here has a part in any
choice. Two more examples hide needles, variables and classified words in the context.

Every cell (method, share, text) is kept in benchmarks/results/kvpress.json, and not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import cpu, environment, write_json
from frontiers.cells import ROOT, Cell
from frontiers.choices import KEY_HEADS, Choices, held_out_texts, measured_texts, plain, tokens_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_hyperattn as ha
from hf_hyperattn.inject import Allocation, choose, retrieval
from hf_hyperattn.inject.gradients import head_of
from hyperattn_cli.shared.smollm2 import smollm2

RESULTS = ROOT / "benchmarks" / "results" / "kvpress.json"
PAGE = ROOT / "docs" / "results" / "kvpress.md"
#: The script for the other Python.
PRESSES = Path(__file__).parent / "frontiers" / "presses.py"
#: Tokens of the context, and tokens that are predicted after it.
CONTEXT, PREDICTED = 6144, 1024
#: Length that the losses of rules were measured at.
MEASURED = 8192
#: Shares of the bytes, the most informative first.
SHARES = (0.3, 0.1, 0.2, 0.5)
#: Names of rows, as `frontiers/presses.py` has them; it cannot be imported without kvpress.
FULL, OURS = "full cache", "windows by head"
METHODS = (
    "StreamingLLM",
    "SnapKV",
    "ExpectedAttention",
    "AdaKV, SnapKV",
    "DuoAttention on the fly",
    "KVzip",
)
#: Names of the examples of retrieval begin with this.
NEEDLES = "needles"
#: Tokens of an example of retrieval, and of its first question, which is read after the context.
NEEDLES_LENGTH, QUESTION = 6800, 48
#: Passages on which kvpress scores heads for DuoAttention, and their characters. kvpress takes 50
#: chapters of BookSum, which need a download.
PASSAGES, PASSAGE = 50, 2000


def read_german() -> str:
    """Return the German edition of Debian's handbook."""
    from experiments.debian import unpacked

    folder = unpacked(("debian-handbook",)) / "usr/share/doc/debian-handbook/html/de-DE"
    return "\n\n".join(plain(file.read_text()) for file in sorted(folder.glob("*.html")))


def make_items(tokenizer: Any) -> list[dict[str, Any]]:
    """Return name, token ids, length of the context and answer spans of every text and example."""
    texts = held_out_texts()  # Adds `recipes` to the path, which `read_german` needs.
    texts = {"essay": texts.pop("essay"), "German": read_german(), **texts}
    ids_of = tokens_of(tokenizer, texts, 20_000, MEASURED)
    items: list[dict[str, Any]] = []
    for name, ids in ids_of.items():
        ids = ids[: CONTEXT + PREDICTED]
        # The first token after the context is predicted by the context's last one, with all keys.
        items.append(make_item(name, ids, CONTEXT, [(CONTEXT + 1, len(ids))]))
    for number, name in enumerate(("essay", "code")):
        example = retrieval.mixture(tokenizer, ids_of[name], NEEDLES_LENGTH, seed=300 + number)
        if example is None:
            raise SystemExit(f"{NEEDLES_LENGTH} tokens hold no needle; allowed: more tokens")
        context = example.spans[0][0] - QUESTION
        item = make_item(f"{NEEDLES}, {name}", example.ids, context, list(example.spans))
        items.insert(3 + 4 * number, item)
    return items


def make_item(
    name: str, ids: torch.Tensor, context: int, spans: list[tuple[int, int]]
) -> dict[str, Any]:
    """Return one item as JSON can hold it."""
    return {
        "name": name,
        "ids": ids.tolist(),
        "context": context,
        "spans": [list(span) for span in spans],
    }


def make_passages() -> list[str]:
    """Return passages of the texts that rules were measured on, for DuoAttention's head scores."""
    texts = list(measured_texts().values())
    return [
        texts[i % len(texts)][600_000 + i * PASSAGE : 600_000 + (i + 1) * PASSAGE]
        for i in range(PASSAGES)
    ]


def allocate_bytes(share: float) -> Allocation:
    """Choose a window or exact attention for every head, at this share of the cache's bytes."""
    choices = Choices(MEASURED)
    # Under all other rules a head keeps every key, so only windows save bytes.
    index = choices.rules_of(Cell(MEASURED, "sinks and window", "by head", share))
    losses = choices.losses(index)
    made = choose(
        [choices.rules[i] for i in index],
        losses,
        CONTEXT,
        pairs=share,
        cost="bytes",
        key_heads=dict.fromkeys(losses, KEY_HEADS),
    )
    # The bytes are counted at the context's length. The rules hold up to the measured length.
    return replace(made, length=MEASURED)


@torch.no_grad()
def measure_item(model: Any, item: dict[str, Any]) -> dict[str, Any]:
    """Read the context of an item with an evicting cache, and score what follows.

    Returns:
        Nats per scored token, the share of right answers, the share of keys that the cache holds
        after the context, and seconds.
    """
    start = time.process_time()
    ids, context = torch.tensor(item["ids"]), item["context"]
    cache = ha.HierarchicalCache(model, evict=True)
    model.base_model(ids[None, :context], past_key_values=cache, use_cache=True)
    kept = share_held(cache, context)
    after = model.base_model(ids[None, context:], past_key_values=cache, use_cache=True)
    hidden = after.last_hidden_state[0]
    moved = tuple((a - context, b - context) for a, b in item["spans"])
    example = retrieval.Example(task="", ids=ids[context:], spans=moved)
    score = retrieval.score_hidden(hidden, head_of(model, ids), example)
    seconds = time.process_time() - start
    return {"kept": kept, "nats": score.nats, "exact": score.exact, "seconds": seconds}


def share_held(cache: ha.HierarchicalCache, context: int) -> float:
    """Return the share of the context's keys that a cache holds."""
    held = total = 0
    for layer in cache.layers:
        for part in layer.store.parts:
            heads = len(part.heads)
            total += heads * context
            held += heads * part.tokens[0].view().shape[2]
    return held / total


def read_results() -> dict[str, Any]:
    """Return what was measured."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}


def key_of(method: str, share: float) -> str:
    """Return the name of a row in the file of results."""
    return f"{method}/{share:g}"


def measure_rules(items: list[dict[str, Any]], shares: list[float], until: float) -> None:
    """Measure the sparse rules on every item that lacks them."""
    model = None
    for share in shares:
        done = read_results()["cells"].get(key_of(OURS, share), {})
        left = [item for item in items if item["name"] not in done]
        if not left or time.monotonic() > until:
            continue
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()
        ha.patch_model(model, allocate_bytes(share).config())
        try:
            for item in left:
                if time.monotonic() > until:
                    break
                found = measure_item(model, item)
                result = read_results()
                result["cells"].setdefault(key_of(OURS, share), {})[item["name"]] = found
                write_json(str(RESULTS), {**result, "environment": {**environment(), "cpu": cpu()}})
                print(item["name"], OURS, share, found, flush=True)
        finally:
            ha.unpatch_model(model)


def run_presses(
    python: str, items: list[dict[str, Any]], shares: list[float], minutes: float, threads: int
) -> None:
    """Measure kvpress's presses under their own Python.

    Raises:
        SystemExit: The other process failed.
    """
    # KVzip and DuoAttention read more texts first, so they come last.
    cells = [(FULL, 1.0), *((method, share) for method in METHODS for share in shares)]
    work = {
        "model": str(smollm2()),
        "items": items,
        "cells": cells,
        "passages": make_passages(),
        "minutes": minutes,
        "threads": threads,
    }
    if not RESULTS.exists():
        write_json(str(RESULTS), read_results())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.json"
        file.write_text(json.dumps(work))
        done = subprocess.run([python, str(PRESSES), str(file), str(RESULTS)])
    if done.returncode:
        raise SystemExit(f"{PRESSES.name} ended with {done.returncode} under {python}; see above")


def rise_of(result: dict[str, Any], method: str, share: float, name: str) -> float | None:
    """Return how much larger the perplexity is than with the full cache; None: not run."""
    full = result["cells"].get(key_of(FULL, 1.0), {}).get(name)
    found = result["cells"].get(key_of(method, share), {}).get(name)
    if full is None or found is None or "nats" not in found:
        return None
    return math.expm1(found["nats"] - full["nats"])


def table_of(result: dict[str, Any], share: float) -> str:
    """Return a Markdown table of one share; rows with a smaller mean come first."""
    if not any(key_of(method, share) in result["cells"] for method in (OURS, *METHODS)):
        return "Not run."
    full = result["cells"].get(key_of(FULL, 1.0), {})
    texts = [name for name in full if not name.startswith(NEEDLES)]
    needles = [name for name in full if name.startswith(NEEDLES)]
    rows = [row_of(result, method, share, texts, needles) for method in (OURS, *METHODS)]
    head = ["method", "kept", "mean ± deviation", *texts, *needles, "right answers"]
    base = [FULL, "100.0%", *[""] * (len(head) - 3), describe_right(full, needles)]
    lines = [head, ["---"] * len(head), base, *(cells for _, cells in sorted(rows))]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def row_of(
    result: dict[str, Any], method: str, share: float, texts: list[str], needles: list[str]
) -> tuple[float, list[str]]:
    """Return the mean rise of a row (infinite: not all texts were run), and its cells."""
    cell = result["cells"].get(key_of(method, share), {})
    rises = {name: rise_of(result, method, share, name) for name in (*texts, *needles)}
    of_texts = [rise for name in texts if (rise := rises[name]) is not None]
    is_whole = bool(texts) and len(of_texts) == len(texts)
    kept = [cell[name]["kept"] for name in texts if name in cell]
    cells = [
        method,
        f"{statistics.mean(kept):.1%}" if kept else "not run",
        describe_mean(of_texts) if is_whole else "not run",
        *(describe_rise(cell.get(name), rise) for name, rise in rises.items()),
        describe_right(cell, needles),
    ]
    return statistics.mean(of_texts) if is_whole else math.inf, cells


def describe_right(cell: dict[str, Any], needles: list[str]) -> str:
    """Return the share of the answers that greedy decoding gives, over the examples that were run."""
    right = [cell[name]["exact"] for name in needles if "exact" in cell.get(name, {})]
    return f"{statistics.mean(right):.0%}" if right else "not run"


def describe_rise(found: dict[str, Any] | None, rise: float | None) -> str:
    """Return the text of one cell."""
    if found is not None and "failed" in found:
        return "no fake key"
    return "not run" if rise is None else f"{rise:+.1%}"


def describe_mean(rises: list[float]) -> str:
    """Return mean and deviation between texts."""
    spread = f" ± {statistics.stdev(rises):.1%}" if len(rises) > 1 else ""
    return f"{statistics.mean(rises):+.1%}{spread}"


def draw_tables(result: dict[str, Any]) -> None:
    """Write the tables into the page."""
    text = PAGE.read_text()
    shares = sorted(SHARES, reverse=True)
    parts = [
        f"**{100 * share:.0f} % of the bytes**\n\n{table_of(result, share)}" for share in shares
    ]
    begin, end = "<!-- kvpress -->", "<!-- /kvpress -->"
    body = "\n\n".join(parts)
    PAGE.write_text(f"{text.split(begin)[0]}{begin}\n{body}\n{end}{text.split(end)[1]}")


def main(words: list[str] | None = None) -> None:
    """Read the command line, measure, write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kvpress", metavar="PYTHON", help="a Python that has kvpress 0.5.5")
    parser.add_argument("--shares", type=float, nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument(
        "--texts", type=int, default=8, help="the first of eight items (default: 8)"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing new after this")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--draw", action="store_true", help="only write the tables")
    args = parser.parse_args(words)
    if not args.draw:
        torch.set_num_threads(args.threads)
        until = time.monotonic() + 60 * args.minutes
        items = make_items(AutoTokenizer.from_pretrained(smollm2()))[: args.texts]
        measure_rules(items, args.shares, until)
        if args.kvpress:
            left = (until - time.monotonic()) / 60
            run_presses(args.kvpress, items, args.shares, left, args.threads)
        else:
            print("the presses are not measured; --kvpress PYTHON or `make kvpress` does it")
    draw_tables(read_results())


if __name__ == "__main__":
    main()
