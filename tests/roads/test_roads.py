"""No silent change: every mechanism by every road is equal, refused or warned.

The fast roads are part of `make test`, the others have the marker `roads`; those of two processes are left to
`make roads`, which shares a pair of processes among them.
"""

from __future__ import annotations

import pytest

from tests.roads import adapters, files, processes, running, tools  # noqa: F401  they register roads
from tests.roads.cases import BY_LABEL, CASES, MARGIN
from tests.roads.outcome import cell
from tests.roads.road import ROADS

CELLS = [
    pytest.param(
        road.name, case.label, marks=() if road.fast else pytest.mark.roads, id=f"{road.name}-{case.label}"
    )
    for road in ROADS.values()
    for case in CASES
    if road.open_to(case) and road.ranks == 1
]


@pytest.fixture(scope="module")
def controls() -> dict:
    """What the stock models lose, by road."""
    return {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_a_lost_mechanism_would_be_seen(case):
    assert case.margin > MARGIN


@pytest.mark.parametrize("road, case", CELLS)
def test_no_silent_change(road, case, controls, tmp_path):
    found = cell(ROADS[road], BY_LABEL[case], tmp_path, controls)
    if found.outcome == "not run":
        pytest.skip(found.words)
    assert found.holds, found
