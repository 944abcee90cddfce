"""Results as plots."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from . import depth as depth_experiment
from . import flash as flash_experiment
from . import length as length_experiment
from .theme import follow_theme

matplotlib.rcParams.update(
    {
        "svg.hashsalt": "hf_hyperattn",  # the same file for the same results
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "0.9",
        "hatch.linewidth": 0.4,
        "legend.frameon": False,
        "figure.facecolor": "white",
    }
)
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#333333", "#64b5cd")

#: Of scores, alike in all plots: greys and brown without geometry, reds and violet hyperbolic, blues for cones.
SCORES = {
    "dot product": "#333333",
    "normalised dot product": "#999999",
    "Euclidean distance": "#937860",
    "hyperbolic distance": "#c44e52",
    "umbral cone, xi": "#64b5cd",
    "umbral cone, psi": "#4c72b0",
    "penumbral cone, psi": "#55a868",
}

#: Of mu·L in the right plot of alibi, whose left one has a colour for each L.
PRODUCTS = ("#333333", "#64b5cd", "#da8bc3", "#8c8c00")

#: Of ways to compute the bias, alike in both plots; all ways inside a kernel share the last one.
WAYS = {"columns": "#4c72b0", "two plain columns": "#dd8452", "mask": "#55a868"}


def save(figure: Figure, path: Path, transparent: bool = False) -> None:
    """Write an SVG without the date of its making, and without a background.

    Args:
        figure: The figure.
        path: The file.
        transparent: The figure has a file for each theme. Otherwise its one file follows the theme.
    """
    figure.savefig(path, metadata={"Date": None, "Creator": None}, transparent=transparent)
    if not transparent:
        follow_theme(path)


def pair(width: float = 9.0, height: float = 3.6):
    """A figure with two plots beside each other."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, *figure.subplots(1, 2)


def mark_cut(axes) -> None:
    """A triangle at the rim wherever a line leaves the plot, above or below, and where it begins if it stays outside.

    The axes' limits and scale are settled.
    """
    low, high = axes.get_ylim()
    rims = lambda at, rim, line: axes.plot(
        [at],
        [rim],
        "^" if rim == high else "v",
        color=line.get_color(),
        markersize=4,
        clip_on=False,
        gid="cut",
    )
    for line in [line for line in axes.get_lines() if line.get_linestyle() != "None"]:
        points = [(x, y) for x, y in zip(*line.get_data()) if math.isfinite(y)]
        if min(y for _, y in points) > high or max(y for _, y in points) < low:
            rims(points[0][0], high if points[0][1] > high else low, line)
        for (x, y), (x2, y2) in [*zip(points, points[1:]), *zip(points[1:], points)]:
            rim = high if y2 > high else low
            if low <= y <= high and not low <= y2 <= high:
                share = (_log(axes, "y", rim) - _log(axes, "y", y)) / (
                    _log(axes, "y", y2) - _log(axes, "y", y)
                )
                at = _log(axes, "x", x) + share * (_log(axes, "x", x2) - _log(axes, "x", x))
                at = 10**at if axes.get_xscale() == "log" else at
                rims(at, rim, line)


def _log(axes, axis: str, value: float) -> float:
    """The place of a value along an axis."""
    return math.log10(max(value, 1e-300)) if getattr(axes, f"get_{axis}scale")() == "log" else value


