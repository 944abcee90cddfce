"""Compare every mechanism in every layout with one process: python -m tests.integration.parallel.many_devices.

The largest differences go to docs/results/many_devices.json, and the page docs/results/many_devices.md is drawn from
them. `--draw` only draws the page. ZeRO-3 is compared if DeepSpeed is installed; if not, its column stays as it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import tempfile
from pathlib import Path

import torch
import transformers

from tests.integration.parallel import (
    context_parallel,
    layouts,
    test_context_parallel,
    test_layouts,
    test_parallel,
)
from tests.integration.parallel.parallel import ALL_CELLS, AUTO, CASES, PATCHES, batch, path, start
from tests.integration.parallel.test_rank_heads import patched

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results" / "many_devices.json"
PAGE = RESULTS.with_suffix(".md")
#: Columns of the table: the name in the page, and the name in the results.
COLUMNS = {
    "tensor parallel": "tp",
    "FSDP2": "fsdp2",
    "DDP": "ddp",
    "context, 2 ranks": "context 2",
    "context, 4 ranks": "context 4",
    "ZeRO-3": "zero 3",
    "pipeline": "pipeline",
    "TP + experts": "experts, heads",
    "FSDP2 + experts": "experts, FSDP2",
    "FSDP2 + TP": "FSDP2, heads",
    "HSDP": "replicated FSDP2",
    "FSDP2 + TP + experts": "experts, FSDP2, heads",
}
TEXT = """# Results: several devices

Do several processes give the numbers of one? Yes: the largest difference was {largest:.0e}, over all mechanisms and
layouts.

The tables show the largest difference from one process, of logits and of the gradients of all parameters. They are in
float32, on gloo ranks. The limit is 1e-5.

- **ZeRO-3**: differences of all parameters after three steps of SGD (rate 0.1).
- **Pipeline**: differences of logits. Transformers' pipelines have no backward pass.

Models have two layers with four heads and two key heads (Llama, Qwen3, Qwen3-MoE with four experts) or four (BERT).
Collaborative heads need a model without rotary positions, and the models of some layouts have them.

The command is `python -m tests.integration.parallel.many_devices`. It ran on {machine}, with torch {torch} and
Transformers {transformers}. [Run on several devices](../many_devices.md) explains the layouts.

## Two ranks

{two}

- **Heads of a rank**: the heads that a rank computes under tensor parallelism.
- **Tokens of a rank**: the queries that a rank computes under context parallelism, in causal models. In other models it
  computes all. Sparse rules compute all if one of them reads earlier queries, as one does here.

## More layouts

FSDP2 + TP, HSDP (`dp_replicate_size=2, fsdp_size=2`) and FSDP2 + TP + experts run on four ranks.

{more}

Each checkpoint is loaded under tensor parallelism or FSDP2, saved, and loaded by one process. Every tensor is the same,
bit for bit. The same holds for ZeRO-3 and for the layouts with four ranks or experts.
"""


def compare_everything(folder: Path, before: dict) -> dict:
    """Return the largest differences by mechanism and layout."""
    found: dict[str, dict[str, float]] = {name: {} for name in PATCHES}

    def note(name: str, layout: str, *differences: float) -> None:
        found[name][layout] = max(found[name].get(layout, 0.0), *differences)

    place, results = test_parallel.shared_in(make(folder / "parallel"), ALL_CELLS)
    for layout, family, name in ALL_CELLS:
        alone = test_parallel.alone_of(place, family, name)
        note(name, layout, *test_parallel.apart(results[layout, family, name], alone))
    for world in (2, 4):
        cells = context_parallel.ALL_CELLS
        place = make(folder / f"context{world}")
        (place / "cells.json").write_text(json.dumps({"cells": cells}))
        start("tests.integration.parallel.context_parallel", place, world)
        ranks = [torch.load(place / f"{rank}.pt") for rank in range(world)]
        for order, family, name, padding in cells:
            parts = [rank[order, family, name, padding] for rank in ranks]
            alone = context_parallel.alone(context_parallel.model_of(family, name), padding)
            apart = test_context_parallel.check_equal(parts, alone, order, padding)
            note(name, f"context {world}", *apart)
    place = make(folder / "layouts")
    by_world = test_layouts.run(place, layouts.CELLS)
    for layout, name in layouts.CELLS:
        note(name, layout, test_layouts.apart(layout, name, by_world[layouts.LAYOUTS[layout][0]]))
    if importlib.util.find_spec("deepspeed") is None:
        for name, differences in before.items():
            note(name, "zero 3", differences["zero 3"])
        return found
    place = make(folder / "zero")
    cells = [(3, *case) for case in CASES]
    test_parallel.write(place, cells)
    start("tests.integration.parallel.deepspeed_zero", place)
    results = torch.load(place / "results.pt")
    for _, family, name in cells:
        model = AUTO[family].from_pretrained(path(place, "start", (family, name))).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(**batch()).loss.backward()
            optimizer.step()
        trained = results[3, family, name]
        apart = max((trained[n] - p).abs().max().item() for n, p in model.named_parameters())
        note(name, "zero 3", apart)
    return found


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def count_heads(name: str) -> str:
    """The heads of a layer that a rank computes."""
    return "all" if any(layer.mixes_heads for layer in patched(name).layers()) else "their own"


def count_tokens(name: str) -> str:
    """The queries of a causal layer that a rank computes."""
    if PATCHES[name]("llama") is None:
        return "all"
    return "all" if any(layer.mixes_queries for layer in patched(name).layers()) else "its own"


def draw(results: dict) -> str:
    """Return the page."""
    differences = results["differences"]
    names = list(COLUMNS)

    def table(first: dict, columns: list[str]) -> str:
        head = ["mechanism", *first, *columns]
        rows = [head, ["---"] * len(head)]
        for name in PATCHES:
            found = differences[name]
            cells = [found.get(COLUMNS[column]) for column in columns]
            shown = ["" if d is None else "0" if d == 0 else f"{d:.0e}" for d in cells]
            rows.append([name, *(count(name) for count in first.values()), *shown])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    return TEXT.format(
        largest=max(d for row in differences.values() for d in row.values()),
        two=table({"heads of a rank": count_heads, "tokens of a rank": count_tokens}, names[:6]),
        more=table({}, names[6:]),
        **{key: results[key] for key in ("machine", "torch", "transformers")},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="only draw the page")
    parser.add_argument("--machine", default=platform.processor() or "a CPU", help="its name")
    options = parser.parse_args()
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"differences": {}}
    if options.draw:
        results = before
    else:
        with tempfile.TemporaryDirectory() as folder:
            differences = compare_everything(Path(folder), before["differences"])
        results = {
            "machine": options.machine,
            "torch": torch.__version__.partition("+")[0],
            "transformers": transformers.__version__,
            "differences": differences,
        }
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    PAGE.write_text(draw(results), encoding="utf-8")


if __name__ == "__main__":
    main()
