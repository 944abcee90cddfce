"""Are points arranged like a tree? Gromov's delta of a sample, and whether norms follow a frequency or a depth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hyperbolicity:
    """How far points are from a tree: 0 for every tree, 1 at most.

    Args:
        largest: 2 delta / diameter of a sample of `size` points, delta over all its quadruples; the mean over samples.
            It grows with `size`: compare at equal size, and beside a control such as `shuffled`.
        largest_deviation: the standard deviation over samples.
        mean: the mean over random quadruples of all points of their own 2 delta / diameter.
        mean_error: its standard error.
        size: points of a sample, or all where there are fewer.
        draws: number of samples.
    """

    largest: float
    largest_deviation: float
    mean: float
    mean_error: float
    size: int
    draws: int


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of `count` pairs, and its 95 % interval (Bonett and Wright 2000)."""

    value: float
    low: float
    high: float
    count: int


def euclidean(a: Tensor, b: Tensor) -> Tensor:
    """Distances of points [m, d] and [k, d], as [m, k]; exact for near ones, as torch.cdist by itself is not."""
    return torch.cdist(a.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist")


def gromov_delta(distances: Tensor) -> float:
    """Gromov's delta of a finite metric space, exactly: the largest, over quadruples, of half the difference of the two
    larger ones of d(a,b) + d(c,d), d(a,c) + d(b,d) and d(a,d) + d(b,c).

    Args:
        distances: [n, n], symmetric, 0 on the diagonal. Time grows as n⁴: 0.3 s for 100 points.

    Raises:
        ValueError: it is no square matrix, or holds numbers that are not finite.
    """
    if distances.ndim != 2 or distances.shape[0] != distances.shape[1]:
        raise ValueError(f"distances has the shape {tuple(distances.shape)}; allowed: [n, n]")
    if not distances.isfinite().all():
        raise ValueError("distances holds inf or nan; allowed: finite numbers")
    distances, delta = distances.double(), 0.0
    for base in distances:
        products = (
            base[:, None] + base - distances
        ) / 2  # of every two points, as seen from this one
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
    """How far points are from lying on a tree, by samples of them.

    Args:
        points: [n, ...], one point a row, n >= 4.
        distance: of points [m, ...] and [k, ...], as [m, k].
        size: points of a sample, of which all quadruples are looked at; at least 4.
        draws: number of samples; 1 where a sample is all points.
        quadruples: number of random quadruples for the mean.
        seed: of what is drawn.

    Raises:
        ValueError: there are fewer than 4 points, or samples of fewer.
    """
    if min(len(points), size) < 4 or draws < 1:
        raise ValueError(
            f"{len(points)} points, size={size}, draws={draws}; allowed: at least 4, 4 and 1"
        )
    draw = torch.Generator().manual_seed(seed)
    draws, size = (draws, size) if size < len(points) else (1, len(points))
    found = []
    for _ in range(draws):
        sample = points[torch.randperm(len(points), generator=draw)[:size]]
        distances = distance(sample, sample)
        found.append(
            2
            * gromov_delta(distances)
            / max(distances.max().item(), torch.finfo(torch.float64).tiny)
        )
    largest = torch.tensor(found, dtype=torch.float64)
    of_four = _of_quadruples(points, distance, quadruples, draw)
    return Hyperbolicity(
        largest.mean().item(),
        largest.std().item() if draws > 1 else 0.0,
        of_four.mean().item(),
        (of_four.std() / len(of_four) ** 0.5).item(),
        size,
        draws,
    )


def _of_quadruples(points: Tensor, distance: Callable, count: int, draw: torch.Generator) -> Tensor:
    """2 delta / diameter of each of `count` random quadruples, [count], of all points of a hundred at a time."""
    found = []
    for start in range(0, count, 1000):
        sample = points[torch.randperm(len(points), generator=draw)[:100]]
        distances = distance(sample, sample).double()
        rows = min(1000, count - start)
        a, b, c, d = (
            torch.rand(rows, len(sample), generator=draw, dtype=torch.float32).argsort(1)[:, :4].T
        )
        pairs = torch.stack(
            [distances[i, j] for i, j in ((a, b), (c, d), (a, c), (b, d), (a, d), (b, c))]
        )
        sums = (pairs[::2] + pairs[1::2]).sort(0).values
        found.append((sums[2] - sums[1]) / pairs.amax(0).clamp_min(torch.finfo(torch.float64).tiny))
    return torch.cat(found)


def shuffled(points: Tensor, seed: int = 0) -> Tensor:
    """The control of `hyperbolicity`: each coordinate of points [n, d] with its values in another order of the points,
    so that their spread is kept and what they have to do with one another is lost.
    """
    draw = torch.Generator().manual_seed(seed)
    return torch.stack(
        [column[torch.randperm(len(column), generator=draw)] for column in points.T], 1
    )


def rank_correlation(first: Tensor, second: Tensor) -> Correlation:
    """Spearman's correlation, as of the norms of points with the frequency of words or with a known depth.

    Args:
        first, second: [n] each, n >= 4; equal numbers share their mean rank.

    Raises:
        ValueError: the shapes differ, there are too few numbers, or all are equal.
    """
    if first.ndim != 1 or first.shape != second.shape or len(first) < 4:
        raise ValueError(
            f"{tuple(first.shape)} and {tuple(second.shape)} numbers; allowed: as many, [n], n >= 4"
        )
    ranks = torch.stack([_ranks(first), _ranks(second)])
    value = torch.corrcoef(ranks)[0, 1].clamp(-1, 1).item()
    if math.isnan(value):
        raise ValueError(
            "all numbers of one side are equal; allowed: at least two different ones on each"
        )
    error = 1.96 * math.sqrt((1 + value**2 / 2) / (len(first) - 3))
    middle = math.atanh(min(max(value, -1 + 1e-12), 1 - 1e-12))
    return Correlation(value, math.tanh(middle - error), math.tanh(middle + error), len(first))


def _ranks(values: Tensor) -> Tensor:
    """The rank of each number [n], the mean one where several are equal."""
    _, which, counts = values.double().cpu().unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[which]
