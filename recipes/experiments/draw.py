"""The tables and plots of docs/results/experiments.md, made from the results alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from hf_hyperattn.utils.files import write_atomically

from .store import FOLDER, load

ROOT = Path(__file__).resolve().parents[2]
PAGE, PLOTS = ROOT / "docs" / "results" / "experiments.md", ROOT / "docs" / "plots"


def draw(folder: Path = FOLDER, page: Path = PAGE, plots: Path = PLOTS) -> None:
    """Write every plot, and every table between its two marks on the page.

    Args:
        folder: of the results.
        page: has `<!-- NAME -->` and `<!-- /NAME -->` around what is replaced.
        plots: where the plots go, `NAME.svg`.

    Raises:
        ValueError: a result is missing, or the page lacks a mark.
        ImportError: matplotlib is missing.
    """
    from . import figures
    from .tables import TABLES

    plots.mkdir(exist_ok=True)
    for name, figure in figures.FIGURES.items():
        figures.save(made(figure, name, folder), plots / f"{name}.svg")
    text = page.read_text()
    for name, table in TABLES.items():
        text = put(text, name, made(table, name.split("-")[0], folder))
    write_atomically(page, text)


def draw_page(
    name: str,
    tables: dict[str, Callable],
    folder: Path,
    page: Path,
    plot: Callable | None = None,
    plots: Path = PLOTS,
) -> None:
    """The tables of an experiment with a page of its own, and its plot if it has one; nothing where no run is done.

    Args:
        name: of the experiment and its plot.
        tables: what makes each table of the results, by the mark on the page.
        folder: of the results.
        page: has a mark for every table.
        plot: what makes the figure; None for none.
        plots: where the plot goes.

    Raises:
        ValueError: the page lacks a mark.
        ImportError: matplotlib is missing.
    """
    if not (folder / f"{name}.json").exists():
        return
    results, text = load(name, folder), page.read_text()
    if plot is not None:
        from . import figures

        figures.save(plot(results), plots / f"{name}.svg")
    for mark, table in tables.items():
        text = put(text, mark, table(results))
    write_atomically(page, text)


def made(make: Callable, name: str, folder: Path):
    """What is made of an experiment's results.

    Raises:
        ValueError: a run is missing.
    """
    try:
        return make(load(name, folder))
    except KeyError as error:
        raise ValueError(
            f"{name}.json lacks the run {error}; run: python recipes/experiments {name}"
        ) from error


def put(text: str, name: str, table: str) -> str:
    """The text with the table between its marks.

    Raises:
        ValueError: there are no such marks.
    """
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    changed, count = marks.subn(lambda found: f"{found[1]}{table}\n{found[2]}", text)
    if count != 1:
        raise ValueError(
            f"the page has {count} places marked <!-- {name} --> ... <!-- /{name} -->; allowed: one"
        )
    return changed
