"""docs/roads.md out of the cells."""

from __future__ import annotations

import re
import tempfile

from tests.roads.cases import BY_LABEL, CASES
from tests.roads.outcome import FACTOR, Cell
from tests.roads.road import GROUPS, ROADS

MEANING = {
    "equal": "the mechanism is there: logits are the same, to the difference that the cell names",
    "warned": "it is not there, and a warning of ours says so; the words are below",
    "refused": "an error of one line says what cannot be done, and what can; the words are below",
    "no road": "the stock model cannot take this road either, so that there is nothing to lose; why is below",
    "not run": "a program of a third party is missing",
    "silent": "**failure**: other logits, and not a word",
    "crash": "**failure**: an error that does not say what to do",
    "vacuous": "**failure**: the road loses so much of any model that the cell shows nothing",
}
HEAD = """# Roads

Written by `make roads`. Every mechanism, by patch, by name and by conversion, takes every road of the ecosystem that we
know: files, copies, other dtypes and devices, compilers, exporters, quantisers, trainers, adapters, several processes.
At its end it computes what it did before (the number is the largest difference of logits, as a share of the largest
logit where that is above 1), or we refuse, or we warn. No cell may be anything else.

The models are tiny (3 layers, 4 heads, random weights), patched in layers 1 and 2; all added parameters are moved
away from where they start. The tolerance is 1e-5 (1e-4 where weights are put together anew, as in a merge; 5e-4 for
the midpoint, whose float32 gradients are 3e-4 from those of float64; 1e-2 in float16), or {factor} times what the
stock model loses on the same road. Of PEFT's methods one of each kind is tried with every case, the others with
three; what takes long with six.

{versions}
{left_out}

## Totals

{totals}
"""


def left_out(cells: dict) -> str:
    """A sentence that names the roads of which cells are missing; empty for the whole table."""
    missing: dict[str, int] = {}
    for road in ROADS.values():
        number = sum(road.open_to(case) and (road.name, case.label) not in cells for case in CASES)
        if number:
            missing[road.name] = number
    if not missing:
        return ""
    names = "; ".join(f"{name} ({number})" for name, number in missing.items())
    return f"\n**Not in this table**, with the number of their cells, since the run was ended before them: {names}.\n"


def totals(cells: dict) -> dict[str, int]:
    """Outcome -> number of cells."""
    found = [c.outcome for c in cells.values()]
    return {outcome: found.count(outcome) for outcome in MEANING}


def page(cells: dict, versions: dict) -> str:
    """The whole page, as Markdown."""
    table = ["| outcome | cells | meaning |", "| --- | --- | --- |"]
    table += [f"| {o} | {n} | {MEANING[o]} |" for o, n in totals(cells).items()]
    table += [f"| all | {len(cells)} | |"]
    notes: dict[str, int] = {}
    lines = [
        HEAD.format(
            factor=FACTOR,
            totals="\n".join(table),
            versions=", ".join(f"{n} {v}" for n, v in versions.items()) + ".",
            left_out=left_out(cells),
        )
    ]
    for how, title in (("patch", "By patch"), ("convert", "By conversion"), ("name", "By name")):
        labels = [case.label for case in CASES if case.how == how]
        for group in GROUPS:
            roads = [
                r.name
                for r in ROADS.values()
                if r.group == group and any((r.name, label) in cells for label in labels)
            ]
            if roads:
                lines += ["", f"## {title}: {group.lower()}", ""]
                lines += grid(roads, labels, cells, notes)
    lines += ["", "## Words", ""]
    lines += [f"{number}. {text}" for text, number in notes.items()]
    return "\n".join(lines) + "\n"


def grid(roads: list[str], labels: list[str], cells: dict, notes: dict) -> list[str]:
    """One table: a row a road, a column a mechanism."""
    names = [BY_LABEL[label].mechanism for label in labels]
    rows = ["| road | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for name in roads:
        found = [show(cells.get((name, label)), label, notes) for label in labels]
        rows.append(f"| {name} | " + " | ".join(found) + " |")
    return rows


def show(cell: Cell | None, label: str, notes: dict) -> str:
    """One cell: a number, or a word with the number of its note."""
    if cell is None:
        return ""
    if cell.outcome == "equal":
        return "0" if cell.difference == 0 else f"{cell.difference:.0e}"
    words = " ".join(
        re.sub(rf"{re.escape(tempfile.gettempdir())}/[^/ ]+", "FOLDER", cell.words).split()
    )
    words = words.replace("|", "\\|")[:600]
    number = notes.setdefault(words, len(notes) + 1)
    outcome = cell.outcome if cell.holds or cell.outcome == "not run" else f"**{cell.outcome}**"
    return f"{outcome} [{number}]"
