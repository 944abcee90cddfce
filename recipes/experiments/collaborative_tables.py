"""Write the tables of docs/results/collaborative.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

from pathlib import Path

from hf_hyperattn.utils.files import write_atomically

from .draw import ROOT, put
from .store import FOLDER, load
from .tables import table

PAGE = ROOT / "docs" / "results" / "collaborative.md"


def done(results: dict) -> list[tuple[str, dict]]:
    """The runs with a rank, in the order of the experiment."""
    return [(name, run) for name, run in results["runs"].items() if name != "stock"]


def models(results: dict) -> str:
    """A row for each model: parameters, cosines, probe."""
    stock, full = results["runs"]["stock"], max(results["settings"]["ranks"])
    accuracy = stock["probe"]["accuracy"]
    head = [
        "decomposition",
        "rank",
        "parameters, projections",
        "MB",
        "cosine",
        "least",
        "probe",
        "points",
    ]
    before = 2 * full * full + 2 * full
    rows = [
        [
            "(as it was)",
            "-",
            f"{6 * before:,}",
            f"{stock['bytes'] / 1e6:.1f}",
            "1",
            "1",
            f"{100 * accuracy:.1f} %",
            "-",
        ]
    ]
    for name, run in done(results):
        way, rank = name.split(", rank ")
        cosine, probe = run["cosine"], run["probe"]["accuracy"]
        size = sum(layer["parameters"][1] for layer in run["layers"])
        rows.append(
            ["exact" if int(rank) == full else way, f"{rank} ({int(rank) / full:.0%})", f"{size:,}"]
            + [f"{run['bytes'] / 1e6:.1f}", f"{cosine['mean']:.4f}", f"{cosine['least']:.4f}"]
            + [f"{100 * probe:.1f} %", f"{100 * (probe - accuracy):+.1f}"]
        )
    return table(head, rows)


def layers(results: dict) -> str:
    """A row for each model: errors of the weights, and of the logits on the examples, layer by layer."""
    rows = []
    for name, run in done(results):
        for what in ("weights", "logits"):
            errors = [layer[what] for layer in run["layers"]]
            if None not in errors and any(errors):
                rows.append([name, what, *(f"{error:.3f}" for error in errors)])
    return table(["decomposition", "error of", *(f"layer {n}" for n in range(6))], rows)


TABLES = {"collaborative": models, "collaborative-layers": layers}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write every table between its two marks on the page.

    Raises:
        ValueError: a result is missing, or the page lacks a mark.
    """
    text, results = page.read_text(), load("collaborative", folder)
    for name, make in TABLES.items():
        text = put(text, name, make(results))
    write_atomically(page, text)
