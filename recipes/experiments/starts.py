"""How much hangs on where cones and distances start: the depth task at depth 10, with gamma (for a distance, one over
its temperature) of 0.1 and 0.4 in place of 1, and with projections of queries and keys four times as large.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from . import depth
from .fitting import fit
from .lca_model import Encoder
from .store import Experiment, load

#: The start of the depth experiment, whose runs stand for it.
USUAL = "as in the depth experiment"
SETTINGS = {
    "kinds": ["umbral cone, psi", "umbral cone, xi", "hyperbolic distance", "Euclidean distance"],
    "depth": 10,
    "starts": {
        "gamma 0.4": {"gamma": 0.4, "projections": 1.0},
        "gamma 0.1": {"gamma": 0.1, "projections": 1.0},
        "projections x 4": {"gamma": 1.0, "projections": 4.0},
    },
    "seeds": [0, 1, 2],
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Every kind, start and seed."""
    for kind in settings["kinds"]:
        for start in settings["starts"]:
            for seed in settings["seeds"]:
                yield (
                    key_of(kind, start, seed),
                    functools.partial(train, settings, kind, start, seed),
                )


def key_of(kind: str, start: str, seed: int) -> str:
    """The name of a run."""
    return f"{kind}, {start}, seed {seed}"


def train(settings: dict, kind: str, start: str, seed: int) -> dict:
    """One run, as that of the depth experiment with the same seed and its best rate, from another start."""
    results, level = load("depth"), settings["depth"]
    made = results["settings"]
    rate = depth.best_rate(made, results["runs"], kind, level, "full")
    task = depth.task_of(level, made["leaves"], made["named"], seed)
    torch.manual_seed(seed)
    model = depth.model_of(made, task, kind, made["width"])
    begin(model, **settings["starts"][start])
    draw = np.random.default_rng([seed, 0])

    def batch_loss() -> Tensor:
        ids, labels = task.batch(made["batch"], draw)
        return F.cross_entropy(model(ids), labels)

    loss = fit(model, batch_loss, made["steps"], rate, made["weight_decay"])
    accuracy = depth.score(model, task, made["test_pairs"], seed)["accuracy"]
    return {
        "accuracy": accuracy,
        "loss": loss,
        "learning_rate": rate,
        "learned": depth.learned(model),
    }


@torch.no_grad()
def begin(model: Encoder, gamma: float, projections: float) -> None:
    """Put a model at another start.

    Args:
        gamma: of a cone; of a distance, one over the temperature.
        projections: what the weights of queries and keys are multiplied by.
    """
    for block in model.blocks:
        logs, weight = block[1].attend.logs, block[1].qkv.weight
        name, sign = ("gamma", 1) if "gamma" in logs else ("temperature", -1)
        logs[name].fill_(sign * math.log(gamma))
        weight[: 2 * len(weight) // 3] *= projections


EXPERIMENT = Experiment("starts", SETTINGS, runs, rows=("kinds", "starts", "seeds"), hours=0.12)
