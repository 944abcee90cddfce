"""Write the tables and the plot of docs/results/translation.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from .draw import PLOTS, ROOT, draw_page
from .store import FOLDER, load
from .tables import circumstances, detectable, done, mean_and_deviation, paired, table
from .translation import best_rate, key_of, key_of_search

PAGE = ROOT / "docs" / "results" / "translation.md"
CONTROLS = ("dot product", "Euclidean distance")
#: What is read, and its digits.
MEASURES = {"held_out": 3, "bleu": 2, "chrf": 2}


def seeds(results: dict, kind: str, width: int) -> list[dict]:
    """The runs of a row that are done, by seed."""
    return done(results, (key_of(kind, width, seed) for seed in results["settings"]["seeds"]))


def whole(results: dict) -> list[tuple[str, int]]:
    """Rows of which all seeds are done."""
    count = len(results["settings"]["seeds"])
    return [
        (kind, width)
        for kind, width in results["settings"]["rows"]
        if len(seeds(results, kind, width)) == count
    ]


def scores(results: dict) -> str:
    """Parameters, loss, BLEU and chrF, a row for each score and width."""
    found = []
    for kind, width in whole(results):
        runs = seeds(results, kind, width)
        cells = [
            mean_and_deviation([run[name] for run in runs], digits)
            for name, digits in MEASURES.items()
        ]
        rate = best_rate(results["settings"], results["runs"], kind, width)
        found.append(
            [kind, str(width), f"{runs[0]['parameters'] / 1e6:.3f} M", f"{rate:g}", *cells]
        )
    head = [
        "score",
        "width of q, k",
        "parameters",
        "learning rate",
        "loss, nats a token",
        "BLEU",
        "chrF",
    ]
    return table(head, found)


def pairs(results: dict, measure: str = "bleu") -> str:
    """Differences seed by seed: from dot product at the full width, and from the controls at the same width."""

    def values(kind: str, width: int) -> list[float] | None:
        return (
            [run[measure] for run in seeds(results, kind, width)]
            if (kind, width) in whole(results)
            else None
        )

    most, found, digits = (
        max(width for _, width in results["settings"]["rows"]),
        [],
        MEASURES[measure],
    )
    for kind, width in whole(results):
        mine, pairs_with = (
            values(kind, width),
            [("dot product", most), *((c, width) for c in CONTROLS)],
        )
        others = [values(*other) if other != (kind, width) else None for other in pairs_with]
        if any(others):
            cells = [paired(mine, other, digits) if other else "" for other in others]
            power = max(detectable(mine, other) for other in others if other)
            found.append([kind, str(width), *cells, f"{power:.{digits}f}"])
    head = [f"from dot product at {most}", *(f"from {c}" for c in CONTROLS), "what would be found"]
    return table(["score", "width", *head], found)


def again(results: dict) -> str:
    """BLEU and loss of the rows that were run with other seeds, and how the first of them differs from the others."""
    settings, found = results["settings"]["again"], []
    runs = {
        kind: done(results, (key_of(kind, width, seed) for seed in settings["seeds"]))
        for kind, width in settings["rows"]
    }
    if any(len(row) < len(settings["seeds"]) for row in runs.values()):
        return table(["score", "BLEU", "loss, nats a token"], [])
    first, *_ = values = {
        kind: [[run[name] for run in row] for name in ("bleu", "held_out")]
        for kind, row in runs.items()
    }
    for kind, measures in values.items():
        cells = [mean_and_deviation(row, digits) for row, digits in zip(measures, (2, 3))]
        less = [
            paired(mine, row, digits) for mine, row, digits in zip(values[first], measures, (2, 3))
        ]
        power = f"{detectable(values[first][0], measures[0]):.2f}"
        found.append([kind, *cells, *(["", "", ""] if kind == first else [*less, power])])
    head = [
        "score",
        "BLEU",
        "loss, nats a token",
        f"BLEU, {first} more",
        f"loss, {first} more",
        "what would be found",
    ]
    return table(head, found)


def losses(results: dict) -> str:
    """The same of the loss."""
    return pairs(results, "held_out")


def searched(results: dict) -> str:
    """The loss of every trial of the search."""
    settings, runs, found = results["settings"], results["runs"], []
    for kind, width in settings["rows"]:
        keys = [key_of_search(kind, width, rate) for rate in settings["search"]["rates"]]
        if all(key in runs for key in keys):
            found.append([kind, str(width), *(f"{runs[key]['held_out']:.3f}" for key in keys)])
    return table(["score", "width", *(f"{rate:g}" for rate in settings["search"]["rates"])], found)


TABLES = {
    "translation": scores,
    "translation-paired": pairs,
    "translation-losses": losses,
    "translation-again": again,
    "translation-rates": searched,
    "translation-made": circumstances,
}


def plot(results: dict):
    """Loss and BLEU over the width of queries, a line for each score."""
    from . import figures

    figure, *plots = figures.pair()
    names = list(dict.fromkeys(kind for kind, _ in whole(results)))
    for axes, measure, label in zip(plots, ("held_out", "bleu"), ("loss, nats a token", "BLEU")):
        for kind in names:
            widths = sorted(width for other, width in whole(results) if other == kind)
            values = [[run[measure] for run in seeds(results, kind, width)] for width in widths]
            axes.errorbar(
                widths,
                list(map(statistics.mean, values)),
                list(map(statistics.stdev, values)),
                color=figures.SCORES[kind],
                marker="o",
                markersize=4,
                capsize=2,
                label=kind,
            )
        widths = sorted({width for _, width in results["settings"]["rows"]})
        axes.set(xscale="log", xticks=widths, xticklabels=widths, ylabel=label)
        axes.set(xlabel="width of a head's queries and keys")
        axes.minorticks_off()
        axes.margins(y=0.02)
    figure.legend(
        *plots[0].get_legend_handles_labels(), fontsize=7, ncols=4, loc="outside lower center"
    )
    return figure


def draw(folder: Path = FOLDER, page: Path = PAGE, plots: Path = PLOTS) -> None:
    """Write every table between its two marks on the page; the plot too, once there are two widths to join."""
    has_curve = (folder / "translation.json").exists() and len(
        {width for _, width in whole(load("translation", folder))}
    ) > 1
    draw_page("translation", TABLES, folder, page, plot if has_curve else None, plots)
