"""Results as tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from . import depth as depth_experiment
from . import flash as flash_experiment
from . import length as length_experiment

#: What stands where a table has no row yet.
NOT_DONE = "The runs are not done yet."


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


def paired(mine: list[float], others: list[float], digits: int = 1) -> str:
    """The mean of the differences of paired values, its 95 % interval by Student's t, and the two-sided p."""
    from scipy.stats import ttest_rel

    if len(mine) < 2:
        return "-"
    test = ttest_rel(mine, others)
    low, high = test.confidence_interval()
    mean = statistics.mean(a - b for a, b in zip(mine, others, strict=True))
    p = f"p = {test.pvalue:.3f}" if test.pvalue >= 0.0005 else "p < 0.001"
    return f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f}), {p}"


def detectable(mine: list[float], others: list[float]) -> float:
    """The difference that a two-sided paired t test at 5 % finds four times in five, by the deviation that was seen."""
    from scipy.stats import t

    differences, free = [a - b for a, b in zip(mine, others)], len(mine) - 1
    return (
        (t.ppf(0.975, free) + t.ppf(0.8, free)) * statistics.stdev(differences) / len(mine) ** 0.5
    )


def done(results: dict, keys: Iterable[str]) -> list[dict]:
    """The runs of these names that are done."""
    return [results["runs"][key] for key in keys if key in results["runs"]]


def all_done(results: dict, keys: Iterable[str]) -> list[dict]:
    """The runs of these names; none where one is missing."""
    keys = list(keys)
    found = done(results, keys)
    return found if len(found) == len(keys) else []


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
    rows = [
        [f"{int(n):,}"] + [f"{100 * x:.2f}" for x in v] for n, v in found["total_variation"].items()
    ]
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
        cells = [
            f"{ways[n]['ratio']:.2f} ({ways[n]['error']:.0e})" if n in ways else "-" for n in names
        ]
        rows.append([key.replace("cpu", "CPU").replace("cuda", "GPU"), *cells])
    if not any(key.startswith("cuda") for key in measured):
        rows.append(["GPU", *["not measured"] * len(names)])
    return table(["", *names], rows)


def length(results: dict) -> str:
    """Perplexity, a row for each kind of position."""
    settings, runs = results["settings"], results["runs"]
    rows = []
    for name in settings["positions"]:
        of_seeds = [
            runs[length_experiment.key_of(name, seed)]["perplexity"] for seed in settings["seeds"]
        ]
        cells = [mean_and_deviation([p[str(n)] for p in of_seeds], 2) for n in settings["lengths"]]
        rows.append([name, *cells])
    return table(["positions", *(f"{n:,}" for n in settings["lengths"])], rows)


def depth(results: dict) -> str:
    """Accuracy in percent, a row for each score, a column for each depth and size."""
    settings, groups = results["settings"], depth_groups(results)
    names, counts = [], []
    for group in groups:
        runs = [run for kind in settings["kinds"] for run in depth_runs(results, kind, *group)]
        names.append(
            mean_and_deviation([100 * r["names_alone"] for r in runs[: len(settings["seeds"])]], 1)
        )
        sizes = sorted({run["parameters"] for run in runs})
        counts.append(f"{sizes[0] / 1000:.1f} to {sizes[-1] / 1000:.1f} k")
    rows = [["parameters", *counts], ["names alone", *names]]
    for kind in settings["kinds"]:
        rows.append(
            [kind, *(mean_and_deviation(depth_accuracies(results, kind, *g), 1) for g in groups)]
        )
    return table(["accuracy, %", *(depth_name(*g) for g in groups)], rows)


def depth_pairs(results: dict) -> str:
    """Each score less each of those without geometry, seed by seed, in points, and the power of these tests; at last
    the mean over depths and sizes.
    """
    rows = []
    for group in [*depth_groups(results), None]:
        values = {
            k: depth_means(results, k) if group is None else depth_accuracies(results, k, *group)
            for k in results["settings"]["kinds"]
        }
        for kind in results["settings"]["kinds"][1:]:
            mine = values[kind]
            others = {
                control: values[control] for control in depth_experiment.CONTROLS if control != kind
            }
            cells = [
                paired(mine, others[c]) if c in others else "" for c in depth_experiment.CONTROLS
            ]
            found = max(detectable(mine, other) for other in others.values())
            rows.append(
                [
                    f"{depth_name(*group) if group else 'mean of the four'}: {kind}",
                    *cells,
                    f"{found:.1f}",
                ]
            )
    return table(["points ahead of", *depth_experiment.CONTROLS, "what would be found"], rows)


def depth_means(results: dict, kind: str) -> list[float]:
    """Of every seed the mean accuracy over depths and sizes, in percent."""
    return list(
        map(
            statistics.mean,
            zip(*(depth_accuracies(results, kind, *g) for g in depth_groups(results))),
        )
    )


def depth_rates(results: dict) -> str:
    """The learning rates that the search chose."""
    settings, found, rows = results["settings"], results["runs"], []
    for kind in settings["kinds"]:
        chosen = [
            depth_experiment.best_rate(settings, found, kind, *g) for g in depth_groups(results)
        ]
        rows.append([kind, *(f"{rate:g}" for rate in chosen)])
    return table(["learning rate", *(depth_name(*g) for g in depth_groups(results))], rows)


def depth_groups(results: dict) -> list[tuple[int, str]]:
    """Every depth with every size."""
    settings = results["settings"]
    return [(level, size) for level in settings["depths"] for size in settings["sizes"]]


def depth_name(level: int, size: str) -> str:
    """How the tables call a depth and a size."""
    return f"depth {level}, {size}"


def depth_runs(results: dict, kind: str, level: int, size: str) -> list[dict]:
    """The runs of all seeds, in their order."""
    keys = (
        depth_experiment.key_of(kind, level, size, seed) for seed in results["settings"]["seeds"]
    )
    return [results["runs"][key] for key in keys]


def depth_accuracies(results: dict, kind: str, level: int, size: str) -> list[float]:
    """Accuracies of all seeds, in percent."""
    return [100 * run["accuracy"] for run in depth_runs(results, kind, level, size)]


def circumstances(results: dict) -> str:
    """Where and with what it was run, and how long that took."""
    machine, versions = results["machine"], results["versions"]
    seconds = sum(run["seconds"]["cpu"] for run in results["runs"].values())
    took = f"{seconds / 60:.1f} minutes" if seconds > 60 else f"{seconds:.1f} seconds"
    packages = ", ".join(
        f"{name} {versions[name]}" for name in ("python", "torch", "transformers", "numpy")
    )
    chip, gpu = machine["chip"] or machine["architecture"], machine["accelerator"] or "no GPU"
    last = results.get("last_run", results["date"])
    when = results["date"] + (f" to {last}" if last != results["date"] else "")
    return f"{len(results['runs'])} runs, {took} of CPU time on one thread of {chip}, {gpu}; {packages}; {when}."


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
    "depth-paired": depth_pairs,
    "depth-rates": depth_rates,
    "depth-made": circumstances,
}
