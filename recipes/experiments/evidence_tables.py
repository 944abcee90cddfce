"""The tables of docs/evidence.md: every claim of `claims.py` with its verdict, from committed results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hf_hyperattn.files import write_atomically

from .claims import CLAIMS, SOURCES, Claim
from .draw import ROOT, put
from .findings import HOLDS, NOT, NOT_RUN, PARTLY, UNDECIDED, Found
from .tables import table

PAGE = ROOT / "docs" / "evidence.md"
VERDICTS = (HOLDS, PARTLY, NOT, UNDECIDED, NOT_RUN)


def found(claim: Claim) -> Found:
    """What came out and the verdict; "not run" where no runs of the present settings are committed."""
    if isinstance(claim.found, str):
        return claim.found, claim.verdict
    try:
        return claim.found()
    except (KeyError, ValueError):
        return "the runs are not done", NOT_RUN


def claims(letter: str) -> str:
    """The claims of a source, a row each."""
    rows = []
    for claim in CLAIMS:
        if claim.key[0] == letter:
            text, verdict = found(claim)
            command = f"`{claim.command}`" if claim.command else ""
            rows.append([claim.key, claim.said, claim.test, text, f"**{verdict}**", command])
    head = ["", "claim or question", "test", "result", "verdict", "command"]
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
