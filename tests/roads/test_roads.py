"""No silent change: every mechanism by every road is equal, refused or warned.

The fast roads are part of `make test`, for the cases that differ most; the others have the marker `roads`. Those of two
processes are left to `make roads`, which shares a pair of processes among them.
"""

from __future__ import annotations

import pytest

from tests.covering import choose_covering
from tests.roads import adapters, files, processes, running, situations, tools  # noqa: F401  they register roads
from tests.roads.cases import BY_LABEL, CASES, MARGIN
from tests.roads.outcome import cell
from tests.roads.road import ROADS

#: One mechanism of each stage, by patch, by name and by conversion; the roads in EVERY take them all.
TELLING = (
    "cone (patch)",
    "hype (patch)",
    "hsa (patch)",
    "talking_heads (patch)",
    "collaborative (patch)",
    "cone (name)",
    "hsa (name)",
    "hat (convert)",
)
EVERY = ("save and load", 'set_attn_implementation("eager")')


def read_values(cell) -> tuple:
    """Return the road, the mechanism, and the way in which it was put in."""
    road, case = cell
    return road.name, case.mechanism, case.how


OPEN = [
    (road, case)
    for road in ROADS.values()
    for case in CASES
    if road.open_to(case) and road.ranks == 1
]
TELLING_CELLS = [(road, case) for road, case in OPEN if road.fast and case.label in TELLING]
EVERY_CELLS = [(road, case) for road, case in OPEN if road.fast and road.name in EVERY]
#: Cells of `make test`: on every fast road each telling mechanism, and each way to put one in.
QUICK = {
    (road.name, case.label)
    for road, case in choose_covering(TELLING_CELLS, read_values, covered=EVERY_CELLS) + EVERY_CELLS
}
CELLS = [
    pytest.param(
        road.name,
        case.label,
        marks=() if (road.name, case.label) in QUICK else pytest.mark.roads,
        id=f"{road.name}-{case.label}",
    )
    for road, case in OPEN
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
