"""hf_hyperattn.analysis.hyperbolicity against definitions, trees and scipy."""

import itertools

import pytest
import torch

from hf_hyperattn.analysis.hyperbolicity import (
    gromov_delta,
    hyperbolicity,
    rank_correlation,
    shuffled,
)
from hf_hyperattn.geometry import poincare


def four_point(distances):
    """The definition, quadruple by quadruple."""
    worst, d = 0.0, distances.tolist()
    for a, b, e, f in itertools.combinations(range(len(d)), 4):
        sums = sorted([d[a][b] + d[e][f], d[a][e] + d[b][f], d[a][f] + d[b][e]])
        worst = max(worst, (sums[2] - sums[1]) / 2)
    return worst


def tree(nodes):
    """Distances in a random tree with edges of random lengths."""
    draw = torch.Generator().manual_seed(0)
    d = torch.zeros(nodes, nodes, dtype=torch.float64)
    for node in range(1, nodes):
        parent = torch.randint(node, (), generator=draw).item()
        d[node, :node] = d[:node, node] = d[parent, :node] + 0.1 + torch.rand((), generator=draw)
    return d


def test_delta_is_that_of_the_definition():
    points = torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    d = torch.cdist(points, points)
    assert gromov_delta(d) == pytest.approx(four_point(d), rel=1e-6)
    assert gromov_delta(tree(30)) < 1e-12
    square = torch.tensor(
        [[0.0, 1, 2, 1], [1, 0, 1, 2], [2, 1, 0, 1], [1, 2, 1, 0]]
    )  # a ring of four: delta 1
    assert gromov_delta(square) == 1


def test_a_tree_is_0_and_a_ball_of_high_curvature_nears_it():
    d = tree(60)
    found = hyperbolicity(torch.arange(60), lambda a, b: d[a][:, b], size=20, draws=3)
    assert found.largest < 1e-12 and found.mean < 1e-12 and (found.size, found.draws) == (20, 3)
    directions = torch.randn(80, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    inside = poincare.expmap0(4 * directions, 1.0)
    pairwise = lambda a, b: poincare.distance(a[:, None], b[None], 1.0)
    flat, curved = (hyperbolicity(directions, size=30), hyperbolicity(inside, pairwise, size=30))
    assert curved.largest < flat.largest and curved.mean < flat.mean / 2


def test_the_mean_is_that_of_all_quadruples_within_its_error():
    points = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    d, every = torch.cdist(points, points), []
    for four in itertools.combinations(range(12), 4):
        part = d[list(four)][:, list(four)]
        every.append(2 * four_point(part) / part.max().item())
    found = hyperbolicity(points, quadruples=5000)
    assert abs(found.mean - sum(every) / len(every)) < 4 * found.mean_error < 0.02
    assert found.largest == pytest.approx(2 * four_point(d) / d.max().item(), rel=1e-6)
    assert (found.size, found.draws, found.largest_deviation) == (12, 1, 0.0)
    assert (
        hyperbolicity(points, quadruples=5000)
        == found
        != hyperbolicity(points, quadruples=5000, seed=1)
    )


def test_what_is_shuffled_keeps_each_coordinate_and_nothing_else():
    points = torch.randn(
        200, 3, generator=torch.Generator().manual_seed(0)
    )  # the seed of the order, too
    other = shuffled(points)
    assert torch.equal(other.sort(0).values, points.sort(0).values) and not torch.equal(
        other, points
    )
    assert torch.corrcoef(other.T)[0, 1].abs() < 0.2 and torch.equal(shuffled(points), other)
    together = shuffled(points[:, :1].expand(-1, 2))
    assert torch.corrcoef(together.T)[0, 1].abs() < 0.2


def test_rank_correlation_is_spearmans():
    stats = pytest.importorskip("scipy.stats")
    draw = torch.Generator().manual_seed(4)
    a = torch.randint(6, (50,), generator=draw).float()
    b = a + 3 * torch.randn(50, generator=draw)
    found = rank_correlation(a, b)
    assert found.value == pytest.approx(stats.spearmanr(a.numpy(), b.numpy()).statistic, rel=1e-9)
    assert -1 < found.low < found.value < found.high < 1 and found.count == 50
    assert rank_correlation(b, -b).value == pytest.approx(-1)


@pytest.mark.parametrize(
    "call, said",
    [
        (
            lambda: gromov_delta(torch.zeros(3, 4)),
            r"distances has the shape \(3, 4\); allowed: \[n, n\]",
        ),
        (lambda: gromov_delta(torch.full((4, 4), torch.nan)), "distances holds inf or nan"),
        (
            lambda: hyperbolicity(torch.zeros(3, 2)),
            "3 points, size=100, draws=10; allowed: at least 4",
        ),
        (lambda: rank_correlation(torch.zeros(5), torch.zeros(4)), r"\(5,\) and \(4,\) numbers"),
        (
            lambda: rank_correlation(torch.zeros(5), torch.arange(5)),
            "all numbers of one side are equal",
        ),
    ],
)
def test_errors(call, said):
    with pytest.raises(ValueError, match=said):
        call()
