"""Results as tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from . import depth as depth_experiment
from . import flash as flash_experiment
from . import length as length_experiment


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown: the first column to the left, the others to the right."""
    head = list(head)
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None) -> str:
    """Three digits that matter, "-" for none."""
    if value is None:
        return "-"
    if value and not 1e-2 <= abs(value) < 1e5:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    digits = max(0, 2 - len(str(int(abs(value)))) + (abs(value) < 1) + 1)
    return f"{value:,.{digits}f}"


def mean_and_deviation(values: list[float], digits: int) -> str:
    """Mean and sample deviation; a diverged run makes both "-"."""
    if any(value is None for value in values):
        return "-"
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def alibi(results: dict) -> str:
    """Bias errors, a row for each length."""
    settings, runs = results["settings"], results["runs"]
    head = ["L"] + [f"mu·L = {x:g}" for x in settings["mu_times_length"]]
    rows = []
    for length in settings["lengths"]:
        found = runs[f"bias, L = {length}"]["table"]
        rows.append([f"{length:,}"] + [f"{number(e['max'])} / {number(e['mean'])}" for e in found])
    return table(head, rows)


def alibi_heads(results: dict) -> str:
    """Total variation of the attention, in percent, a row for each length."""
    found = results["runs"]["heads"]
    head = ["L"] + [f"slope 1/{1 / slope:.0f}" for slope in found["slopes"]]
    rows = [[f"{int(n):,}"] + [f"{100 * x:.2f}" for x in v] for n, v in found["total_variation"].items()]
    return table(head, rows)


def flash(results: dict) -> str:
    """Bias errors, a row for each length."""
    settings, runs = results["settings"], results["runs"]
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    ways = [(way, dtype) for way in flash_experiment.BIAS_WAYS for dtype in settings["dtypes"]]
    once = ("in the kernel", settings["dtypes"][0])  # the same for every dtype
    ways = [once, *(w for w in ways if w[0] != once[0])]
    head = [way if (way, dtype) == once else f"{way}, {short[dtype]}" for way, dtype in ways]
    rows = [
        [f"{n:,}", *(number(runs[f"bias, L = {n}"][dtype][way]) for way, dtype in ways)]
        for n in settings["lengths"]
    ]
    return table(["L", *head], rows)


def flash_times(results: dict) -> str:
    """Time over SDPA's and output error, a row for each device, dtype and length."""
    runs = results["runs"]
    measured = {key: run["ways"] for key, run in runs.items() if "ways" in run}
    names = list(dict.fromkeys(name for ways in measured.values() for name in ways))
    rows = []
    for key, ways in measured.items():
        cells = [f"{ways[n]['ratio']:.2f} ({ways[n]['error']:.0e})" if n in ways else "-" for n in names]
        rows.append([key.replace("cpu", "CPU").replace("cuda", "GPU"), *cells])
    if not any(key.startswith("cuda") for key in measured):
        rows.append(["GPU", *["not measured"] * len(names)])
    return table(["", *names], rows)


def length(results: dict) -> str:
    """Perplexity, a row for each kind of position."""
    settings, runs = results["settings"], results["runs"]
    rows = []
    for name in settings["positions"]:
        of_seeds = [runs[length_experiment.key_of(name, seed)]["perplexity"] for seed in settings["seeds"]]
        cells = [mean_and_deviation([p[str(n)] for p in of_seeds], 2) for n in settings["lengths"]]
        rows.append([name, *cells])
    return table(["positions", *(f"{n:,}" for n in settings["lengths"])], rows)


def depth(results: dict) -> str:
    """Accuracy in percent, a row for each depth and size."""
    settings, runs = results["settings"], results["runs"]
    rows = []
    for level in settings["depths"]:
        for size in settings["sizes"]:
            cells, parameters = [], set()
            for kind in settings["kinds"]:
                of_seeds = [runs[depth_experiment.key_of(kind, level, size, s)] for s in settings["seeds"]]
                cells.append(mean_and_deviation([100 * run["accuracy"] for run in of_seeds], 1))
                parameters |= {run["parameters"] for run in of_seeds}
            names = mean_and_deviation([100 * run["names_alone"] for run in of_seeds], 1)
            counts = " to ".join(f"{n / 1000:.1f} k" for n in sorted({min(parameters), max(parameters)}))
            rows.append([f"{level}, {size}", counts, names, *cells])
    return table(["depth, size", "parameters", "names alone", *settings["kinds"]], rows)


def depth_rates(results: dict) -> str:
    """The learning rates that the search chose."""
    settings, found = results["settings"], results["runs"]
    rows = []
    for level in settings["depths"]:
        for size in settings["sizes"]:
            chosen = [depth_experiment.best_rate(settings, found, k, level, size) for k in settings["kinds"]]
            rows.append([f"{level}, {size}", *(f"{rate:g}" for rate in chosen)])
    return table(["depth, size", *settings["kinds"]], rows)


def circumstances(results: dict) -> str:
    """Where and with what it was run, and how long that took."""
    machine, versions = results["machine"], results["versions"]
    seconds = sum(run["seconds"]["cpu"] for run in results["runs"].values())
    took = f"{seconds / 60:.1f} minutes" if seconds > 60 else f"{seconds:.1f} seconds"
    packages = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "transformers", "numpy"))
    chip, gpu = machine["chip"] or machine["architecture"], machine["accelerator"] or "no GPU"
    return (
        f"{len(results['runs'])} runs, {took} of CPU time on one thread of {chip}, {gpu}; "
        f"{packages}; {results['date']}."
    )


#: By the mark on the page; the part before "-" names the results.
TABLES = {
    "alibi": alibi,
    "alibi-heads": alibi_heads,
    "alibi-made": circumstances,
    "flash": flash,
    "flash-times": flash_times,
    "flash-made": circumstances,
    "length": length,
    "length-made": circumstances,
    "depth": depth,
    "depth-rates": depth_rates,
    "depth-made": circumstances,
}
