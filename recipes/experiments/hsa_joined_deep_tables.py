"""Write the tables of the deeper models of joined signals in docs/results/hsa_experiments.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

from pathlib import Path

from .draw import ROOT, draw_page
from .hsa_joined_deep import best_rate, key_of, row_of
from .store import FOLDER
from .tables import all_done, circumstances, detectable, mean_and_deviation, paired, table

PAGE = ROOT / "docs" / "results" / "hsa_experiments.md"
TREE, FLAT = "joined, tree", "joined, flat"


def accuracies(results: dict, model: str, layers: int) -> list[float]:
    """Of all seeds, in percent; empty where one is missing."""
    seeds = results["settings"]["seeds"]
    return [
        100 * run["accuracy"]
        for run in all_done(results, (key_of(row_of(model, layers), s) for s in seeds))
    ]


def deep(results: dict) -> str:
    """Accuracy by depth, and what the tree has more than flat attention; depths that are not whole have no row."""
    settings, rows = results["settings"], []
    for layers in settings["layers"]:
        tree, flat = (accuracies(results, model, layers) for model in (TREE, FLAT))
        if tree and flat:
            rates = [
                f"{best_rate(settings, results['runs'], row_of(model, layers)):g}"
                for model in (TREE, FLAT)
            ]
            means = [mean_and_deviation(values, 1) for values in (tree, flat)]
            rows.append([str(layers), rates[0], means[0], rates[1], means[1]])
            rows[-1] += [paired(tree, flat), f"{detectable(tree, flat):.1f}"]
    head = [
        "layers",
        "rate, tree",
        "tree, %",
        "rate, flat",
        "flat, %",
        "tree less flat",
        "what would be found",
    ]
    return table(head, rows)


TABLES = {"hsa_joined_deep": deep, "hsa_joined_deep-made": circumstances}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write every table between its two marks; nothing where no run is done."""
    draw_page("hsa_joined_deep", TABLES, folder, page)
