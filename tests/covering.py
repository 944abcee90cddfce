"""Covering arrays: few cases in which every pair of parameter values still meets.

Most faults need one value or two values that meet; three are rare. A full grid runs every combination, and grows
with the product of its axes. A covering array grows with the product of the two longest ones.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import TypeVar

Case = TypeVar("Case")


def cover_pairs(*axes: Iterable, allowed: Callable[..., bool] = lambda *values: True) -> list:
    """Return cases of a grid in which every pair of values of two axes meets.

    Args:
        axes: The values of each parameter.
        allowed: Whether a combination of values has a meaning. The default allows all.

    Returns:
        Tuples of one value per axis, in the order of the grid. The same axes give the same tuples.
    """
    axes = [list(axis) for axis in axes]
    grid = product(*(range(len(axis)) for axis in axes))
    pick = lambda places: tuple(axis[i] for axis, i in zip(axes, places, strict=True))  # noqa: E731
    places = [row for row in grid if allowed(*pick(row))]
    return [pick(row) for row in choose_covering(places, tuple)]


def choose_covering(
    cases: Iterable[Case],
    read_values: Callable[[Case], Sequence[Hashable]],
    strength: int = 2,
    covered: Iterable[Case] = (),
) -> list[Case]:
    """Return some of the cases in which all combinations of `strength` values meet.

    Args:
        cases: The cases to choose from. They need not be a whole grid.
        read_values: Returns the value of each parameter of a case.
        strength: Number of values that must meet: 2 for pairs, 3 for triples.
        covered: Cases that run anyway. The combinations in them are not covered again.

    Returns:
        Chosen cases, in their order. The same cases give the same choice.
    """
    cases = list(cases)
    combined = [set(combine(read_values(case), strength)) for case in cases]
    done = {found for case in covered for found in combine(read_values(case), strength)}
    # Ties are broken in a shuffled order: in the given one, most chosen cases would have each axis' first value.
    order = list(range(len(cases)))
    random.Random(0).shuffle(order)
    # A case never gains as others are chosen, so that only the first of the queue must be counted again.
    queue = [
        (-len(found), place, number)
        for place, (number, found) in zip(order, enumerate(combined), strict=True)
    ]
    heapq.heapify(queue)
    chosen = []
    while queue:
        _, place, number = heapq.heappop(queue)
        new = len(combined[number] - done)
        if new and queue and (-new, place) > queue[0][:2]:
            heapq.heappush(queue, (-new, place, number))
        elif new:
            chosen.append(number)
            done |= combined[number]
    return [cases[number] for number in sorted(chosen)]


def combine(values: Sequence[Hashable], strength: int) -> Iterator[tuple]:
    """Yield each choice of `strength` parameters with their values."""
    numbered = list(enumerate(values))
    return combinations(numbered, min(strength, len(numbered)))
