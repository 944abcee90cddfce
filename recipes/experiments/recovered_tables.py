"""Write the tables of replaced layers in docs/results/adaptation.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from .draw import ROOT, draw_page
from .recovered import NONE, REDRAWN, best_rate, key_before, key_of, key_of_search
from .store import FOLDER
from .tables import NOT_DONE, all_done, circumstances, detectable, mean_and_deviation, paired, table

PAGE = ROOT / "docs" / "results" / "adaptation.md"
CONTROLS = (NONE, REDRAWN, "Euclidean distance", "normalised dot product")


def whole(results: dict) -> dict[str, list[dict]]:
    """The runs of every row that is whole, by seed; none where the model as it is was not read."""
    seeds, found = results["settings"]["seeds"], {}
    for row in results["settings"]["rows"]:
        found[row] = all_done(results, [key_before(row), *(key_of(row, seed) for seed in seeds)])[
            1:
        ]
    return {row: runs for row, runs in found.items() if runs} if "stock" in results["runs"] else {}


def added(results: dict, row: str, k: str, what: str = "loss") -> list[float]:
    """Of every seed, a hundred times what the loss is above that of the model as it is; nats of what is found again."""
    stock = results["runs"]["stock"][what]
    return [100 * (run[k][what] - stock) for run in whole(results)[row]]


def added_before(results: dict, row: str, k: str, what: str = "loss") -> float:
    """The same before the training."""
    return 100 * (results["runs"][key_before(row)][k][what] - results["runs"]["stock"][what])


def comes_back(results: dict) -> str:
    """What is lost before and after the training, and the share that comes back, for every k."""
    rows = []
    for row in whole(results):
        cells = [f"{best_rate(results['settings'], results['runs'], row):g}"]
        for k in results["settings"]["layers"]:
            before, after = added_before(results, row, k), added(results, row, k)
            back = mean_and_deviation([100 * (1 - x / before) for x in after], 0)
            cells.append(f"{before:.1f} to {mean_and_deviation(after, 1)}; {back} %")
        rows.append([row, *cells])
    head = ["score", "learning rate", *(f"k = {k}" for k in results["settings"]["layers"])]
    return table(head, rows) if rows else NOT_DONE


def searched(results: dict) -> str:
    """The error of every trial of the search, as a share of what is wanted."""
    settings, runs, rows = results["settings"], results["runs"], []
    rates = settings["search"]["rates"]
    for row in settings["rows"]:
        if all(key_of_search(row, rate) in runs for rate in rates):
            rows.append(
                [row, *(f"{runs[key_of_search(row, rate)]['error']:.3f}" for rate in rates)]
            )
    return (
        table(["error by learning rate", *(f"{rate:g}" for rate in rates)], rows)
        if rows
        else NOT_DONE
    )


def pairs(results: dict) -> str:
    """How much less the cones lose than each control, seed by seed, for every k."""
    rows, found = [], whole(results)
    for row, k in (
        (row, k) for row in found if "cone" in row for k in results["settings"]["layers"]
    ):
        mine, cells, power = [-x for x in added(results, row, k)], [], []
        for control in CONTROLS:
            others = [-x for x in added(results, control, k)] if control in found else None
            cells.append(paired(mine, others) if others else "-")
            power += [detectable(mine, others)] if others else []
        rows.append([f"{row}, k = {k}", *cells, f"{max(power):.1f}" if power else "-"])
    return (
        table(["100 x loss gained over", *CONTROLS, "what would be found"], rows)
        if rows
        else NOT_DONE
    )


def again(results: dict, what: str) -> str:
    """How much worse a copy, or needles, are predicted, before and after the training, in hundredths of nats."""
    rows = []
    for row in whole(results):
        cells = []
        for k in results["settings"]["layers"]:
            before, after = added_before(results, row, k, what), added(results, row, k, what)
            cells.append(f"{before:+.1f} to {mean_and_deviation(after, 1)}")
        rows.append([row, *cells])
    return (
        table([what, *(f"k = {k}" for k in results["settings"]["layers"])], rows)
        if rows
        else NOT_DONE
    )


TABLES = {
    "recovered": comes_back,
    "recovered-paired": pairs,
    "recovered-copying": partial(again, what="copying"),
    "recovered-needles": partial(again, what="needles"),
    "recovered-rates": searched,
    "recovered-made": circumstances,
}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write every table between its two marks; nothing where no run is done."""
    draw_page("recovered", TABLES, folder, page)
