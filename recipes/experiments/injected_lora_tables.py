"""Write the tables of docs/results/adaptation.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

from pathlib import Path

from .draw import ROOT, draw_page
from .injected_lora import AFTER, FIRST, best_rate, key_of
from .store import FOLDER
from .tables import NOT_DONE, all_done, circumstances, detectable, mean_and_deviation, paired, table

PAGE = ROOT / "docs" / "results" / "adaptation.md"
#: What is read, and what of it a difference of one means: all in nats.
READ = {"held_out": "loss", "copying": "copying", "needle_keys": "needles"}


def values(results: dict, row: str, what: str, own: bool = False) -> list[float]:
    """Of all seeds, a hundred times the nats a token; with `own` those before the injection. None where one lacks."""
    runs = all_done(results, (key_of(row, seed) for seed in results["settings"]["seeds"]))
    return [100 * (run["own_attention"] if own else run)[what] for run in runs]


def models(results: dict) -> str:
    """Loss and retrieval, a row for each model."""
    rows = []
    for name in ("stock", "injected"):
        if name in results["runs"]:
            rows.append([name, "-", *(f"{100 * results['runs'][name][what]:.1f}" for what in READ)])
    for label, row, own in (
        ("LoRA alone", AFTER, True),
        (AFTER, AFTER, False),
        (FIRST, FIRST, False),
    ):
        found = [values(results, row, what, own) for what in READ]
        if all(found):
            rate = best_rate(results["settings"], results["runs"], row)
            rows.append([label, f"{rate:g}", *(mean_and_deviation(one, 1) for one in found)])
    return (
        table(["100 x nats a token", "learning rate", *READ.values()], rows) if rows else NOT_DONE
    )


def pairs(results: dict) -> str:
    """How much less is lost where injection comes first, seed by seed; and how much more than by LoRA alone."""
    rows = []
    for label, row, own in ((AFTER, AFTER, False), ("LoRA alone", AFTER, True)):
        both = [
            (
                [-x for x in values(results, FIRST, what)],
                [-x for x in values(results, row, what, own)],
            )
            for what in READ
        ]
        if all(mine and others for mine, others in both):
            power = max(detectable(*one) for one in both)
            rows.append([label, *(paired(*one) for one in both), f"{power:.1f}"])
    return (
        table([f"{FIRST}: gained over", *READ.values(), "what would be found"], rows)
        if rows
        else NOT_DONE
    )


TABLES = {
    "injected_lora": models,
    "injected_lora-paired": pairs,
    "injected_lora-made": circumstances,
}


def draw(folder: Path = FOLDER, page: Path = PAGE) -> None:
    """Write every table between its two marks; nothing where no run is done."""
    draw_page("injected_lora", TABLES, folder, page)
