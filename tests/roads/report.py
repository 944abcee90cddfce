"""docs/roads.md out of the cells."""

from __future__ import annotations

import re
import tempfile
import textwrap

from tests.roads.cases import BY_LABEL, CASES
from tests.roads.outcome import FACTOR, Cell
from tests.roads.road import GROUPS, ROADS

MEANING = {
    "equal": "the mechanism is there, with the same logits",
    "warned": "it is not there, and a warning of ours says so",
    "refused": "an error says what cannot be done, and what can",
    "no road": "the stock model cannot take this road either",
    "not run": "a program of a third party is missing",
    "silent": "**failure**: other logits, without a message",
    "crash": "**failure**: an error that does not say what to do",
    "vacuous": "**failure**: any model loses too much on this road",
}
HEAD = """# Roads

Does a mechanism survive saving, copying, converting, compiling, exporting, quantising, training and adapters?
`make roads` took every mechanism by every such *road*, and wrote this page. At the end of a road the mechanism
computes what it did before, or we refuse, or we warn. A cell shows the largest difference of logits, or the outcome
with the number of its [message](#messages).

- **Difference**: as a share of the largest logit if that is above 1.
- **Models**: tiny (3 layers, 4 heads, random weights), patched in layers 1 and 2. All added parameters are moved away
  from their start.
- **Tolerance**: 1e-5, or {factor} times the loss of the stock model on the same road. It is 1e-4 if weights are
  combined, as in a merge, and 1e-2 in float16. For the midpoint it is 5e-4: its float32 gradients are 3e-4 from those
  of float64.
- **Coverage**: of PEFT's methods, one of each kind is tried with every case, the others with three. Slow roads are
  tried with six cases.

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
    return f"\n**Not in this table**, with the number of their cells, because the run ended before them: {names}.\n"


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
    lines += ["", "## Messages", "", "```text"]
    lines += [write_message(number, text) for text, number in notes.items()]
    return "\n".join([*lines, "```"]) + "\n"


def write_message(number: int, text: str) -> str:
    """Return a message with its number, in lines of 120 characters."""
    start = f"{number:3}. "
    return textwrap.fill(
        start + text,
        120,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


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
    words = words[:600]
    number = notes.setdefault(words, len(notes) + 1)
    outcome = cell.outcome if cell.holds or cell.outcome == "not run" else f"**{cell.outcome}**"
    return f"{outcome} [{number}]"
