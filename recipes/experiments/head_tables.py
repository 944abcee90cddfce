"""The tables and the plot of docs/head_fusion.md, made from the results alone; runs that are not done are left out."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from hf_hyperattn.files import write_atomically

from .draw import PLOTS, ROOT, put
from .store import FOLDER, load
from .tables import table

PAGE = ROOT / "docs" / "head_fusion.md"
PER_TOKEN = ("beta, per token", "random, per token")


def rankings(settings: dict) -> list[str]:
    """What heads are put in order by, as the tables call it."""
    return [*settings["rankings"], "random", *PER_TOKEN]


def losses(perplexities: dict[str, float]) -> float:
    """The mean over the kinds of text of the log perplexity."""
    return statistics.mean(map(math.log, perplexities.values()))


def growth(results: dict, way: str, ranking: str, share: float) -> list[float]:
    """How many times the perplexity grows when the share is dropped, geometric mean over texts: one number a run."""
    runs, settings = results["runs"], results["settings"]
    names = (
        [f"{way}; random {s}" for s in settings["random_seeds"]]
        if ranking == "random"
        else [f"{way}; {ranking}"]
    )
    before = losses(runs[f"{way}; trained"]["perplexity"])
    found = [runs[name]["perplexity"][str(share)] for name in names if name in runs]
    return [math.exp(losses(perplexities) - before) for perplexities in found]


def dropped_per_token(results: dict, way: str) -> list[float]:
    """The shares, in percent, that tokens drop in truth: whole heads of a layer."""
    heads = len(next(iter(results["runs"][f"{way}; trained"]["mean"].values())))
    return [100 * round(share * heads) / heads for share in results["settings"]["shares"]]


def pruning(results: dict) -> str:
    """Growth of the perplexity, a row for each way and ranking."""
    settings, rows = results["settings"], []
    head = ["trained", "dropped first", *(f"{100 * s:.0f} % of heads" for s in settings["shares"])]
    for way in ways(results):
        for ranking in rankings(settings):
            found = [growth(results, way, ranking, share) for share in settings["shares"]]
            if not all(found):
                continue
            cells = [f"{statistics.mean(x):.2f}" if len(x) == 1 else spread(x) for x in found]
            rows.append([way, ranking, *cells])
    if len(ways(results)) == 1:
        head, rows = head[1:], [row[1:] for row in rows]
    return table(head, rows)


def spread(values: list[float]) -> str:
    """Geometric mean, lowest and highest."""
    return f"{statistics.geometric_mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def ways(results: dict) -> list[str]:
    """The trainings that are done."""
    return [way for way in results["settings"]["ways"] if f"{way}; trained" in results["runs"]]


def training(results: dict) -> str:
    """Perplexity before and after the weights of heads were trained, with their entropy."""
    runs, kinds = results["runs"], list(results["runs"]["stock"]["perplexity"])
    rows = [["SmolLM2 as it is", *(f"{runs['stock']['perplexity'][k]:.2f}" for k in kinds), "1", "1"]]
    for way in ways(results):
        found = runs[f"{way}; trained"]
        entropy = statistics.mean(found["entropy"].values())
        least = min(x for mean in found["mean"].values() for x in mean)
        most = max(x for mean in found["mean"].values() for x in mean)
        cells = [f"{found['perplexity'][k]:.2f}" for k in kinds]
        rows.append(
            [
                "head_fusion" + f", {way}" * (len(ways(results)) > 1),
                *cells,
                f"{entropy:.3f}",
                f"{least:.2f} to {most:.2f}",
            ]
        )
    return table(["model", *kinds, "entropy", "mean M·beta of a head"], rows)


def sentence(results: dict) -> str:
    """Which heads a sentence uses, by the first training."""
    return "\n".join(results["runs"][f"{ways(results)[-1]}; trained"]["sentence"])


#: Names of the marks on the page, and how the results become what stands between them.
TABLES = {"head_pruning": pruning, "head_pruning-training": training, "head_pruning-sentence": sentence}


def plot(results: dict):
    """Growth of the perplexity over the share that is dropped, a line for each ranking."""
    from matplotlib.figure import Figure

    from . import figures

    count = len(ways(results))
    figure = Figure(figsize=(6.0 * count, 3.8), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    settings = results["settings"]
    shares = [100 * s for s in settings["shares"]]
    for axis, way in zip(axes, ways(results)):
        for colour, ranking in zip(figures.COLOURS, rankings(settings)):
            found = [growth(results, way, ranking, s) for s in settings["shares"]]
            if not all(found):
                continue
            at = dropped_per_token(results, way) if ranking in PER_TOKEN else shares
            axis.plot(at, [statistics.geometric_mean(x) for x in found], color=colour, marker="o",
                      markersize=4, linewidth=1, label=ranking)  # fmt: skip
            if len(found[0]) > 1:
                axis.fill_between(
                    shares, [min(x) for x in found], [max(x) for x in found], color=colour, alpha=0.2
                )
        axis.set(yscale="log", xlabel="heads dropped, %", ylabel="perplexity over that of the whole model")
        axis.set_title(f"trained {way}" if count > 1 else "", fontsize=9)
    axes[0].legend(fontsize=8)
    return figure


def draw(folder: Path = FOLDER, page: Path = PAGE, plots: Path = PLOTS) -> None:
    """Write the plot, and every table between its two marks on the page.

    Raises:
        ValueError: there are no results, or the page lacks a mark.
        ImportError: matplotlib is missing.
    """
    from . import figures

    results, text = load("head_pruning", folder), page.read_text()
    figures.save(plot(results), plots / "head_pruning.svg")
    for name, make in TABLES.items():
        text = put(text, name, make(results))
    write_atomically(page, text)
