"""Write the tables of the weights by token in docs/results/mkl.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

from pathlib import Path

from .draw import ROOT, draw_page
from .store import FOLDER
from .tables import all_done, circumstances, detectable, mean_and_deviation, paired, table
from .token_weights import GATES, best_rate, key_of

PAGE = ROOT / "docs" / "results" / "mkl.md"
BY_TOKEN = "weights by token"
CONTROLS = tuple(kind for kind in GATES if kind != BY_TOKEN)


def whole(results: dict) -> dict[str, list[float]]:
    """Losses by seed of every kind that is whole, a hundred times the nats of a byte."""
    seeds = results["settings"]["seeds"]
    found = {
        kind: all_done(results, (key_of(kind, seed) for seed in seeds))
        for kind in results["settings"]["kinds"]
    }
    return {kind: [100 * run["nats"] for run in runs] for kind, runs in found.items() if runs}


def losses(results: dict) -> str:
    """Weights, rate and loss, a row for each kind."""
    rows = []
    for kind, values in whole(results).items():
        run = results["runs"][key_of(kind, results["settings"]["seeds"][0])]
        rate = best_rate(results["settings"], results["runs"], kind)
        rows.append(
            [
                kind,
                f"{run['parameters']:,}",
                f"{run['gates']:,}",
                f"{rate:g}",
                mean_and_deviation(values, 1),
            ]
        )
    return table(["model", "parameters", "of weights", "learning rate", "loss, nats x 100"], rows)


def pairs(results: dict) -> str:
    """How much lower the loss of weights by token is, seed by seed, and the power."""
    found, rows = whole(results), []
    for control in CONTROLS:
        if BY_TOKEN in found and control in found:
            both = [-x for x in found[BY_TOKEN]], [-x for x in found[control]]
            rows.append([control, paired(*both, 2), f"{detectable(*both):.2f}"])
    return table(["weights by token against", "nats x 100 gained", "what would be found"], rows)


TABLES = {
    "token_weights": losses,
    "token_weights-paired": pairs,
    "token_weights-made": circumstances,
}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write every table between its two marks; nothing where no run is done."""
    draw_page("token_weights", TABLES, folder, page)
