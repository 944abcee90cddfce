"""Write the tables of docs/results/hsa_experiments.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from hf_hyperattn.utils.files import write_atomically

from .draw import ROOT, put
from .store import FOLDER, load
from .tables import mean_and_deviation, table

PAGE = ROOT / "docs" / "results" / "hsa_experiments.md"


def minilm(results: dict) -> str:
    """Cosines, a row for each way and choice of layers."""
    settings, runs = results["settings"], results["runs"]
    kinds = list(settings["read_on"])
    head = ["tying, windows", "layers", "pairs", *kinds, "all", "least"]
    rows = []
    for way in settings["ways"]:
        for choice in ("chosen", "interleaved"):
            found = runs.get(f"{way}; {choice}")
            if found is None:
                continue
            layers = ", ".join(map(str, found["layers"])) + (
                " (paper)" if choice == "interleaved" else ""
            )
            cosines = [f"{found[k]:.4f}" for k in (*kinds, "mean", "least")]
            rows.append([way, layers, f"{100 * found['pairs']:.0f} %", *cosines])
    return table(head, rows)


def layers(results: dict) -> str:
    """Cosines on the texts that layers are chosen on, a row for each way, one layer patched alone."""
    settings, runs = results["settings"], results["runs"]
    rows = []
    for way in settings["ways"]:
        found = [runs.get(f"{way}; layer {layer}") for layer in range(6)]
        if all(found):
            rows.append([way, *(f"{f['mean']:.4f}" for f in found)])
    return table(["tying, windows", *(f"layer {n}" for n in range(6))], rows)


def probe(results: dict) -> str:
    """Accuracy, a row for each model."""
    runs, rows = results["runs"], []
    right = runs["stock"]["right"]
    for name in ("stock", *results["settings"]["ways"]):
        if name not in runs:
            continue
        found = runs[name]
        other = sum(a != b for a, b in zip(right, found["right"], strict=True))
        change = 100 * (found["accuracy"] - runs["stock"]["accuracy"])
        rows.append([name, f"{100 * found['accuracy']:.1f} %", f"{change:+.1f}", str(other)])
        rows[-1][1:1] = [", ".join(map(str, found["layers"])) or "-"]
    return table(["model", "layers", "accuracy", "points", "reviews judged otherwise"], rows)


def trained(results: dict) -> str:
    """Accuracy over seeds, a row for each model, of models trained from scratch."""
    settings, runs, rows = results["settings"], results["runs"], []
    for name in settings["models"]:
        found = [runs[key] for seed in settings["seeds"] if (key := f"{name}, seed {seed}") in runs]
        if len(found) < 2:
            continue
        accuracies = [100 * run["accuracy"] for run in found]
        seconds = statistics.mean(run["seconds"]["cpu"] for run in found)
        rows.append(
            [
                name,
                f"{found[0]['parameters']:,}",
                str(len(found)),
                mean_and_deviation(accuracies, 1),
            ]
        )
        rows[-1] += [" / ".join(f"{a:.1f}" for a in accuracies), f"{seconds:.0f} s"]
    return table(["model", "parameters", "seeds", "accuracy, %", "by seed", "CPU time a run"], rows)


#: Names of the marks on the page: results and how they become a table.
TABLES = {
    "hsa_minilm": ("hsa_minilm", minilm),
    "hsa_minilm-layers": ("hsa_minilm", layers),
    "hsa_probe": ("hsa_probe", probe),
    "hsa_joined": ("hsa_joined", trained),
    "hsa_imdb": ("hsa_imdb", trained),
}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write every table between its two marks on the page.

    Raises:
        ValueError: a result is missing, or the page lacks a mark.
    """
    text = page.read_text()
    for name, (results, make) in TABLES.items():
        text = put(text, name, make(load(results, folder)))
    write_atomically(page, text)