def alibi(results: dict) -> Figure:
    """Bias error over mu for every length, and its effect on attention."""
    figure, left, right = pair()
    runs, settings = results["runs"], results["settings"]
    for colour, length in zip(COLOURS, settings["lengths"]):
        curve = runs[f"bias, L = {length}"]["curve"]
        mu = [e["mu"] for e in curve]
        left.plot(mu, [e["max"] for e in curve], color=colour, label=f"L = {length:,}")
        left.plot(mu, [e["mean"] for e in curve], color=colour, linestyle="--")
        left.plot(mu, [e["cubic_max"] for e in curve], color=colour, linestyle=":", linewidth=1)
    left.set(
        xscale="log",
        yscale="log",
        ylim=(1e-3, 1e5),
        xlabel="mu",
        ylabel="|HyPE - ALiBi|, logits at slope 1",
    )
    left.set_title(
        "solid: maximum, dashed: mean, dotted: cubic term; triangle: goes on", fontsize=8
    )
    left.legend(fontsize=8)
    mark_cut(left)
    found = runs["attention"]
    for colour, (x, curve) in zip(PRODUCTS, found["curves"].items()):
        right.plot(
            [p[0] for p in curve],
            [100 * p[1] for p in curve],
            color=colour,
            label=f"mu·L = {float(x):g}",
        )
        steep = [
            (p[0], 100 * found["constant"] * (float(x) / p[0]) ** 2) for p in curve if p[0] > 8
        ]
        right.plot(*zip(*steep), color=colour, linestyle=":", linewidth=1)
    right.set(
        xscale="log", yscale="log", ylim=(1e-3, 30), xlabel="slope · L", ylabel="total variation, %"
    )
    right.set_title(
        "attention by the bias alone; dotted: steep limit; triangle: goes on", fontsize=8
    )
    right.legend(fontsize=8)
    mark_cut(right)
    return figure


def flash(results: dict) -> Figure:
    """Bias error over length by way and dtype; time over SDPA's. The tables have float16, too."""
    figure, left, right = pair(height=4.6)
    runs, settings = results["runs"], results["settings"]
    lengths, marks = settings["lengths"], {"float32": "o", "bfloat16": "s"}
    for way in flash_experiment.BIAS_WAYS:
        for dtype in [*marks][: 1 if way == "in the kernel" else None]:
            colour, errors = (
                WAYS.get(way, "#8172b3"),
                [runs[f"bias, L = {n}"][dtype][way] for n in lengths],
            )
            name = way if way == "in the kernel" else f"{way}, {dtype}"
            left.plot(
                lengths,
                errors,
                color=colour,
                marker=marks[dtype],
                markersize=4,
                linewidth=1,
                label=name,
            )
    left.set(xscale="log", yscale="log", ylabel="largest bias error, logits at slope 1")
    names = [
        n for n in runs[flash_experiment.key_of("cpu", settings["dtypes"][0], lengths[0])]["ways"]
    ]
    for way in [n for n in names if n != "SDPA, no bias"]:
        for dtype in marks:
            found = [runs[flash_experiment.key_of("cpu", dtype, n)]["ways"] for n in lengths]
            colour, ratios = WAYS.get(way, "#8172b3"), [ways[way]["ratio"] for ways in found]
            right.plot(
                lengths, ratios, color=colour, marker=marks[dtype], markersize=4, linewidth=1
            )
    right.axhline(1, color="0.3", linewidth=1)
    right.set(
        xscale="log",
        yscale="log",
        yticks=(1, 1.5, 2, 3),
        yticklabels=(1, 1.5, 2, 3),
        ylim=(0.9, None),
    )
    right.set(ylabel="CPU time over SDPA without a bias")
    inside = ", ".join(way for way in names if way not in WAYS and way != "SDPA, no bias")
    title = f"in both plots: a colour for each way, a mark for each dtype; in the kernel, right: {inside}"
    figure.legend(
        *left.get_legend_handles_labels(),
        fontsize=9,
        ncols=3,
        loc="outside lower center",
        title=title,
        title_fontsize=9,
    )
    for axes in (left, right):
        axes.set(xticks=lengths, xticklabels=lengths, xlabel="L")
        axes.minorticks_off()
    return figure


