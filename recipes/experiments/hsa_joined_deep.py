"""HsaEncoder on images joined with texts, as in hsa_joined, with one, two and four layers and a learning rate that is
searched for every row: does hierarchical attention catch up with flat attention where it is deeper?
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

from . import hsa_joined
from .fitting import best_of, key_of, key_of_search
from .store import Experiment

SETTINGS = {
    "models": ["joined, tree", "joined, flat"],
    "layers": [1, 2, 4],
    "seeds": [0, 1, 2, 3, 4],
    # On test images that nothing else reads.
    "search": {"seed": 100, "first": 4000, "rates": [2e-3, 4e-3, 8e-3]},
    "task": {
        name: value
        for name, value in hsa_joined.SETTINGS.items()
        if name not in ("models", "seeds", "layers", "learning_rate")
    },
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """First the search for learning rates, then every seed, depth and model."""
    search, rows = (
        settings["search"],
        list(itertools.product(settings["layers"], settings["models"])),
    )
    for layers, model in rows:
        for rate in search["rates"]:
            do = functools.partial(
                train, settings, model, layers, search["seed"], rate, search["first"]
            )
            yield key_of_search(row_of(model, layers), rate), do
    for seed in settings["seeds"]:
        for layers, model in rows:
            yield (
                key_of(row_of(model, layers), seed),
                functools.partial(train_at_best, settings, found, model, layers, seed),
            )


def row_of(model: str, layers: int) -> str:
    """The name of a row."""
    return f"{model}, {layers} layer{'s' if layers > 1 else ''}"


def best_rate(settings: dict, found: dict, row: str) -> float:
    """The learning rate with the best accuracy in the search."""
    return best_of(settings["search"]["rates"], found, row, "accuracy", max)


def train_at_best(settings: dict, found: dict, model: str, layers: int, seed: int) -> dict:
    """One run with the learning rate that the search found."""
    return train(settings, model, layers, seed, best_rate(settings, found, row_of(model, layers)))


def train(settings: dict, model: str, layers: int, seed: int, rate: float, first: int = 0) -> dict:
    """One run of hsa_joined at this depth and rate, read on test images from number `first` on."""
    changed = {
        "layers": layers,
        "learning_rate": rate,
        "first": first,
        "models": hsa_joined.SETTINGS["models"],
    }
    return hsa_joined.train(settings["task"] | changed, model, seed) | {"learning_rate": rate}


EXPERIMENT = Experiment("hsa_joined_deep", SETTINGS, runs, rows=("seeds",), hours=0.3)
