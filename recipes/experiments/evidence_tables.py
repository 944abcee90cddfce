"""Write the tables of docs/results/evidence.md from the results.

Rows without complete runs are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from hf_hyperattn.utils.files import write_atomically

from .claims import CLAIMS, SOURCES, Claim
from .draw import ROOT, put
from .findings import HOLDS, NOT, NOT_RUN, PARTLY, UNDECIDED, Found
from .tables import table

PAGE = ROOT / "docs" / "results" / "evidence.md"
VERDICTS = (HOLDS, PARTLY, NOT, UNDECIDED, NOT_RUN)
#: A cell of at most this number of words is easy to read (see the style of the documentation).
MOST_WORDS = 12
BELOW = "below"
#: One paired comparison, as `findings.gain` and `tables.paired` write it.
COMPARISON = re.compile(
    r"(?:(?P<measure>.+): )?(?P<difference>[+-][\d.]+ \([^)]*\), p [<=] [\d.]+)(?P<in_points> points)?"
    r"(?: against (?P<control>.+?))?(?: \(found from (?P<power>[\d.]+) on\))?"
)


def found(claim: Claim) -> Found:
    """What came out and the verdict; "not run" where no runs of the present settings are committed."""
    if isinstance(claim.found, str):
        return claim.found, claim.verdict
    try:
        return claim.found()
    except (KeyError, ValueError):
        return "the runs are not done", NOT_RUN


def parse_parts(text: str) -> tuple[list[list[str]], list[str]]:
    """Split the text of a finding into its paired comparisons and its other statements.

    Returns:
        Rows of measure, control, difference with interval and p, and detectable difference; and the
        statements without a paired difference.
    """
    rows, statements, measure = [], [], ""
    for part in text.split("; "):
        match = COMPARISON.fullmatch(part)
        if match is None:
            statements.append(part)
            continue
        # A part without a measure continues the one before it.
        measure = match["measure"] or measure
        if match["in_points"]:
            measure = f"{measure}, points"
        rows.append([measure, match["control"] or "", match["difference"], match["power"] or ""])
    return rows, statements


def claims(letter: str) -> str:
    """The claims of a source, a row each; below them their paired differences, and long results and commands."""
    rows, differences, notes = [], [], []
    for claim in CLAIMS:
        if claim.key[0] != letter:
            continue
        text, verdict = found(claim)
        paired, statements = parse_parts(text)
        differences += [[claim.key, *row] for row in paired]
        result = "; ".join(statements) or BELOW
        command = f"`{claim.command}`" if claim.command else ""
        # Long cells make a table hard to read: their text stands in the list below it.
        if len(result.split()) > MOST_WORDS:
            notes += [f"- **{claim.key}**: {statement}." for statement in statements]
            result = BELOW
        if len(command.split()) > MOST_WORDS:
            notes.append(f"- **{claim.key}**, command: {command}")
            command = BELOW
        rows.append([claim.key, claim.said, claim.test, result, f"**{verdict}**", command])
    parts = [left_table(["", "claim or question", "test", "result", "verdict", "command"], rows)]
    if notes:
        parts.append("\n".join(notes))
    if differences:
        parts.append(
            left_table(["", "measure", "against", "difference", "found from"], differences)
        )
    return "\n\n".join(parts)


def left_table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown with every column to the left."""
    lines = table(head, rows).splitlines()
    return "\n".join([lines[0], "| --- " * len(head) + "|", *lines[2:]])


def totals() -> str:
    """How many claims have which verdict, for each source."""
    counts = {
        letter: Counter(found(claim)[1] for claim in CLAIMS if claim.key[0] == letter)
        for letter in SOURCES
    }
    rows = [
        [SOURCES[letter], *(str(count[verdict]) for verdict in VERDICTS)]
        for letter, count in counts.items()
    ]
    every = sum(counts.values(), Counter())
    return table(
        ["source", *VERDICTS], [*rows, ["all", *(str(every[verdict]) for verdict in VERDICTS)]]
    )


def page(text: str) -> str:
    """The page with its tables anew.

    Raises:
        ValueError: it lacks a mark.
    """
    text = put(text, "evidence", totals())
    for letter in SOURCES:
        text = put(text, f"evidence-{letter}", claims(letter))
    return text


def draw(path: Path = PAGE) -> None:
    """Write every table between its two marks on the page."""
    write_atomically(path, page(path.read_text()))
