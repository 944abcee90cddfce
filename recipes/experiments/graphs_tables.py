"""Write the tables of docs/results/graphs.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

from pathlib import Path

from .draw import ROOT, draw_page
from .fitting import best_rate, key_of
from .store import FOLDER
from .tables import all_done, circumstances, detectable, mean_and_deviation, paired, table

PAGE = ROOT / "docs" / "results" / "graphs.md"
CONTROLS = ("mean of neighbours", "dot product", "Euclidean distance")


def accuracies(results: dict, kind: str) -> list[float]:
    """Of all seeds, in percent; empty where one is missing."""
    runs = all_done(results, (key_of(kind, seed) for seed in results["settings"]["seeds"]))
    return [100 * run["accuracy"] for run in runs]


def whole(results: dict) -> dict[str, list[float]]:
    """Accuracies by kind, of those that are whole."""
    found = {kind: accuracies(results, kind) for kind in results["settings"]["kinds"]}
    return {kind: values for kind, values in found.items() if values}


def scores(results: dict) -> str:
    """Parameters, rate and accuracy, a row for each kind."""
    rows = []
    for kind, values in whole(results).items():
        run = results["runs"][key_of(kind, results["settings"]["seeds"][0])]
        rate = best_rate(results["settings"], results["runs"], kind)
        rows.append([kind, f"{run['parameters']:,}", f"{rate:g}", mean_and_deviation(values, 1)])
    return table(["score", "parameters", "learning rate", "accuracy, %"], rows)


def pairs(results: dict, controls: tuple[str, ...] = CONTROLS) -> str:
    """Differences seed by seed from each control, and their power."""
    found, rows = whole(results), []
    for kind, mine in found.items():
        others = {
            control: found[control] for control in controls if control in found and control != kind
        }
        if others:
            power = max(detectable(mine, other) for other in others.values())
            cells = [
                paired(mine, others[control]) if control in others else "" for control in controls
            ]
            rows.append([kind, *cells, f"{power:.1f}"])
    return table(["points ahead of", *controls, "what would be found"], rows)


def graph(results: dict) -> str:
    """What the graph is."""
    found = results["runs"]["graph"]
    return (
        f"{found['nodes']:,} packages with {found['edges']:,} dependencies between them, "
        f"{100 * found['homophily']:.0f} % of them within a section; checksum {found['checksum']}. "
        f"Sections: {', '.join(found['sections'])}."
    )


TABLES = {
    "graphs-graph": graph,
    "graphs": scores,
    "graphs-paired": pairs,
    "graphs-made": circumstances,
}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write every table between its two marks; nothing where no run is done."""
    draw_page("graphs", TABLES, folder, page)
