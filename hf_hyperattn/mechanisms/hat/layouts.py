"""Layouts: how many cross-segment blocks (C) follow each segment-wise block (S).

A layout is a name of the paper's, stretched to any number of segment-wise blocks, or a pattern such as "S S SC S S SC":
groups of one S and the Cs behind it, one group for each segment-wise block.
"""

from __future__ import annotations

import re

from ...fields import short

#: The published layouts; `counts` makes them for other numbers of blocks.
PUBLISHED = {
    "I1": "SC SC SC SC SC SC",
    "I2": "S SCC S SCC S SCC",
    "I3": "S SC S SC S SC S SC",
    "LC1": "S S S S S S SC SC SC",
    "LC2": "S S S S S SCC S SCC",
    "EC1": "S S SCC S SCC S S S",
    "EC2": "S S SC SC SC S S S S",
    "AH": "S S S S S S S SCCCC",
}
LAYOUTS = tuple(PUBLISHED)
PATTERN = re.compile(r"SC*( SC*)*")


def is_layout(layout: object) -> bool:
    """Whether it is a name or a pattern."""
    return isinstance(layout, str) and (layout in PUBLISHED or PATTERN.fullmatch(layout) is not None)


def counts(layout: str, blocks: int) -> tuple[int, ...]:
    """How many cross-segment blocks follow each of the segment-wise blocks.

    With L blocks, and shares of L rounded, half up, to at least 1:

    - I1: one after each. I2: two after every second. I3: one after every second. The last block is among them.
    - LC1: one after each of the last L/3. LC2: two after every second of the last L/2.
    - EC1: L/4 plain blocks, then two after every second of L/2. EC2: 2L/9 plain blocks, then one after each of L/3.
    - AH: L/2, and at most 4, after the last.

    Args:
        layout: one of `LAYOUTS`, or a pattern.
        blocks: L, the number of segment-wise blocks, from 1.

    Raises:
        ValueError: no such layout, or a pattern of another number of groups.
    """
    if not is_layout(layout):
        raise ValueError(
            f"layout={short(layout)} is not allowed; allowed: {', '.join(LAYOUTS)}, or a pattern such as 'S S SC' "
            "with one group for each segment-wise block"
        )
    if layout not in PUBLISHED:
        groups = tuple(group.count("C") for group in layout.split(" "))
        if len(groups) != blocks:
            raise ValueError(
                f"layout={short(layout)} has {len(groups)} groups; allowed: one for each of the {blocks} segment-wise "
                "blocks"
            )
        return groups
    last, share = range(blocks - 1, -1, -1), lambda part: int(part * blocks + 0.5)
    thirds, quarters = max(1, share(1 / 3)), max(1, share(1 / 4))
    number, followed = {
        "I1": (1, last),
        "I2": (2, last[::2]),
        "I3": (1, last[::2]),
        "LC1": (1, last[:thirds]),
        "LC2": (2, last[::2][:quarters]),
        "EC1": (2, range(share(1 / 4), blocks)[::2][:quarters]),
        "EC2": (1, range(share(2 / 9), blocks)[:thirds]),
        "AH": (min(4, max(1, share(1 / 2))), last[:1]),
    }[layout]
    return tuple(number if i in followed else 0 for i in range(blocks))
