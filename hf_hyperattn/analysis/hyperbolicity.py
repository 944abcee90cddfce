"""Measure whether points lie like the nodes of a tree, and whether a quantity follows another.

`hyperbolicity` estimates Gromov's delta from samples, and `rank_correlation` compares norms with a
frequency or a depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Random quadruples that share one sample of points.
BATCH = 1000
#: Points of such a sample.
BATCH_POINTS = 100
#: Smallest divisor; it makes the result 0 if all points of a sample coincide.
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Hyperbolicity:
    """Distance of points from a tree: 0 for every tree, at most 1.

    Args:
        largest: 2·delta / diameter of a sample of `size` points, averaged over samples. Delta is
            the largest over all quadruples of a sample, so it grows with `size`: compare it only
            at equal size, and with a control such as `shuffled`.
        largest_deviation: Standard deviation of this value over samples.
        mean: 2·delta / diameter of single quadruples, averaged over random quadruples of all
            points.
        mean_error: Standard error of `mean`.
        size: Number of points of a sample, or of all points if there are fewer.
        draws: Number of samples.
    """

    largest: float
    largest_deviation: float
    mean: float
    mean_error: float
    size: int
    draws: int


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation with its 95 % interval (Bonett and Wright 2000).

    Args:
        value: The correlation.
        low: Lower end of the interval.
        high: Upper end of the interval.
        count: Number of pairs.
    """

    value: float
    low: float
    high: float
    count: int


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Return the distances [m, k] of points [m, d] and [k, d], float64."""
    # By default, torch.cdist uses matrix products, which are inexact for points close together.
    return torch.cdist(a.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist")


def gromov_delta(distances: Tensor) -> float:
    """Compute Gromov's delta of a finite metric space, exactly.

    For four points, sort d(a,b) + d(c,d), d(a,c) + d(b,d) and d(a,d) + d(b,c). Half the difference
    of the two largest is the delta of these points. The result is the largest over all quadruples.

    Args:
        distances: [n, n], symmetric, 0 on the diagonal. Time grows as n⁴: 0.3 s for 100 points.

    Raises:
        ValueError: The matrix is not square, or holds numbers that are not finite.
    """
    if distances.ndim != 2 or distances.shape[0] != distances.shape[1]:
        raise ValueError(f"distances has the shape {tuple(distances.shape)}; allowed: [n, n]")
    if not distances.isfinite().all():
        raise ValueError("distances holds inf or nan; allowed: finite numbers")
    distances = distances.double()
    delta = 0.0
    for base in distances:
        # Gromov products (x|y) = (d(x,w) + d(y,w) - d(x,y)) / 2 with the base point w.
        products = (base[:, None] + base - distances) / 2
        # Delta with base w is the largest of min((x|z), (z|y)) - (x|y). The max-min product over z
        # runs row by row, so that no [n, n, n] tensor is needed.
        best = torch.full_like(products, -torch.inf)
        for row in products:
            best = torch.maximum(best, torch.minimum(row[:, None], row))
        delta = max(delta, (best - products).max().item())
    return delta


def hyperbolicity(
    points: Tensor,
    distance: Callable[[Tensor, Tensor], Tensor] = euclidean,
    size: int = 100,
    draws: int = 10,
    quadruples: int = 20_000,
    seed: int = 0,
) -> Hyperbolicity:
    """Estimate how far points are from lying on a tree.

    Args:
        points: [n, ...], one point per row, n >= 4.
        distance: Maps points [m, ...] and [k, ...] to distances [m, k].
        size: Number of points of a sample, at least 4. All its quadruples are considered.
        draws: Number of samples. If a sample is all points, only one is drawn.
        quadruples: Number of random quadruples for the mean.
        seed: Seed of the samples and quadruples.

    Raises:
        ValueError: There are fewer than 4 points, or `size` is below 4, or `draws` is below 1.
    """
    if min(len(points), size) < 4 or draws < 1:
        raise ValueError(
            f"{len(points)} points, size={size}, draws={draws}; allowed: at least 4, 4 and 1"
        )
    generator = torch.Generator().manual_seed(seed)
    if size >= len(points):
        size = len(points)
        draws = 1
    found = []
    for _ in range(draws):
        sample = points[torch.randperm(len(points), generator=generator)[:size]]
        distances = distance(sample, sample)
        found.append(2 * gromov_delta(distances) / max(distances.max().item(), TINY))
    largest = torch.tensor(found, dtype=torch.float64)
    single = measure_quadruples(points, distance, quadruples, generator)
    return Hyperbolicity(
        largest=largest.mean().item(),
        largest_deviation=largest.std().item() if draws > 1 else 0.0,
        mean=single.mean().item(),
        mean_error=(single.std() / len(single) ** 0.5).item(),
        size=size,
        draws=draws,
    )


def measure_quadruples(
    points: Tensor, distance: Callable, count: int, generator: torch.Generator
) -> Tensor:
    """Return 2·delta / diameter of `count` random quadruples, [count]."""
    found = []
    for start in range(0, count, BATCH):
        # One distance matrix of 100 points serves 1000 quadruples.
        sample = points[torch.randperm(len(points), generator=generator)[:BATCH_POINTS]]
        distances = distance(sample, sample).double()
        rows = min(BATCH, count - start)
        # The first four places of a random permutation are four different points.
        order = torch.rand(rows, len(sample), generator=generator, dtype=torch.float32).argsort(1)
        a, b, c, d = order[:, :4].T
        # Opposite pairs are neighbours here, so that even and odd rows add up to the three sums.
        pairs = torch.stack(
            [distances[i, j] for i, j in ((a, b), (c, d), (a, c), (b, d), (a, d), (b, c))]
        )
        sums = (pairs[::2] + pairs[1::2]).sort(0).values
        found.append((sums[2] - sums[1]) / pairs.amax(0).clamp_min(TINY))
    return torch.cat(found)


def shuffled(points: Tensor, seed: int = 0) -> Tensor:
    """Return the control of `hyperbolicity`: points [n, d] with independently shuffled coordinates.

    Every coordinate keeps its distribution. Relations between coordinates are lost.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = [column[torch.randperm(len(column), generator=generator)] for column in points.T]
    return torch.stack(columns, 1)


