"""Write the tables of the co-attention in docs/results/trilinear.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

from pathlib import Path

from .draw import ROOT, draw_page
from .fitting import best_rate, key_of
from .store import FOLDER
from .tables import all_done, circumstances, detectable, mean_and_deviation, paired, table

PAGE = ROOT / "docs" / "results" / "trilinear.md"
THREE_WAY = "three-way"


def whole(results: dict) -> dict[str, list[float]]:
    """Accuracies in percent by seed, of every kind that is whole."""
    seeds = results["settings"]["seeds"]
    found = {
        kind: all_done(results, (key_of(kind, seed) for seed in seeds))
        for kind in results["settings"]["kinds"]
    }
    return {kind: [100 * run["accuracy"] for run in runs] for kind, runs in found.items() if runs}


def kinds(results: dict) -> str:
    """Parameters, rate and accuracy, a row for each kind, and what three-way attention has more."""
    found, rows = whole(results), []
    for kind, values in found.items():
        run = results["runs"][key_of(kind, results["settings"]["seeds"][0])]
        rate = best_rate(results["settings"], results["runs"], kind)
        rows.append(
            [kind, f"{run['parameters']:,}", f"{rate:g}", mean_and_deviation(values, 1), "", ""]
        )
        if kind != THREE_WAY and THREE_WAY in found:
            rows[-1][-2:] = [
                paired(found[THREE_WAY], values),
                f"{detectable(found[THREE_WAY], values):.1f}",
            ]
    head = [
        "attention",
        "parameters",
        "learning rate",
        "accuracy, %",
        "three-way has more",
        "what would be found",
    ]
    return table(head, rows)


TABLES = {"coattention": kinds, "coattention-made": circumstances}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write every table between its two marks; nothing where no run is done."""
    draw_page("coattention", TABLES, folder, page)
