"""Write the tables of docs/results/hat.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from hf_hyperattn.utils.files import write_atomically

from .draw import ROOT, put
from .store import FOLDER, load
from .tables import circumstances, mean_and_deviation, table

PAGE = ROOT / "docs" / "results" / "hat.md"
#: Written by benchmarks/hat.py.
SPEED = ROOT / "benchmarks" / "results" / "hat.json"


def accuracy(results: dict) -> str:
    """Accuracy and time, a row for each model."""
    settings, runs, rows = results["settings"], results["runs"], []
    for name in settings["models"]:
        found = [runs[key] for seed in settings["seeds"] if (key := f"{name}, seed {seed}") in runs]
        if not found:
            continue
        accuracies = [100 * run["accuracy"] for run in found]
        before = statistics.mean(100 * run["accuracy_before"] for run in found)
        spread = mean_and_deviation(accuracies, 1) if len(found) > 1 else f"{accuracies[0]:.1f}"
        seconds = [statistics.mean(run[k] for run in found) for k in ("train_cpu", "test_cpu")]
        rows.append(
            [
                name,
                str(len(found)),
                f"{before:.1f}",
                spread,
                " / ".join(f"{a:.1f}" for a in accuracies),
            ]
        )
        rows[-1] += [f"{found[0]['parameters'] / 1e6:.1f} M", *(f"{s:.0f} s" for s in seconds)]
    head = [
        "model",
        "seeds",
        "before, %",
        "after, %",
        "by seed",
        "parameters",
        "CPU training",
        "CPU reading",
    ]
    return table(head, rows)


def costs(results: dict) -> str:
    """CPU time and memory of a call, a row for each model."""
    settings, runs, rows = results["settings"], results["runs"], []
    for name in settings["models"]:
        for tokens in settings["cost"]["tokens"]:
            found = runs.get(f"cost, {name}, {tokens}")
            if found is not None:
                ways = ("forward", "step", "step with attention dropout")
                cells = [f"{found[w]['cpu']:.2f} s, {found[w]['mib']:,} MiB" for w in ways]
                rows.append([name, f"{found['batch']} x {tokens:,}", *cells])
    head = ["model", "tokens", "forward", "forward and backward", "the same with attention dropout"]
    return table(head, rows)


def paired(results: dict) -> str:
    """Reviews of all seeds that one model judges rightly and another not, HAT first, with an exact sign test."""
    from scipy.stats import binomtest

    settings, runs, rows = results["settings"], results["runs"], []
    for other in settings["models"]:
        won = lost = 0
        for seed in settings["seeds"]:
            mine, theirs = (runs.get(f"{name}, seed {seed}") for name in ("HAT", other))
            if other == "HAT" or mine is None or theirs is None:
                continue
            won += sum(a > b for a, b in zip(mine["right"], theirs["right"]))
            lost += sum(a < b for a, b in zip(mine["right"], theirs["right"]))
        if won + lost:
            p = binomtest(won, won + lost).pvalue
            rows.append([other, str(won), str(lost), f"{p:.3f}" if p >= 0.0005 else "< 0.001"])
    return table(
        ["HAT against", "HAT alone is right", "the other alone is right", "two-sided p"], rows
    )


def speed(results: dict) -> str:
    """Ratios to full attention, a row for each length and kind."""
    found: dict[tuple, dict] = {}
    for row in results["rows"]:
        found.setdefault((row["length"], row["kind"]), {})[row["what"]] = row
    names = list(dict.fromkeys(row["what"] for row in results["rows"]))
    rows = []
    for (length, kind), ways in found.items():
        cells = []
        for name in names:
            r = ways[name]
            ratio = (
                ""
                if r is ways[names[0]]
                else f"{r['median']:.2f} ({r['low']:.2f}-{r['high']:.2f}), "
            )
            cells.append(f"{ratio}{r['seconds']:.2f} s, {r['extra_mib']:.0f} MiB")
        rows.append([f"{length:,}", kind, *cells])
    where = results["environment"]
    said = f"{where['chip']}, {where['threads']} thread, torch {where['torch']}; {where['date']}."
    return table(["tokens", "what", *names], rows) + "\n\n" + said


#: Names of the marks on the page: results and how they become a table.
TABLES = {
    "hat_imdb": ("hat_imdb", accuracy),
    "hat_imdb-paired": ("hat_imdb", paired),
    "hat_imdb-cost": ("hat_imdb", costs),
    "hat_imdb-made": ("hat_imdb", circumstances),
}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write every table between its two marks on the page.

    Raises:
        ValueError: a result is missing, or the page lacks a mark.
    """
    text = page.read_text()
    for name, (results, make) in TABLES.items():
        text = put(text, name, make(load(results, folder)))
    if SPEED.exists():
        text = put(text, "hat-speed", speed(json.loads(SPEED.read_text())))
    write_atomically(page, text)
