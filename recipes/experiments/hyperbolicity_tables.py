"""Write the tables and the plot of docs/results/hyperbolicity.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

from .draw import PLOTS, ROOT, draw_page
from .hyperbolicity import key_of
from .store import FOLDER
from .tables import circumstances, detectable, done, mean_and_deviation, paired, table

PAGE = ROOT / "docs" / "results" / "hyperbolicity.md"
HYPERBOLIC, EUCLIDEAN = "hyperbolic distance", "Euclidean distance"


def trees(results: dict) -> str:
    """Largest and mean distance from a tree, beside the same points with shuffled coordinates."""
    rows = []
    for name, run in results["runs"].items():
        for where, found in run.items():
            if isinstance(found, dict) and "points" in found and not name.startswith("depth"):
                rows.append([f"{name.split(',')[0]}: {where}", *of_trees([found])])
    for level, kind in groups(results):
        runs = seeds(results, level, kind)
        if runs:
            rows.append(
                [
                    f"table of nodes, depth {level}, {kind}",
                    *of_trees([run["after"] for run in runs]),
                ]
            )
    return table(["points", "largest", "largest, shuffled", "mean", "mean, shuffled"], rows)


def of_trees(found: list[dict]) -> list[str]:
    """The mean over runs of what `hyperbolicity` gave; deviations are over samples, or over several runs."""
    cells = []
    for measure, error, digits in (("largest", "largest_deviation", 2), ("mean", "mean_error", 4)):
        for name in ("points", "shuffled"):
            values = [one[name][measure] for one in found]
            one = f"{values[0]:.{digits}f} ± {found[0][name][error]:.{digits}f}"
            cells.append(mean_and_deviation(values, digits) if len(values) > 1 else one)
    return cells


def words(results: dict) -> str:
    """Rank correlations of the norms of words with frequency and depth, and with depth at equal frequency."""
    rows = []
    for name in results["settings"]["models"]:
        run = results["runs"].get(f"{name}, words")
        if run is None:
            continue
        between = run["frequency and depth"]
        for where in ("table of words", "last hidden states"):
            by = [run[where]["norm and frequency"], run[where]["norm and depth"]]
            alone = partial(by[1]["value"], by[0]["value"], between["value"])
            rows.append([f"{name}: {where}", *map(interval, by), f"{alone:+.2f}"])
    return table(["norms of", "and frequency", "and depth", "and depth at equal frequency"], rows)


def names(results: dict) -> str:
    """Rank correlations of the norms of names with their length and depth, and with depth at equal length."""
    rows, settings = [], results["settings"]
    for name, source in itertools.product(settings["models"], settings["sources"]):
        run = results["runs"].get(f"{name}, {source}")
        if run is not None:
            found = run[f"last hidden states, {source}"]
            by = [found["norm and length"], found["norm and depth"]]
            alone = partial(by[1]["value"], by[0]["value"], run["length and depth"]["value"])
            cells = [*map(interval, (run["length and depth"], *by)), f"{alone:+.2f}"]
            rows.append([f"{name}: {source}", *cells])
    head = [
        "last hidden states",
        "length and depth",
        "norm and length",
        "norm and depth",
        "at equal length",
    ]
    return table(head, rows)


def interval(found: dict) -> str:
    """A correlation and its 95 % interval."""
    return f"{found['value']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f})"


def partial(both: float, one: float, other: float) -> float:
    """The correlation of a and b with c held: of a and b `both`, of a and c `one`, of b and c `other`."""
    return (both - one * other) / math.sqrt((1 - one**2) * (1 - other**2))


def nodes(results: dict) -> str:
    """Rank correlations of norms with the level of nodes, before and after training."""
    rows = []
    for level, kind in groups(results):
        runs = seeds(results, level, kind)
        if not runs:
            continue
        cells = []
        for what in (of_table, of_keys):
            for when in ("before", "after"):
                cells.append(mean_and_deviation([what(run[when]) for run in runs], 2))
        accuracies = mean_and_deviation([100 * run["accuracy"] for run in runs], 1)
        rows.append([f"depth {level}, {kind}", accuracies, *cells])
    head = ["model", "accuracy, %", "table, before", "table, after", "keys, before", "keys, after"]
    return table(head, rows)


def of_table(found: dict) -> float:
    """The correlation of the table's norms with the level."""
    return found["table"]["value"]


def of_keys(found: dict) -> float:
    """That of the keys' norms, the mean over heads."""
    return statistics.mean(head["value"] for head in found["keys"])


def against(results: dict) -> str:
    """The correlation of keys' norms with the level, hyperbolic less Euclidean distance, seed by seed."""
    rows = []
    for level in results["settings"]["depths"]:
        both = [
            [of_keys(run["after"]) for run in seeds(results, level, kind)]
            for kind in (HYPERBOLIC, EUCLIDEAN)
        ]
        if len(both[0]) == len(both[1]) == len(results["settings"]["seeds"]):
            rows.append([f"depth {level}", paired(*both, 2), f"{detectable(*both):.2f}"])
    return table(
        ["hyperbolic less Euclidean distance", "correlation of keys' norms", "what would be found"],
        rows,
    )


def groups(results: dict) -> list[tuple[int, str]]:
    """Every depth with every score."""
    settings = results["settings"]
    return [(level, kind) for level in settings["depths"] for kind in settings["kinds"]]


def seeds(results: dict, level: int, kind: str) -> list[dict]:
    """The runs of a depth and a score that are done."""
    return done(results, (key_of(level, kind, seed) for seed in results["settings"]["seeds"]))


TABLES = {
    "hyperbolicity": trees,
    "hyperbolicity-words": words,
    "hyperbolicity-names": names,
    "hyperbolicity-nodes": nodes,
    "hyperbolicity-against": against,
    "hyperbolicity-made": circumstances,
}


def plot(results: dict):
    """Correlation of keys' norms with the level, a group of bars for each depth."""
    from matplotlib.figure import Figure

    from . import figures

    figure = Figure(figsize=(6.0, 3.2), layout="constrained")
    axes = figure.subplots()
    kinds, levels = results["settings"]["kinds"], results["settings"]["depths"]
    for i, kind in enumerate(kinds):
        found = [[of_keys(run["after"]) for run in seeds(results, level, kind)] for level in levels]
        at = [x + (i - 1) * 0.25 for x in range(len(levels))]
        axes.bar(
            at,
            [statistics.mean(x) if x else 0 for x in found],
            0.22,
            color=figures.SCORES[kind],
            label=kind,
            yerr=[statistics.stdev(x) if len(x) > 1 else 0 for x in found],
            capsize=3,
        )
    axes.set(xticks=range(len(levels)), xticklabels=[f"depth {level}" for level in levels])
    axes.set(ylabel="rank correlation of keys' norms\nwith the level of the node")
    axes.axhline(0, color="black", linewidth=0.6)
    axes.legend(fontsize=7)
    return figure


def draw(folder: Path = FOLDER, page: Path = PAGE, plots: Path = PLOTS) -> None:
    """Write the plot, and every table between its two marks on the page."""
    draw_page("hyperbolicity", TABLES, folder, page, plot, plots)
