"""Hierarchy depth: trees of WordNet's nouns cut at depth 5 and 10; how deep is the lowest common ancestor of two
partly named paths? Dot product, both cones and hyperbolic distance, at equal parameters and at a tenth of them,
beside two controls: a normalised dot product and Euclidean distance.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .debian import wordnet_nouns
from .fitting import fit, size_of
from .lca_model import Encoder
from .lca_task import LcaTask
from .scores import KINDS
from .store import Experiment
from .wordnet import read_parents, sample_paths

#: Scores without geometry, which the others are compared with.
CONTROLS = ("dot product", "normalised dot product", "Euclidean distance")
SETTINGS = {
    "kinds": list(KINDS),
    "depths": [5, 10],
    "sizes": {"full": 1.0, "tenth": 0.1},
    "seeds": list(range(10)),
    "leaves": 512,
    "named": 2,
    "width": 64,
    "heads": 2,
    "layers": 2,
    "steps": 800,
    "batch": 128,
    "test_pairs": 4000,
    "weight_decay": 0.01,
    # The learning rate is chosen for every kind, depth and size by itself, on trees that are not used again.
    "search": {"seed": 100, "learning_rates": [3e-3, 1e-2, 3e-2]},
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """First the search for learning rates, then every kind, depth, size and seed."""
    search = settings["search"]
    for size, kind, depth, rate in itertools.product(
        settings["sizes"], settings["kinds"], settings["depths"], search["learning_rates"]
    ):
        do = functools.partial(train, settings, kind, depth, size, search["seed"], rate)
        yield key_of_search(kind, depth, size, rate), do
    for seed, depth, size, kind in itertools.product(
        settings["seeds"], settings["depths"], settings["sizes"], settings["kinds"]
    ):
        yield (
            key_of(kind, depth, size, seed),
            functools.partial(train_at_best, settings, found, kind, depth, size, seed),
        )


def key_of(kind: str, depth: int, size: str, seed: int) -> str:
    """The name of a run."""
    return f"depth {depth}, {size}, {kind}, seed {seed}"


def key_of_search(kind: str, depth: int, size: str, rate: float) -> str:
    """The name of a run of the search for a learning rate."""
    return f"search, depth {depth}, {size}, {kind}, learning rate {rate:g}"


def best_rate(settings: dict, found: dict, kind: str, depth: int, size: str) -> float:
    """The learning rate with the best accuracy in the search."""
    rates = settings["search"]["learning_rates"]
    return max(rates, key=lambda rate: found[key_of_search(kind, depth, size, rate)]["accuracy"])


def train_at_best(settings: dict, found: dict, kind: str, depth: int, size: str, seed: int) -> dict:
    """One run with the learning rate that the search found."""
    return train(settings, kind, depth, size, seed, best_rate(settings, found, kind, depth, size))


@functools.cache
def task_of(depth: int, leaves: int, named: int, seed: int) -> LcaTask:
    """The task over paths of WordNet, drawn with this seed."""
    return LcaTask(sample_paths(read_parents(wordnet_nouns()), depth, leaves, seed), named)


def train(settings: dict, kind: str, depth: int, size: str, seed: int, rate: float) -> dict:
    """One run: train on pairs of one tree, test on pairs of the same tree that were held out."""
    task = task_of(depth, settings["leaves"], settings["named"], seed)
    width = width_of(settings, task, settings["sizes"][size])
    torch.manual_seed(seed)
    model = model_of(settings, task, kind, width)
    draw = np.random.default_rng([seed, 0])

    def batch_loss() -> Tensor:
        ids, labels = task.batch(settings["batch"], draw)
        return F.cross_entropy(model(ids), labels)

    loss = fit(model, batch_loss, settings["steps"], rate, settings["weight_decay"])
    return {
        **score(model, task, settings["test_pairs"], seed),
        "loss": loss,
        "parameters": size_of(model),
        "width": width,
        "vocabulary": task.vocabulary,
        "learning_rate": rate,
        "learned": learned(model),
    }


def model_of(settings: dict, task: LcaTask, kind: str, width: int) -> Encoder:
    """An untrained encoder of this kind and width."""
    return Encoder(
        kind, task.vocabulary, task.length, task.depth, width, settings["heads"], settings["layers"]
    )


@torch.no_grad()
def score(model: Encoder, task: LcaTask, pairs: int, seed: int) -> dict:
    """Accuracy on held-out pairs, in all and for every depth, and that of the rule that only compares names."""
    ids, labels = task.batch(pairs, np.random.default_rng([seed, 1]), test=True)
    right = (model(ids).argmax(-1) == labels).double()
    return {
        "accuracy": right.mean().item(),
        "accuracy_by_depth": [
            round(right[labels == d].mean().item(), 4) for d in range(task.depth)
        ],
        "names_alone": (task.by_names_alone(ids) == labels).double().mean().item(),
    }


def learned(model: Encoder) -> dict[str, list[list[float]]]:
    """What each head's curvature and the like came to be, layer by layer."""
    found: dict[str, list[list[float]]] = {}
    for block in model.blocks:
        for name, log in block[1].attend.logs.items():
            found.setdefault(name, []).append([round(value, 4) for value in log.exp().tolist()])
    return found


def width_of(settings: dict, task: LcaTask, share: float) -> int:
    """The width whose model has the share of the parameters nearest to the one asked for; dot product decides."""

    def parameters(width: int) -> int:
        with torch.device("meta"):
            return size_of(model_of(settings, task, "dot product", width))

    wanted = share * parameters(settings["width"])
    # A cone needs two coordinates in every head.
    widths = range(2 * settings["heads"], settings["width"] + 1, settings["heads"])
    return min(widths, key=lambda width: abs(parameters(width) - wanted))


EXPERIMENT = Experiment("depth", SETTINGS, runs, rows=("kinds", "seeds"), hours=1.3)
