"""Write the table and the plot of the experiment in docs/results/trilinear.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from hf_hyperattn.utils.files import write_atomically

from .draw import PLOTS, ROOT, put
from .store import FOLDER, load
from .tables import mean_and_deviation, table
from .trilinear import key_of

PAGE = ROOT / "docs" / "results" / "trilinear.md"


def accuracies(results: dict) -> str:
    """Accuracy over seeds, a row for each kind; runs that are not done are left out."""
    rows = []
    for kind, found in by_kind(results).items():
        percent = [100 * run["accuracy"] for run in found]
        seconds = statistics.mean(run["seconds"]["cpu"] for run in found)
        accuracy = mean_and_deviation(percent, 1) if len(found) > 1 else f"{percent[0]:.1f}"
        rows.append([kind, f"{found[0]['parameters']:,}", f"{found[0]['steps']:,}", accuracy])
        rows[-1] += [" / ".join(f"{p:.1f}" for p in percent), f"{seconds:.0f} s"]
    return table(
        ["attention", "parameters", "steps", "accuracy, %", "by seed", "CPU time a run"], rows
    )


def by_kind(results: dict) -> dict[str, list[dict]]:
    """The runs that are done of every kind that has some."""
    settings, runs = results["settings"], results["runs"]
    keys = {kind: [key_of(kind, seed) for seed in settings["seeds"]] for kind in settings["kinds"]}
    found = {kind: [runs[k] for k in names if k in runs] for kind, names in keys.items()}
    return {kind: done for kind, done in found.items() if done}


def curves(results: dict):
    """Accuracy over steps, a line for each run."""
    from matplotlib.figure import Figure

    from .figures import COLOURS

    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axes = figure.subplots()
    for colour, (kind, found) in zip(COLOURS, by_kind(results).items()):
        for index, run in enumerate(found):
            steps, values = zip(*run["curve"])
            label = {"label": kind} if index == 0 else {}
            axes.plot(
                steps,
                [100 * v for v in values],
                color=colour,
                marker="o",
                markersize=2,
                linewidth=1,
                **label,
            )
    least = statistics.mean(run["most_frequent"] for run in results["runs"].values())
    axes.axhline(
        100 * least, color="0.3", linestyle="--", linewidth=1, label="the more frequent answer"
    )
    axes.set(xlabel="step", ylabel="accuracy on fresh sequences, %")
    figure.legend(fontsize=8, ncols=3, loc="outside lower center")
    return figure


def draw(folder: Path = FOLDER, page: Path = PAGE, plots: Path = PLOTS) -> None:
    """Write the table between its two marks on the page, and the plot.

    Raises:
        ValueError: the results are missing, or the page lacks a mark.
    """
    from .figures import save

    results = load("trilinear", folder)
    plots.mkdir(exist_ok=True)
    save(curves(results), plots / "trilinear.svg")
    write_atomically(page, put(page.read_text(), "trilinear", accuracies(results)))
