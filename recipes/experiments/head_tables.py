"""Write the tables and the plot of docs/results/head_fusion.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

from hf_hyperattn.utils.files import write_atomically

from .draw import PLOTS, ROOT, put
from .head_pruning import BETA_PER_TOKEN, EXPERIMENT, RANDOM_PER_TOKEN, key_of
from .store import FOLDER, load
from .tables import circumstances, detectable, done, mean_and_deviation, paired, table

PAGE = ROOT / "docs" / "results" / "head_fusion.md"


def seeds(results: dict, way: str, what: str) -> list[dict]:
    """The runs of a way that are done, by seed."""
    return done(results, (key_of(way, seed, what) for seed in results["settings"]["seeds"]))


def losses(perplexities: dict[str, float]) -> float:
    """The mean over the kinds of text of the log perplexity."""
    return statistics.mean(map(math.log, perplexities.values()))


def growth(results: dict, way: str, ranking: str, share: float) -> list[float]:
    """How many times the perplexity grows when the share is dropped, geometric mean over texts: one number a seed."""
    pairs = zip(seeds(results, way, "trained"), seeds(results, way, ranking))
    return [
        math.exp(losses(after["perplexity"][str(share)]) - losses(before["perplexity"]))
        for before, after in pairs
    ]


def dropped_per_token(results: dict, way: str) -> list[float]:
    """The shares, in percent, that tokens drop in truth: whole heads of a layer."""
    heads = len(next(iter(seeds(results, way, "trained")[0]["mean"].values())))
    return [100 * round(share * heads) / heads for share in results["settings"]["shares"]]


def rankings(results: dict) -> list[tuple[str, str]]:
    """Ways and what they drop heads by, of which there is a run."""
    ways = results["settings"]["ways"]
    every = [(way, ranking) for way, wanted in ways.items() for ranking in wanted["rankings"]]
    return [(way, ranking) for way, ranking in every if seeds(results, way, ranking)]


def pruning(results: dict) -> str:
    """Growth of the perplexity, a row for each way and ranking."""
    shares, rows = results["settings"]["shares"], []
    for way, ranking in rankings(results):
        rows.append(
            [f"{way}: {ranking}", *(spread(growth(results, way, ranking, s)) for s in shares)]
        )
    return table(
        ["weights of heads: dropped first", *(f"{100 * s:.0f} % of heads" for s in shares)], rows
    )


def spread(values: list[float]) -> str:
    """Geometric mean, lowest and highest; one value alone."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.geometric_mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def training(results: dict) -> str:
    """Perplexity before and after the weights of heads were trained, with their entropy."""
    stock, rows = results["runs"]["stock"]["perplexity"], []
    rows.append(
        ["SmolLM2 as it is", "0", "-", *(f"{x:.2f}" for x in stock.values()), "1", "1", "1"]
    )
    for way, wanted in results["settings"]["ways"].items():
        found = seeds(results, way, "trained")
        if not wanted["trained"] or len(found) < 2:
            continue
        entropies = [list(run["entropy"].values()) for run in found]
        entropy = statistics.mean(x for values in entropies for x in values)
        means = [x for run in found for mean in run["mean"].values() for x in mean]
        cells = [mean_and_deviation([run["perplexity"][k] for run in found], 2) for k in stock]
        rows.append([way, f"{found[0]['parameters']:,}", f"{found[0]['learning_rate']:g}", *cells])
        rows[-1] += [
            f"{entropy:.3f}",
            f"{min(map(min, entropies)):.3f}",
            f"{min(means):.2f} to {max(means):.2f}",
        ]
    head = [
        "weights of heads",
        "parameters",
        "learning rate",
        *stock,
        "entropy",
        "of the least even layer",
    ]
    head.append("mean M·beta of a head")
    return table(head, rows)