def length(results: dict) -> Figure:
    """Perplexity over length: all, and the ones that hold."""
    figure, left, right = pair(height=4.2)
    runs, settings = results["runs"], results["settings"]
    lengths = settings["lengths"]
    # Shapes and dashes: some curves lie on each other.
    shapes = "oooXsD^v"
    for colour, shape, name in zip(COLOURS, shapes, settings["positions"]):
        of_seeds = [
            runs[length_experiment.key_of(name, s)]["perplexity"] for s in settings["seeds"]
        ]
        values = [[p[str(n)] for p in of_seeds] for n in lengths]
        mean, deviation = map(statistics.mean, values), map(statistics.stdev, values)
        mean, deviation = list(mean), list(deviation)
        for axes in (left, right):
            dashes = "--" if "learned" in name else "-"
            axes.errorbar(
                lengths,
                mean,
                deviation,
                color=colour,
                label=name,
                marker=shape,
                markersize=4,
                linestyle=dashes,
                linewidth=3 if name == "ALiBi" else 1,
                capsize=2,
            )
    for axes in (left, right):
        axes.set(xscale="log", xticks=lengths, xticklabels=lengths, xlabel="tokens read")
    left.set(
        yscale="log",
        ylabel="perplexity of a byte",
        yticks=(5, 10, 20, 30),
        yticklabels=(5, 10, 20, 30),
    )
    left.minorticks_off()
    right.minorticks_off()
    best = [min(p.values()) for p in (runs[k]["perplexity"] for k in runs)]
    right.set_ylim(min(best) - 0.1, 1.15 * min(best))
    right.set_title("the same, cut; triangle: goes on", fontsize=9)
    mark_cut(right)
    figure.legend(
        *left.get_legend_handles_labels(), fontsize=7, ncols=4, loc="outside lower center"
    )
    return figure


def depth(results: dict) -> Figure:
    """Accuracy by kind for every depth and size, and by the depth of the answer."""
    figure, left, right = pair(height=4.2)
    runs, settings = results["runs"], results["settings"]
    groups = [(level, size) for level in settings["depths"] for size in settings["sizes"]]
    kinds = settings["kinds"]
    wide = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        colour = SCORES[kind]
        values = [
            [
                100 * runs[depth_experiment.key_of(kind, *group, s)]["accuracy"]
                for s in settings["seeds"]
            ]
            for group in groups
        ]
        at = [g + (i - (len(kinds) - 1) / 2) * wide for g in range(len(groups))]
        left.bar(
            at,
            [statistics.mean(v) for v in values],
            wide,
            color=colour,
            label=kind,
            yerr=[statistics.stdev(v) for v in values],
            error_kw={"capsize": 2, "linewidth": 1},
        )
        deepest, full = max(settings["depths"]), next(iter(settings["sizes"]))
        by_depth = [
            runs[depth_experiment.key_of(kind, deepest, full, s)]["accuracy_by_depth"]
            for s in settings["seeds"]
        ]
        right.plot(
            [100 * statistics.mean(v) for v in zip(*by_depth)],
            color=colour,
            marker="o",
            markersize=3,
        )
    for g, group in enumerate(groups):
        names = [
            100 * runs[depth_experiment.key_of(kinds[0], *group, s)]["names_alone"]
            for s in settings["seeds"]
        ]
        line = {"label": "names alone"} if g == 0 else {}
        left.hlines(
            statistics.mean(names),
            g - 0.45,
            g + 0.45,
            color="0.3",
            linestyle="--",
            linewidth=1,
            **line,
        )
    left.set(ylim=(0, None), ylabel="accuracy, %", xticks=range(len(groups)))
    left.set_xticklabels([f"depth {level},\n{size}" for level, size in groups])
    figure.legend(
        *left.get_legend_handles_labels(), fontsize=7, ncols=4, loc="outside lower center"
    )
    right.set(xlabel="depth of the lowest common ancestor", ylabel="accuracy, %")
    right.set_title(f"depth {deepest}, {full} size", fontsize=9)
    return figure


FIGURES = {"alibi": alibi, "flash": flash, "length": length, "depth": depth}
