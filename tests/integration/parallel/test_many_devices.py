"""docs/results/many_devices.md is drawn from the committed results, and they have every mechanism and layout."""

from __future__ import annotations

import json

import pytest

from tests.integration.parallel.many_devices import COLUMNS, PAGE, RESULTS, draw
from tests.integration.parallel.parallel import PATCHES

DIFFERENCES = json.loads(RESULTS.read_text())["differences"]
#: Models of these layouts have rotary positions, which collaborative heads refuse.
ROTARY = {"pipeline", "experts, heads", "experts, FSDP2"} | {
    "FSDP2, heads",
    "replicated FSDP2",
    "experts, FSDP2, heads",
}


def test_the_page_is_drawn_from_the_results():
    """`python -m tests.integration.parallel.many_devices --draw` draws it again."""
    assert PAGE.read_text(encoding="utf-8") == draw(json.loads(RESULTS.read_text()))


@pytest.mark.parametrize("name", PATCHES)
def test_every_layout_was_compared(name):
    missing = {*COLUMNS.values()} - DIFFERENCES[name].keys()
    assert missing == (ROTARY if PATCHES[name]("llama") is None else set())
    assert max(DIFFERENCES[name].values()) <= 1e-5
