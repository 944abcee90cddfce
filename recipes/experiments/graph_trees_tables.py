"""The tables of docs/graphs.md on neighbourhoods as trees, made from the results alone."""

from __future__ import annotations

from pathlib import Path

from .draw import draw_page
from .graph_trees import FLAT, MEAN, SHUFFLED
from .graphs_tables import PAGE, pairs, scores
from .store import FOLDER
from .tables import circumstances

CONTROLS = (SHUFFLED, FLAT, MEAN)
TABLES = {
    "graph_trees": scores,
    "graph_trees-paired": lambda results: pairs(results, CONTROLS),
    "graph_trees-made": circumstances,
}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write every table between its two marks; nothing where no run is done."""
    draw_page("graph_trees", TABLES, folder, page)