def fusion(results: dict) -> str:
    """Growth of the perplexity in percent, seed by seed: input-dependent less static, both less the stock model, and
    with a penalty less without.
    """
    stock, every = losses(results["runs"]["stock"]["perplexity"]), len(results["settings"]["seeds"])
    gains = {
        way: [100 * (losses(run["perplexity"]) - stock) for run in seeds(results, way, "trained")]
        for way, wanted in results["settings"]["ways"].items()
        if wanted["trained"]
    }
    usual, static = gains["input-dependent"], gains["static"]
    tests = {
        f"{way} against none": (gains[way], [0.0] * len(gains[way]))
        for way in ("input-dependent", "static")
    }
    tests["input-dependent against static"] = (usual, static)
    tests |= {
        f"{way} against without": (gains[way], usual)
        for way, wanted in results["settings"]["ways"].items()
        if wanted.get("entropy") and len(gains[way]) == every
    }
    rows = [[name, paired(*both, 2), f"{detectable(*both):.2f}"] for name, both in tests.items()]
    return table(
        ["weights of heads", "difference of log perplexity, x 100", "what would be found"], rows
    )


def sentence(results: dict) -> str:
    """Which heads a sentence uses, by the first training."""
    return "\n".join(seeds(results, "input-dependent", "trained")[0]["sentence"])


#: Names of the marks on the page, and how the results become what stands between them.
TABLES = {
    "head_pruning": pruning,
    "head_pruning-training": training,
    "head_pruning-fusion": fusion,
    "head_pruning-sentence": sentence,
    "head_pruning-made": circumstances,
}


TICKS = (1, 1.5, 2, 3, 4, 6, 8)


def plot(results: dict):
    """Growth of the perplexity over the share that is dropped, a line for each ranking, a plot for each way."""
    from matplotlib.figure import Figure

    from . import figures

    settings = results["settings"]
    ways = [
        way for way, wanted in settings["ways"].items() if len(wanted["rankings"]) > 1
    ]  # with rivals
    names = list(dict.fromkeys(ranking for way, ranking in rankings(results) if way in ways))
    colours = dict(zip(names, (*figures.COLOURS, "#da8bc3")))
    figure = Figure(figsize=(3.4 * len(ways), 4.4), layout="constrained")
    plots = figure.subplots(1, len(ways), squeeze=False, sharey=True)[0]
    for axes, way in zip(plots, ways):
        for _, ranking in [pair for pair in rankings(results) if pair[0] == way]:
            found = [growth(results, way, ranking, s) for s in settings["shares"]]
            at = [100 * s for s in settings["shares"]]
            if ranking in (BETA_PER_TOKEN, RANDOM_PER_TOKEN):
                at = dropped_per_token(results, way)
            axes.plot(
                at,
                [statistics.geometric_mean(x) for x in found],
                color=colours[ranking],
                marker="o",
                markersize=4,
                linewidth=1,
                label=ranking,
            )
            axes.fill_between(
                at, list(map(min, found)), list(map(max, found)), color=colours[ranking], alpha=0.15
            )
        axes.set(yscale="log", xlabel="heads dropped, %", yticks=TICKS, yticklabels=TICKS)
        axes.minorticks_off()
        axes.set_title(way, fontsize=9)
    plots[0].set(ylabel="perplexity over that of the whole model")
    drawn = {
        name: handle for axes in plots for handle, name in zip(*axes.get_legend_handles_labels())
    }
    figure.legend(
        drawn.values(),
        drawn,
        fontsize=7,
        ncols=4,
        loc="outside lower center",
        title="line: geometric mean, shade: from the least to the largest",
        title_fontsize=7,
    )
    return figure


def draw(folder: Path = FOLDER, page: Path = PAGE, plots: Path = PLOTS) -> None:
    """Write the plot, and every table between its two marks on the page; nothing where results are of other settings.

    Raises:
        ValueError: there are no results, or the page lacks a mark.
        ImportError: matplotlib is missing.
    """
    from . import figures

    results, text = load("head_pruning", folder), page.read_text()
    if results["settings"] != json.loads(json.dumps(EXPERIMENT.settings)):
        print(
            "head_pruning.json is of other settings than the experiment has; its page is left as it is"
        )
        return
    figures.save(plot(results), plots / "head_pruning.svg")
    for name, make in TABLES.items():
        text = put(text, name, make(results))
    write_atomically(page, text)
