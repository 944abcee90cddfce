"""A linear probe on IMDB: MiniLM as it is against MiniLM with hierarchical attention in three layers, without training.

The layers are those that the experiment hsa_minilm chose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from .hsa_minilm import SETTINGS as MINILM
from .hsa_minilm import best_layers, embeddings, patched_embeddings
from .hsa_texts import labelled
from .store import Experiment, load

SETTINGS = {
    "ways": {
        way: MINILM["ways"][way] for way in ("key, 8, near 16, top 4", "key, 16-64, near 32, top 4")
    },
    "train": 500,
    "test": 500,
    "C": 10.0,
    "seed": 3,
    "length": 256,
    "batch": 16,
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The runs of the experiment: for each its name and what computes it."""
    yield "stock", functools.partial(probe, settings, None)
    for way in settings["ways"]:
        yield way, functools.partial(probe, settings, way)


def probe(settings: dict, way: str | None) -> dict:
    """Test accuracy of logistic regression on the embeddings of reviews; `right` has a 1 or 0 for every test review."""
    from sklearn.linear_model import LogisticRegression

    layers = [] if way is None else best_layers(MINILM, load("hsa_minilm")["runs"], way)
    found = []
    for part in labelled(settings["train"], settings["test"], settings["seed"]):
        texts = [text for text, _ in part]
        if way is None:
            x = embeddings(settings, texts, None)
        else:
            x = patched_embeddings(settings, texts, settings["ways"][way], layers)
        found.append((x.double().numpy(), [label for _, label in part]))
    (x, y), (test_x, test_y) = found
    guess = LogisticRegression(C=settings["C"], max_iter=5000).fit(x, y).predict(test_x)
    right = [int(a == b) for a, b in zip(guess, test_y)]
    accuracy = round(sum(right) / len(right), 4)
    return {"layers": layers, "accuracy": accuracy, "right": "".join(map(str, right))}


EXPERIMENT = Experiment("hsa_probe", SETTINGS, runs)
