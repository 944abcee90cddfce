"""Is one way of training better than another? Student's t over runs that were paired by their seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

#: Two-sided error of the first kind, and the power at which `Paired.detectable` is told.
LEVEL, POWER = 0.05, 0.8


@dataclass(frozen=True)
class Paired:
    """The differences of paired values, and what may be said of their mean.

    Args:
        mean: of the differences.
        deviation: their sample standard deviation.
        low, high: the 95 % interval of the mean.
        p: two-sided, of a mean of 0.
        detectable: the size of a mean that this test at 5 % finds four times in five, by the deviation that was seen.
        count: number of pairs.
    """

    mean: float
    deviation: float
    low: float
    high: float
    p: float
    detectable: float
    count: int


def paired(mine: Sequence[float], others: Sequence[float]) -> Paired:
    """The paired t test of two sequences of n >= 2 numbers, the first less the second.

    Raises:
        ValueError: they differ in length, are fewer than 2, or hold nan or inf.
    """
    if len(mine) != len(others) or len(mine) < 2:
        raise ValueError(
            f"{len(mine)} and {len(others)} numbers; allowed: as many of each, at least 2"
        )
    differences = [a - b for a, b in zip(mine, others)]
    if not all(map(math.isfinite, differences)):
        raise ValueError("the numbers hold nan or inf; allowed: finite numbers")
    count, middle, deviation = len(mine), mean(differences), stdev(differences)
    error, free = deviation / count**0.5, count - 1
    p = 2 * (1 - t_share(abs(middle) / error, free)) if error else float(middle == 0)
    half = t_quantile(1 - LEVEL / 2, free) * error
    detectable = half + t_quantile(POWER, free) * error
    return Paired(middle, deviation, middle - half, middle + half, p, detectable, count)


def holm(values: Sequence[float]) -> list[float]:
    """The p values of several tests, corrected so that any is below 0.05 by chance once in twenty (Holm 1979)."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    corrected, largest = [0.0] * len(values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = largest
    return corrected


def t_share(t: float, free: int) -> float:
    """The share of Student's distribution of `free` whole degrees of freedom below t (Abramowitz, Stegun 26.7.3-4)."""
    angle = math.atan(t / free**0.5)
    cosine, odd = math.cos(angle) ** 2, free % 2
    term = math.cos(angle) if odd else 1.0
    total = term if free > 1 else 0.0
    for i in range(2 + odd, free - 1, 2):
        term *= cosine * (i - 1) / i
        total += term
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + inside / 2


def t_quantile(share: float, free: int) -> float:
    """The number below which that share of Student's distribution is, by halving; 0.5 <= share < 1."""
    low, high = 0.0, 1.0
    while t_share(high, free) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_share(middle, free) < share else (low, middle)
    return (low + high) / 2
