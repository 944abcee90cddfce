"""The tables of docs/results/graphs.md on neighbourhoods as trees, made from the results alone."""

from __future__ import annotations

from pathlib import Path

from .draw import draw_page
from .fitting import best_rate, key_of
from .graph_trees import FLAT, MEAN, SHUFFLED
from .graphs_tables import PAGE, graph, pairs, whole
from .store import FOLDER
from .tables import circumstances, mean_and_deviation, table

CONTROLS = (FLAT, SHUFFLED, MEAN)


def scores(results: dict) -> str:
    """Rate and accuracy, a row for each kind."""
    settings, rows = results["settings"], []
    for kind, values in whole(results).items():
        runs = [results["runs"][key_of(kind, seed)] for seed in settings["seeds"]]
        some = mean_and_deviation([100 * run["with_two"] for run in runs], 1)
        rate = best_rate(settings, results["runs"], kind)
        rows.append([kind, f"{rate:g}", mean_and_deviation(values, 1), some])
    return table(["", "learning rate", "accuracy, %", "with two neighbours or more"], rows)


def described(results: dict) -> str:
    """What the graph is, and how many packages have hardly a neighbourhood."""
    found = results["runs"]["neighbourhoods"]
    return f"{graph(results)} {100 * found['none']:.0f} % have no neighbour, {100 * found['one']:.0f} % have one."


TABLES = {
    "graph_trees-graph": described,
    "graph_trees": scores,
    "graph_trees-paired": lambda results: pairs(results, CONTROLS),
    "graph_trees-made": circumstances,
}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write every table between its two marks; nothing where no run is done."""
    draw_page("graph_trees", TABLES, folder, page)
