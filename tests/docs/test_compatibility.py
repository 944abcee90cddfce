"""docs/compatibility.md can be read: short cells, reasons in notes below; and its writer keeps it so."""

import re
from pathlib import Path

import pytest

from tests.zoo import report

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
WHY = "its attention pools queries or keys within the layer, and is not routed yet"
REFUSAL = (
    f"ValueError: attn_implementation='cone' cannot be used with model type 'x': {WHY}; use a family listed as working "
    "in docs/compatibility.md, or attn_implementation='sdpa'"
)
SHAPE = "was called with hidden states of shape (2, 4, 64) for 8 queries, of which head_fusion reads one row a query"
ERROR = f"refused: ValueError: A {SHAPE}; allowed: others"
HEAD_FUSION = f"{ERROR}; cone + head_fusion {ERROR}"


def rows(page: str) -> list[list[str]]:
    """The cells of all tables, without the lines that rule them."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
        if "---" not in line
    ]


def numbers(page: str) -> tuple[set[int], list[int]]:
    """The notes that tables name, and those that are there."""
    tables, _, notes = page.partition("\n## Notes\n")
    return set(map(int, re.findall(r"\bnote (\d+)", tables))), [
        int(n) for n in re.findall(r"^(\d+)\. ", notes, re.M)
    ]


def test_no_cell_is_too_long():
    cells = [cell for row in rows(PAGE) for cell in row]
    assert len(cells) > 5000 and max(map(len, cells)) <= report.LONGEST


def test_notes_are_there_and_are_named():
    named, there = numbers(PAGE)
    assert there == list(range(1, len(there) + 1)) and set(there) == named
    notes = re.split(r"^\d+\. ", PAGE.partition("\n## Notes\n")[2], flags=re.M)[1:]
    assert len(set(notes)) == len(notes)


def test_totals_are_those_of_the_rows():
    model_types = [row for row in rows(PAGE) if len(row) == 9 and row[0] != "model type"]
    for verdict, *counts, _ in (row for row in rows(PAGE) if len(row) == 4 and row[0]):
        matching = [row for row in model_types if verdict in ("all", row[1])]
        assert len(matching) == sum(map(int, counts)), verdict


def result(verdict: str, why: str = "", **checks) -> dict:
    return {"verdict": verdict, "why": why, "checks": checks}


@pytest.fixture
def page():
    ran = "2 of 4 hosts ran; as before: Pooling"
    held = dict.fromkeys(("unpatch", "reload"), (True, ""))
    results = {
        ("base", "a"): result("refused", REFUSAL),
        ("base", "b"): result("refused", REFUSAL.replace("'x'", "'y'")),
        ("base", "c"): result("works", by_name=(True, ran), generation=(None, "does not generate")),
        ("base", "d"): result(
            "works", by_name=(True, ""), identity=(None, HEAD_FUSION), gradients=(None, HEAD_FUSION)
        ),
        ("base", "e"): result(
            "failure", "identity: off by 1|2", identity=(False, "off by 1|2"), **held
        ),
        ("base", "f"): result(
            "not built", "ImportError: FModel requires the timm library but it was not found in"
        ),
    }
    return report.page(results, {"transformers": "5", "torch": "2", "python": "3"})


def test_what_the_writer_makes_of_reasons(page):
    notes = {row[0]: row[-1] for row in rows(page) if len(row) == 9}
    assert (
        notes["a"] == notes["b"] == "note 1"
        and notes["c"] == "2 of 4 hosts ran; as before: Pooling"
    )
    assert (
        notes["d"] == "note 2" and notes["e"] == r"identity: off by 1\|2" and "timm" in notes["f"]
    )
    assert (
        f"\n1. {WHY}\n2. identity, gradients: cone + head_fusion refused: hidden states came in another form"
        in page
    )
    assert "ImportError" not in page and "\n3. " not in page
