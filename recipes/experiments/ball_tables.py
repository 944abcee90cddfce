"""Write the tables of words in the ball in docs/results/hyperbolicity.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

from pathlib import Path

from .ball import BALL, FLAT, best_rate, key_of
from .draw import ROOT, draw_page
from .store import FOLDER
from .tables import all_done, circumstances, detectable, mean_and_deviation, paired, table

PAGE = ROOT / "docs" / "results" / "hyperbolicity.md"
MEASURES = {"precision": 100, "rank": 1, "norm and level": 1}


def seeds(results: dict, space: str, dim: int) -> list[dict]:
    """The runs of all seeds; none where one is missing."""
    return all_done(results, (key_of(space, dim, seed) for seed in results["settings"]["seeds"]))


def precisions(results: dict, space: str, dim: int) -> list[float]:
    """In percent."""
    return [100 * run["precision"] for run in seeds(results, space, dim)]


def ball(results: dict) -> str:
    """Precision, rank and what norms follow, a row for each space and number of dimensions."""
    settings, rows = results["settings"], []
    for dim in settings["dims"]:
        for space in settings["spaces"]:
            runs = seeds(results, space, dim)
            if runs:
                rate = best_rate(settings, results["runs"], space, dim)
                cells = [
                    mean_and_deviation([k * run[m] for run in runs], 2) for m, k in MEASURES.items()
                ]
                rows.append([space, str(dim), f"{rate:g}", *cells])
    head = ["space", "dimensions", "learning rate", "precision, %", "mean rank", "norm and level"]
    return table(head, rows)


def pairs(results: dict) -> str:
    """The ball less Euclidean space, seed by seed."""
    rows = []
    for dim in results["settings"]["dims"]:
        mine, others = (precisions(results, space, dim) for space in (BALL, FLAT))
        if mine and others:
            rows.append(
                [f"{dim} dimensions", paired(mine, others), f"{detectable(mine, others):.1f}"]
            )
    return table(["ball less Euclidean space", "precision, points", "what would be found"], rows)


TABLES = {"ball": ball, "ball-paired": pairs, "ball-made": circumstances}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write the tables between their marks; nothing where no run is done."""
    draw_page("ball", TABLES, folder, page)
