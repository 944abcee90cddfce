"""Write the table of the starts in docs/results/hyperbolicity.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

from pathlib import Path

from hf_hyperattn.utils.files import write_atomically

from .draw import ROOT, put
from .starts import USUAL, key_of
from .store import FOLDER, load
from .tables import (
    circumstances,
    depth_accuracies,
    detectable,
    done,
    mean_and_deviation,
    paired,
    table,
)

PAGE = ROOT / "docs" / "results" / "hyperbolicity.md"


def accuracies(results: dict, kind: str, start: str, folder: Path = FOLDER) -> list[float]:
    """Of the seeds that are done, in percent; the usual start is that of the depth experiment."""
    settings = results["settings"]
    if start == USUAL:
        return depth_accuracies(load("depth", folder), kind, settings["depth"], "full")[
            : len(settings["seeds"])
        ]
    keys = (key_of(kind, start, seed) for seed in settings["seeds"])
    return [100 * run["accuracy"] for run in done(results, keys)]


def starts(results: dict, folder: Path = FOLDER) -> str:
    """Accuracy by start, and the difference from the usual one, seed by seed."""
    settings, rows = results["settings"], []
    for kind in settings["kinds"]:
        usual = accuracies(results, kind, USUAL, folder)
        rows.append([kind, USUAL, mean_and_deviation(usual, 1), "", ""])
        for start in settings["starts"]:
            mine = accuracies(results, kind, start, folder)
            if len(mine) == len(usual):
                cells = [
                    mean_and_deviation(mine, 1),
                    paired(mine, usual),
                    f"{detectable(mine, usual):.1f}",
                ]
                rows.append([kind, start, *cells])
    return table(["score", "start", "accuracy, %", "difference", "what would be found"], rows)


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write the tables between their marks; nothing where no run is done."""
    if not (folder / "starts.json").exists():
        return
    results, text = load("starts", folder), page.read_text()
    text = put(text, "starts", starts(results, folder))
    write_atomically(page, put(text, "starts-made", circumstances(results)))