def rank_correlation(first: Tensor, second: Tensor) -> Correlation:
    """Compute Spearman's rank correlation, for example of norms with depths.

    Args:
        first: [n], n >= 4. Equal numbers share their mean rank.
        second: [n].

    Raises:
        ValueError: The shapes differ, there are fewer than 4 numbers, or all numbers of one tensor
            are equal.
    """
    if first.ndim != 1 or first.shape != second.shape or len(first) < 4:
        raise ValueError(
            f"{tuple(first.shape)} and {tuple(second.shape)} numbers; allowed: as many, [n], n >= 4"
        )
    ranks = torch.stack([mean_ranks(first), mean_ranks(second)])
    value = torch.corrcoef(ranks)[0, 1].clamp(-1, 1).item()
    if math.isnan(value):
        raise ValueError(
            "all numbers of one side are equal; allowed: at least two different ones on each"
        )
    # Fisher's transformation, with the standard error of Bonett and Wright for ranks.
    error = 1.96 * math.sqrt((1 + value**2 / 2) / (len(first) - 3))
    # atanh is infinite at -1 and 1.
    middle = math.atanh(min(max(value, -1 + 1e-12), 1 - 1e-12))
    return Correlation(
        value=value,
        low=math.tanh(middle - error),
        high=math.tanh(middle + error),
        count=len(first),
    )


def mean_ranks(values: Tensor) -> Tensor:
    """Return the rank of each number [n]. Equal numbers share their mean rank."""
    _, which, counts = values.double().cpu().unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[which]
