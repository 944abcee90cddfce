"""Write the tables of the learned mixtures in docs/results/mkl.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

from pathlib import Path

from .draw import ROOT, draw_page
from .fitting import best_rate, key_of
from .store import FOLDER
from .tables import all_done, circumstances, detectable, mean_and_deviation, paired, table

PAGE = ROOT / "docs" / "results" / "mkl.md"
PROJECTED = "projected: "
#: What the learned mixture and that by token are compared with, as they are and projected.
MIXTURES = ("learned mixture", "mixture by token")
WITH_CHANCE = ", chance included"
CONTROLS = ("even mixture", "random mixture", "last layer", "Euclidean distance")


def whole(results: dict) -> dict[str, list[dict]]:
    """The runs of every kind that is whole, by seed."""
    seeds = results["settings"]["seeds"]
    found = {
        kind: all_done(results, (key_of(kind, seed) for seed in seeds))
        for kind in results["settings"]["kinds"]
    }
    return {kind: runs for kind, runs in found.items() if runs}


def aligned(runs: list[dict], when: str = "after") -> list[float]:
    """Alignment with the classes less that with the classes in another order, x 100."""
    return [100 * (run[when]["class"] - run[when]["chance"]) for run in runs]


def whole_of(runs: list[dict]) -> list[float]:
    """Alignment with the classes, chance included, x 100."""
    return [100 * run["after"]["class"] for run in runs]


def accuracies(runs: list[dict]) -> list[float]:
    """In percent."""
    return [100 * run["accuracy"] for run in runs]


def kinds(results: dict) -> str:
    """Alignment before and after, and accuracy, a row for each kind."""
    rows = []
    for kind, runs in whole(results).items():
        cells = [
            f"{runs[0]['parameters']:,}",
            f"{best_rate(results['settings'], results['runs'], kind):g}",
        ]
        cells += [mean_and_deviation(aligned(runs, when), 1) for when in ("before", "after")]
        for what in ("chance", "tree"):
            cells.append(mean_and_deviation([100 * run["after"][what] for run in runs], 1))
        rows.append([kind, *cells, mean_and_deviation(accuracies(runs), 1)])
    head = [
        "kernel",
        "trained",
        "learning rate",
        "above chance, before",
        "after",
        "by chance",
        "with the tree",
    ]
    return table([*head, "accuracy, %"], rows)


def pairs(results: dict) -> str:
    """How much more the mixtures align with the classes than each control does, draw by draw, and the power."""
    found, rows = whole(results), []
    for lead in ("", PROJECTED):
        for name, measure, said in (
            (MIXTURES[0], aligned, ""),
            (MIXTURES[0], whole_of, WITH_CHANCE),
            (MIXTURES[1], aligned, ""),
        ):
            others = {c: measure(found[lead + c]) for c in CONTROLS if lead + c in found}
            if lead + name not in found or not others:
                continue
            mine = measure(found[lead + name])
            power = max(detectable(mine, values) for values in others.values())
            cells = [
                paired(mine, others[control]) if control in others else "" for control in CONTROLS
            ]
            rows.append([lead + name + said, *cells, f"{power:.1f}"])
    return table(["alignment above chance, more than", *CONTROLS, "what would be found"], rows)


def weights(results: dict) -> str:
    """The learned weight of each layer's kernel."""
    found, rows = whole(results), []
    for kind in ("learned mixture", f"{PROJECTED}learned mixture"):
        if kind in found:
            layers = zip(*(run["weights"] for run in found[kind]))
            rows.append([kind, *(mean_and_deviation(list(layer), 2) for layer in layers)])
    count = len(rows[0]) - 1 if rows else 0
    return table(["weight of", *(f"layer {i}" for i in range(count))], rows)


TABLES = {
    "kernels": kinds,
    "kernels-paired": pairs,
    "kernels-weights": weights,
    "kernels-made": circumstances,
}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write every table between its two marks; nothing where no run is done."""
    draw_page("kernels", TABLES, folder, page)
