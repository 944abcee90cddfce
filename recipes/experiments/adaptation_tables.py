"""Write the tables and the plot of docs/results/adaptation.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from .adaptation import ALONE, key_of, key_of_search
from .draw import PLOTS, ROOT, draw_page
from .store import FOLDER, load
from .tables import NOT_DONE, circumstances, detectable, done, mean_and_deviation, paired, table

PAGE = ROOT / "docs" / "results" / "adaptation.md"


def seeds(results: dict, name: str) -> list[dict]:
    """The runs of a row that are done, by seed."""
    return done(results, (key_of(name, seed) for seed in results["settings"]["seeds"]))


def whole(results: dict) -> list[str]:
    """Rows of which all seeds are done, if LoRA alone is among them."""
    count = len(results["settings"]["seeds"])
    found = [name for name in results["settings"]["rows"] if len(seeds(results, name)) == count]
    return found if ALONE in found else []


def losses(results: dict, name: str) -> list[float]:
    """Of all seeds, a hundred times the mean loss of a token: differences are percents of the perplexity."""
    return [100 * run["held_out"] for run in seeds(results, name)]


def scores(results: dict) -> str:
    """Parameters, rates and perplexity, a row for each mechanism."""
    found = []
    if "stock" in results["runs"]:
        stock = results["runs"]["stock"]["perplexity"]
        found.append(["SmolLM2 as it is", "0", "", "", f"{stock:.3f}"])
    for name in whole(results):
        runs = seeds(results, name)
        rates, added = runs[0]["rates"], f"{runs[0]['added']:,}" if runs[0]["added"] else ""
        rate = f"{rates['lora']:g}" + (f", {rates['added']:g}" if added else "")
        cells = [f"{runs[0]['parameters']:,}", added, rate]
        found.append([name, *cells, mean_and_deviation([run["perplexity"] for run in runs], 3)])
    return table(["", "trained", "of which added", "learning rates", "perplexity"], found)


def pairs(results: dict) -> str:
    """The loss of every mechanism less that of LoRA alone, seed by seed, and what such a test could have found."""
    found = []
    for name in whole(results)[1:]:
        mine, others = losses(results, name), losses(results, ALONE)
        found.append([name, paired(mine, others, 3), f"{detectable(mine, others):.3f}"])
    return (
        table(["", "loss less that of LoRA alone, x 100", "what would be found"], found)
        if found
        else NOT_DONE
    )


def searched(results: dict) -> str:
    """The loss of every trial of the search."""
    settings, runs, found = results["settings"], results["runs"], []
    for name in settings["rows"]:
        rates = settings["search"]["rates" if name == ALONE else "added_rates"]
        if all(key_of_search(name, rate) in runs for rate in rates):
            said = (
                f"{rate:g}: {runs[key_of_search(name, rate)]['held_out']:.4f}" for rate in rates
            )
            found.append([name, *said])
    return table(["learning rate: loss", "", "", ""], found)


TABLES = {
    "adaptation": scores,
    "adaptation-paired": pairs,
    "adaptation-rates": searched,
    "adaptation-made": circumstances,
}


def plot(results: dict):
    """The differences from LoRA alone, every seed a point."""
    from matplotlib.figure import Figure

    from . import figures

    figure = Figure(figsize=(6.0, 3.2), layout="constrained")
    axes, names = figure.subplots(), whole(results)[1:]
    alone = losses(results, ALONE)
    found = [[a - b for a, b in zip(losses(results, name), alone, strict=True)] for name in names]
    points = [(x, place) for place, row in enumerate(found) for x in row]
    axes.plot(*zip(*points), "o", color=figures.COLOURS[0], markersize=4, label="a seed")
    axes.plot(
        [statistics.mean(row) for row in found],
        range(len(found)),
        "|",
        color="#333333",
        markersize=14,
        label="mean",
    )
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set(
        yticks=range(len(names)), yticklabels=names, xlabel="loss less that of LoRA alone, x 100"
    )
    axes.invert_yaxis()
    axes.legend()
    return figure


def draw(folder: Path = FOLDER, page: Path = PAGE, plots: Path = PLOTS) -> None:
    """Write every table between its two marks on the page; the plot too, once a row beside LoRA alone is whole."""
    there = (folder / "adaptation.json").exists() and whole(load("adaptation", folder))[1:]
    draw_page("adaptation", TABLES, folder, page, plot if there else None, plots)
