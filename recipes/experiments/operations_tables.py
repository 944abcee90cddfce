"""The table of operations in docs/results/hyperbolicity.md, made from the results alone."""

from __future__ import annotations

from pathlib import Path

from hf_hyperattn.utils.files import write_atomically

from .draw import ROOT, put
from .store import FOLDER, load
from .tables import circumstances, number, table

PAGE = ROOT / "docs" / "results" / "hyperbolicity.md"


def operations(results: dict) -> str:
    """Microseconds, a row for each operation that is done."""
    rows = [
        [name, *(number(run.get(what)) for what in ("one", "many"))]
        for name, run in results["runs"].items()
    ]
    return table(
        ["CPU time in µs", "a call on one pair, or on 64 tokens", "a pair of 10,000"], rows
    )


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write the tables between their marks; nothing where no run is done."""
    if not (folder / "operations.json").exists():
        return
    results, text = load("operations", folder), page.read_text()
    text = put(text, "operations", operations(results))
    write_atomically(page, put(text, "operations-made", circumstances(results)))
