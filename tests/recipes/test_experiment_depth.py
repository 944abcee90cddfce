"""recipes/experiments: the depth experiment, its task, models and choice of rates."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from experiments import depth, lca_task, scores, wordnet
from experiments.fitting import size_of
from experiments.lca_model import Encoder
from experiments.scores import KINDS

from hf_hyperattn import functional as ha

from .nouns import write_nouns


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    parents = write_nouns(tmp_path_factory.mktemp("nouns") / "data.noun", fan=3, levels=5)
    return lca_task.LcaTask(wordnet.sample_paths(parents, 5, 60, 0), named=2, held_out=4)


def paths_of(task, row) -> list[tuple]:
    """The two whole paths that a row of tokens names, found by their leaves."""
    whole = {path[-1]: tuple(path) for path in task.paths.tolist()}
    first, second = row[: len(row) // 2].tolist(), row[len(row) // 2 :].tolist()
    assert (first[0], second[0]) == (lca_task.CLS, lca_task.SEP)
    for side in (first, second):
        path = whole[side[-1]]
        at = [path.index(token) for token in side[1:]]
        assert at == sorted(set(at))  # named from the root down, none twice
    return [whole[first[-1]], whole[second[-1]]]


@pytest.mark.parametrize("test", [False, True])
def test_labels_are_depths_of_common_ancestors(task, test):
    ids, labels = task.batch(400, np.random.default_rng(3), test=test)
    assert ids.shape == (400, task.length) == (400, 8) and ids.max() < task.vocabulary
    for row, label in zip(ids, labels):
        a, b = paths_of(task, row)
        assert (
            label == len(set(a) & set(b)) < 5
        )  # nodes of a tree lie on one path from the root each
    assert min(Counter(labels.tolist()).values()) > 50  # of 80 expected


def test_training_never_shows_a_test_pair(task):
    seen = {}
    for test in (False, True):
        ids, _ = task.batch(4000, np.random.default_rng(0), test=test)
        half = task.length // 2
        seen[test] = {frozenset((row[half - 1], row[-1])) for row in ids.tolist()}
    assert not seen[False] & seen[True]
    pairs = [set(map(tuple, np.concatenate(kind).tolist())) for kind in (task.train, task.test)]
    assert not pairs[0] & pairs[1] and len(pairs[0] | pairs[1]) == 60 * 59 // 2
    assert 0.2 < len(pairs[1]) / len(pairs[0] | pairs[1]) < 0.3


def test_the_rule_of_names_alone_is_the_deepest_common_name(task):
    ids, labels = task.batch(300, np.random.default_rng(4))
    said = task.by_names_alone(ids)
    for row, answer, label in zip(ids.tolist(), said.tolist(), labels.tolist()):
        common = set(row[1:4]) & set(row[5:])
        path = next(p for p in task.paths.tolist() if p[-1] == row[3])
        assert answer == max((path.index(token) + 1 for token in common), default=0) <= label


def test_too_small_a_tree_is_refused(task):
    with pytest.raises(
        ValueError, match="3 leaves leave a depth without pairs; allowed: more leaves"
    ):
        lca_task.LcaTask([("a", "b"), ("a", "c"), ("d", "e")], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_and_has_as_many_parameters(task, kind):
    torch.manual_seed(0)
    sizes = {k: size_of(Encoder(k, task.vocabulary, 8, 5, 8, 2, 2)) for k in KINDS}
    assert (
        max(sizes.values()) - min(sizes.values()) == 2 * 2 * 2
    )  # layers, heads, numbers learned per head
    model = Encoder(kind, task.vocabulary, 8, 5, 8, 2, 2)
    ids, labels = task.batch(16, np.random.default_rng(0))
    torch.nn.functional.cross_entropy(model(ids), labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert "logs" not in name or parameter.grad.abs().min() > 0


def test_the_controls_are_the_limits_they_are_called():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, generator=draw, dtype=torch.double) for _ in range(3))
    one = torch.tensor([0.5, 1.0, 2.0], dtype=torch.double)
    # where curvature vanishes, the geodesic distance of the ball is twice Euclid's, and the midpoint a mean
    flat = (
        ha.hyperbolic_scores(q, k, curvature=1e-8, temperature=2 * one, scale=1.0).softmax(-1) @ v
    )
    torch.testing.assert_close(
        scores.distance_attention(q, k, v, temperature=one), flat, rtol=1e-4, atol=1e-4
    )
    found = scores.normalised_attention(q, k, v, scale=one)
    cosine = torch.einsum(
        "bhid,bhjd->bhij", q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    )
    weights = (one[:, None, None] * math.log2(20) * cosine).exp()
    torch.testing.assert_close(found, weights / weights.sum(-1, keepdim=True) @ v)


def test_a_tenth_is_a_tenth(task):
    small = depth.width_of(depth.SETTINGS, task, 0.1)
    counts = [
        size_of(depth.model_of(depth.SETTINGS, task, "dot product", width))
        for width in (depth.SETTINGS["width"], small - 2, small, small + 2)
    ]
    off = [abs(count - counts[0] / 10) for count in counts[1:]]
    assert off[1] == min(off)
    assert depth.width_of(depth.SETTINGS, task, 1.0) == depth.SETTINGS["width"]


def test_the_best_rate_is_chosen_for_each_kind():
    settings = {"search": {"learning_rates": [0.1, 0.2]}}
    accuracy = {
        ("a", 0.1): (0.5, 0.6),
        ("a", 0.2): (0.4, 0.8),
        ("b", 0.1): (0.6, 0.2),
        ("b", 0.2): (0.4, 0.3),
    }
    found = {
        depth.key_of_search(kind, level, "full", rate): {"accuracy": value}
        for (kind, rate), values in accuracy.items()
        for level, value in zip((5, 10), values)
    }
    chosen = [
        depth.best_rate(settings, found, kind, level, "full") for kind in "ab" for level in (5, 10)
    ]
    assert chosen == [0.1, 0.2, 0.1, 0.2]
