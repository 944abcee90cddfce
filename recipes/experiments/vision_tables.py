"""Write the tables and the plot of docs/results/vision.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from .draw import PLOTS, ROOT, draw_page
from .store import FOLDER, load
from .tables import all_done, circumstances, detectable, mean_and_deviation, paired, table
from .vision import CONES, CONTROLS, GAMMAS, best_rate, key_of, row_of

PAGE = ROOT / "docs" / "results" / "vision.md"


def accuracies(results: dict, kind: str, gamma: float) -> list[float]:
    """Of all seeds, in percent; empty where one is missing."""
    runs = all_done(results, (key_of(kind, gamma, seed) for seed in results["settings"]["seeds"]))
    return [100 * run["accuracy"] for run in runs]


def whole(results: dict) -> dict[tuple[str, float], list[float]]:
    """Accuracies by row, of those that are whole."""
    found = {
        (kind, gamma): accuracies(results, kind, gamma)
        for kind, gamma in results["settings"]["rows"]
    }
    return {row: values for row, values in found.items() if values}


def scores(results: dict) -> str:
    """Parameters, rate, accuracy and where learned settings ended, a row for each score and gamma."""
    rows = []
    for (kind, gamma), values in whole(results).items():
        runs = [results["runs"][key_of(kind, gamma, seed)] for seed in results["settings"]["seeds"]]
        rate = best_rate(results["settings"], results["runs"], kind, gamma)
        ends = (
            f"{n} {statistics.mean(run['learned'][n] for run in runs):.2f}"
            for n in runs[0]["learned"]
        )
        cells = [
            f"{runs[0]['parameters']:,}",
            f"{rate:g}",
            mean_and_deviation(values, 2),
            ", ".join(ends),
        ]
        rows.append([row_of(kind, gamma), *cells])
    return table(
        ["score", "parameters", "learning rate", "accuracy, %", "learned, on the mean"], rows
    )


def pairs(results: dict) -> str:
    """Differences seed by seed from each control, and their power."""
    found, rows = whole(results), []
    for (kind, gamma), mine in found.items():
        others = {c: found[c, 1.0] for c in CONTROLS if (c, 1.0) in found and c != kind}
        if others:
            power = max(detectable(mine, other) for other in others.values())
            cells = [paired(mine, others[c], 2) if c in others else "" for c in CONTROLS]
            rows.append([row_of(kind, gamma), *cells, f"{power:.2f}"])
    return table(["points ahead of", *CONTROLS, "what would be found"], rows)


def gammas(results: dict) -> str:
    """Differences seed by seed from a gamma of 1, for each cone."""
    found, rows = whole(results), []
    for kind in CONES:
        usual = found.get((kind, 1.0))
        others = {gamma: found[kind, gamma] for gamma in GAMMAS[1:] if (kind, gamma) in found}
        if usual and others:
            power = max(detectable(other, usual) for other in others.values())
            cells = [paired(others[g], usual, 2) if g in others else "" for g in GAMMAS[1:]]
            rows.append([kind, *cells, f"{power:.2f}"])
    return table(
        ["points ahead of gamma 1", *(f"gamma {g:g}" for g in GAMMAS[1:]), "what would be found"],
        rows,
    )


TABLES = {
    "vision": scores,
    "vision-paired": pairs,
    "vision-gammas": gammas,
    "vision-made": circumstances,
}


def plot(results: dict):
    """Accuracy of every score, and that of cones over gamma."""
    from . import figures

    found, (figure, left, right) = whole(results), figures.pair()
    kinds = [kind for kind, gamma in found if gamma == 1.0]
    values = [found[kind, 1.0] for kind in kinds]
    left.barh(
        kinds,
        list(map(statistics.mean, values)),
        xerr=list(map(statistics.stdev, values)),
        color=[figures.SCORES[kind] for kind in kinds],
        error_kw={"capsize": 2, "linewidth": 1},
    )
    every = [value for row in found.values() for value in row]
    left.set(xlim=(min(every) - 2, max(every) + 1), xlabel="accuracy, %; gamma 1")
    left.invert_yaxis()
    for kind in CONES:
        of_kind = [
            (gamma, found[kind, gamma]) for gamma in sorted(GAMMAS) if (kind, gamma) in found
        ]
        if of_kind:
            right.errorbar(
                [g for g, _ in of_kind],
                [statistics.mean(v) for _, v in of_kind],
                [statistics.stdev(v) for _, v in of_kind],
                color=figures.SCORES[kind],
                marker="o",
                markersize=4,
                capsize=2,
                label=kind,
            )
    right.set(xscale="log", xticks=GAMMAS, xticklabels=[f"{g:g}" for g in GAMMAS])
    right.set(xlabel="gamma at the start", ylabel="accuracy, %")
    right.minorticks_off()
    if right.get_legend_handles_labels()[0]:
        right.legend(fontsize=7)
    return figure


def draw(folder: Path = FOLDER, page: Path = PAGE, plots: Path = PLOTS) -> None:
    """Write every table between its two marks on the page; the plot too, once a row of a cone is whole."""
    there = (folder / "vision.json").exists() and any(
        kind in CONES for kind, _ in whole(load("vision", folder))
    )
    draw_page("vision", TABLES, folder, page, plot if there else None, plots)
