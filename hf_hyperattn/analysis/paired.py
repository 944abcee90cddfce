"""Compare two ways of training: Student's paired t test over runs with the same seeds.

`paired` makes one comparison, `holm` corrects the p values of several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

#: Two-sided significance level of the test.
LEVEL = 0.05
#: Power of the test at a mean of size `Paired.detectable`.
POWER = 0.8
#: Halvings of the interval in which a quantile lies; 80 exceed the precision of float64.
HALVINGS = 80


@dataclass(frozen=True)
class Paired:
    """Differences of paired values, and inference about their mean.

    Args:
        mean: Mean difference.
        deviation: Sample standard deviation of the differences.
        low: Lower end of the 95 % confidence interval of the mean.
        high: Upper end of this interval.
        p: Two-sided p value of the hypothesis that the mean is 0.
        detectable: Size of a mean that this test (5 % level) would detect in 80 % of cases, given
            the observed deviation.
        count: Number of pairs.
    """

    mean: float
    deviation: float
    low: float
    high: float
    p: float
    detectable: float
    count: int


def paired(mine: Sequence[float], others: Sequence[float]) -> Paired:
    """Run the paired t test on the differences `mine` - `others`.

    Args:
        mine: At least 2 values.
        others: As many values, in the same order.

    Raises:
        ValueError: The sequences differ in length, have fewer than 2 values, or hold NaN or inf.
    """
    if len(mine) != len(others) or len(mine) < 2:
        raise ValueError(
            f"{len(mine)} and {len(others)} numbers; allowed: as many of each, at least 2"
        )
    differences = [a - b for a, b in zip(mine, others)]
    if not all(map(math.isfinite, differences)):
        raise ValueError("the numbers hold nan or inf; allowed: finite numbers")
    count = len(differences)
    free = count - 1
    middle = mean(differences)
    deviation = stdev(differences)
    error = deviation / count**0.5
    if error:
        p = 2 * (1 - t_share(abs(middle) / error, free))
    else:
        # All differences are equal, and t is not defined: p is 1 if they are 0, else 0.
        p = float(middle == 0)
    half_interval = t_quantile(1 - LEVEL / 2, free) * error
    return Paired(
        mean=middle,
        deviation=deviation,
        low=middle - half_interval,
        high=middle + half_interval,
        p=p,
        detectable=half_interval + t_quantile(POWER, free) * error,
        count=count,
    )


def holm(values: Sequence[float]) -> list[float]:
    """Correct the p values of several tests (Holm 1979).

    If no effect exists, the chance that any corrected value is below 0.05 is at most 5 %.

    Args:
        values: The p values.

    Returns:
        The corrected p values, in the same order.
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, i in enumerate(order):
        # The running maximum keeps the order: a larger p value never becomes the smaller one.
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = largest
    return corrected


def t_share(t: float, free: int) -> float:
    """Return the probability that Student's t is below `t`.

    Abramowitz and Stegun, equations 26.7.3 (odd) and 26.7.4 (even): finite sums in the angle
    atan(t / √free).

    Args:
        t: Upper limit.
        free: Degrees of freedom, an integer.
    """
    angle = math.atan(t / free**0.5)
    squared_cosine = math.cos(angle) ** 2
    is_odd = free % 2
    term = math.cos(angle) if is_odd else 1.0
    # With one degree of freedom the sum is empty.
    total = term if free > 1 else 0.0
    for i in range(2 + is_odd, free - 1, 2):
        term *= squared_cosine * (i - 1) / i
        total += term
    # `inside` is the probability of the interval from -t to t.
    if is_odd:
        inside = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        inside = math.sin(angle) * total
    return 0.5 + inside / 2


def t_quantile(share: float, free: int) -> float:
    """Return the number below which this share of Student's distribution lies.

    Args:
        share: A probability from 0.5 to below 1.
        free: Degrees of freedom, an integer.
    """
    # Double the upper end until it is above the quantile, then halve the interval.
    low, high = 0.0, 1.0
    while t_share(high, free) < share:
        high *= 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if t_share(middle, free) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2
