"""Write the tables of the hypernyms in docs/results/hyperbolicity.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from .draw import ROOT, draw_page
from .fitting import best_rate, key_of
from .hypernyms import WORDNET, row_of
from .store import FOLDER
from .tables import all_done, circumstances, detectable, mean_and_deviation, paired, table

PAGE = ROOT / "docs" / "results" / "hyperbolicity.md"
CONTROLS = ("no adapter", "dot product", "normalised dot product", "Euclidean distance")


def whole(results: dict, source: str = WORDNET) -> dict[str, list[dict]]:
    """The runs of every kind that is whole, by seed."""
    seeds, found = results["settings"]["seeds"], {}
    for kind in results["settings"]["kinds"]:
        found[kind] = all_done(results, (key_of(row_of(source, kind), seed) for seed in seeds))
    return {kind: runs for kind, runs in found.items() if runs}


def accuracies(runs: list[dict]) -> list[float]:
    """In percent."""
    return [100 * run["accuracy"] for run in runs]


def kinds(results: dict, source: str = WORDNET) -> str:
    """Accuracy, and whether norms follow the level, a row for each kind."""
    rows = []
    for kind, runs in whole(results, source).items():
        rate = best_rate(results["settings"], results["runs"], row_of(source, kind))
        rate = f"{rate:g}" if runs[0]["parameters"] else "-"
        cells = [f"{runs[0]['parameters']:,}", rate, mean_and_deviation(accuracies(runs), 1)]
        rows.append([kind, *cells, mean_and_deviation([run["norm and level"] for run in runs], 2)])
    return table(
        ["score", "parameters", "learning rate", "accuracy, %", "norms of keys and level"], rows
    )


def pairs(results: dict, source: str = WORDNET) -> str:
    """Differences seed by seed from each control, and their power."""
    found, rows = {kind: accuracies(runs) for kind, runs in whole(results, source).items()}, []
    for kind, mine in found.items():
        others = {
            control: found[control] for control in CONTROLS if control in found and control != kind
        }
        if kind in CONTROLS[:2] or not others:
            continue
        power = max(detectable(mine, other) for other in others.values())
        cells = [paired(mine, others[control]) if control in others else "" for control in CONTROLS]
        rows.append([kind, *cells, f"{power:.1f}"])
    return table(["points ahead of", *CONTROLS, "what would be found"], rows)


TABLES = {
    "hypernyms": kinds,
    "hypernyms-paired": pairs,
    "hypernyms-icd10": partial(kinds, source="ICD-10"),
    "hypernyms-icd10-paired": partial(pairs, source="ICD-10"),
    "hypernyms-phenotypes": partial(kinds, source="phenotypes"),
    "hypernyms-phenotypes-paired": partial(pairs, source="phenotypes"),
    "hypernyms-made": circumstances,
}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write every table between its two marks; nothing where no run is done."""
    draw_page("hypernyms", TABLES, folder, page)
