"""The cells of the frontier, and what has been measured of them."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import cpu, environment, write_json

from hf_hyperattn.inject import retrieval
from hyperattn_cli.shared.smollm2 import cache_directory

from .rules import ABLATIONS, HEALED, METHODS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "frontier.json"
STOCK = "stock"
BUDGETS = {2048: (0.2, 0.4, 0.1, 0.05), 8192: (0.2, 0.1)}  # in the order they are run
#: Shares of the time of stock's attention, and of the bytes of its cache.
OTHER_COSTS = {"by time": (0.3, 0.2), "by time, together": (0.25, 0.2), "by bytes": (0.3, 0.5)}
WINDOWS = {2048: 3, 8192: 1}  # of each text
#: Tasks of every cell, besides two mixtures of all; and the methods that get all tasks, at all depths.
TASKS, IN_FULL = (
    ("copying",),
    ("all rules", "rules with a kernel", "rules with a kernel and SparQ", HEALED),
)
#: Chosen by head, corrected by what heads lose together, at two budgets: ours, the best of the others, the yardstick.
TOGETHER, TOGETHER_AT = ("rules with a kernel", "Quest, shared by 16", "exact top-k"), (0.2, 0.1)
#: The control of that: corrected on the very texts that rules were measured on, so that it has read no more of them.
SAME_TEXTS = "together, same texts"
#: Corrected on five mixtures of tasks a round, where "together" has two.
FIVE_MIXTURES = "together, five mixtures"
#: At 8,192 tokens: which methods are run, by kind.
LONG = {
    "by head": (
        "all rules",
        "rules with a kernel",
        "rules with a kernel and SparQ",
        HEALED,
        "HSA",
        "trees",
        "Quest",
        "Quest, shared by 16",
        "mean pages",
        "sinks and window",
        "exact top-k",
    ),
    "together": TOGETHER,
    SAME_TEXTS: ("rules with a kernel",),
    FIVE_MIXTURES: ("rules with a kernel",),
    "by time": ("rules with a kernel",),
    "by time, together": ("rules with a kernel",),
    "by bytes": ("rules with a kernel",),
    "uniform": ("HSA", "Quest"),
}


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    length: int
    method: str
    kind: str = ""
    budget: float = 1.0

    @property
    def key(self) -> str:
        return f"{self.length}/{self.method}/{self.kind}/{self.budget:g}"

    @property
    def is_together(self) -> bool:
        """Whether it is corrected by what heads lose together."""
        return "together" in self.kind

    @property
    def is_by_time(self) -> bool:
        """Whether its budget is one of time."""
        return self.kind.startswith("by time")

    @property
    def tasks(self) -> tuple[str, ...]:
        """Those of retrieval; the last one says that the cell is whole."""
        full = self.method in (STOCK, *IN_FULL) and self.kind not in ("uniform", SAME_TEXTS)
        return (*(retrieval.TASKS if full else ()), *TASKS, "mixture")

    @property
    def passes(self) -> int:
        """Of the model, over texts and examples; a text of a round of "together" takes as long as five."""
        rounds = 2 * 5 * (9 if self.kind == FIVE_MIXTURES else 6) if self.is_together else 0
        return (
            rounds
            + 5 * WINDOWS[self.length]
            + sum(retrieval.COUNTS.get(task, 2) for task in self.tasks)
        )

    def is_whole(self, entry: dict | None) -> bool:
        """Whether nothing of it is left to do."""
        if entry is None or entry.get("none"):
            return entry is not None
        timed = self.method != STOCK or cpu() in entry.get("seconds_on", {})
        return timed and len(entry["texts"]) == 5 and self.tasks[-1] in entry["retrieval"]


def cells(lengths: Sequence[int]) -> Iterator[Cell]:
    """Every cell, those that matter most first."""
    for length in lengths:
        yield Cell(length, STOCK)
        first = ("all rules", "rules with a kernel", "HSA", "Quest")
        order = [*first, *(m for m in METHODS if m not in first)]
        for method in order:
            for budget in BUDGETS[length]:
                yield from (
                    Cell(length, method, kind, budget)
                    for kind in ("by head", "together", SAME_TEXTS, FIVE_MIXTURES, "uniform")
                    if (method, kind) != ("retrieval heads", "uniform")
                    if method != HEALED or (kind, budget) == ("by head", 0.1)
                    if (
                        method in LONG[kind]
                        if length == 8192
                        else kind not in (SAME_TEXTS, FIVE_MIXTURES)
                    )
                    if kind != "together" or (method in TOGETHER and budget in TOGETHER_AT)
                    if kind != FIVE_MIXTURES or budget == 0.1
                )
            for kind, shares in OTHER_COSTS.items() if length == 8192 else ():
                yield from (
                    Cell(length, method, kind, share) for share in shares if method in LONG[kind]
                )
        yield from (
            Cell(length, name, "by head", b)
            for name in ABLATIONS
            for b in (0.1, 0.2)
            if length == 2048
        )


def healed_folder(cell: Cell) -> Path:
    """Where the adapter of a healed cell is."""
    return cache_directory() / "healed" / f"{cell.length}-{cell.budget:g}"


def adapter_of(cell: Cell) -> str:
    """32 hexadecimal digits of the adapter of a healed cell."""
    return hashlib.sha256(
        (healed_folder(cell) / "adapter_model.safetensors").read_bytes()
    ).hexdigest()[:32]


def read_results() -> dict:
    """What has been measured."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}


def keep(cell: Cell, entry: dict) -> None:
    """Write a cell beside those of the file, which another process may have changed in the meantime."""
    now = read_results()
    now["cells"][cell.key] = entry
    write_json(str(RESULTS), {**now, "environment": environment()})


def rises(entry: dict, stock: dict) -> dict[str, float]:
    """By text, how much larger the perplexity is than the stock model's, mean over windows."""
    return {
        name: statistics.mean(
            math.expm1(a - b) for a, b in zip(losses, stock["texts"][name], strict=True)
        )
        for name, losses in entry["texts"].items()
    }


def rise_of(
    entry: dict, stock: dict, task: str, kind: str = "retrieval"
) -> tuple[float, float] | None:
    """How much larger the perplexity of a task's answers is, and its standard error over the examples, by pairs.

    Args:
        kind: of examples, "retrieval" or "mixed".
    """
    if task not in entry.get(kind, {}) or task not in stock.get(kind, {}):
        return None
    more = [
        a - b for a, b in zip(entry[kind][task]["nats"], stock[kind][task]["nats"], strict=True)
    ]
    mean = statistics.mean(more)
    error = statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else math.nan
    return math.expm1(mean), math.exp(mean) * error


def time_of(entry: dict, stock: dict) -> float | None:
    """Seconds of a text over the stock model's on the same CPU; None where that was not timed there."""
    on = stock["seconds"] if "cpu" not in entry else stock.get("seconds_on", {}).get(entry["cpu"])
    return (
        statistics.mean(entry["seconds"]) / statistics.mean(on) if on and entry["seconds"] else None
    )


def rows_of(result: dict, length: int) -> list[tuple[Cell, dict, dict[str, float]]]:
    """The cells of a length whose texts are all there."""
    stock = result["cells"].get(Cell(length, STOCK).key, {"texts": {}})
    rows = []
    for cell in cells([length]):
        entry = result["cells"].get(cell.key)
        if (
            entry
            and cell.method != STOCK
            and entry["texts"]
            and set(entry["texts"]) == set(stock["texts"])
        ):
            rows.append((cell, entry, rises(entry, stock)))
    return sorted(rows, key=lambda row: (row[0].budget, statistics.mean(row[2].values())))
