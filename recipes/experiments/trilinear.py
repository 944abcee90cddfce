"""A relation of three tokens: does some pair of other tokens complete this one to a sum of 0 modulo p?

One layer of attention, three-way or pairwise, or two of the latter, trained on fresh sequences and read on others.
("Match3": Sanford, Hsu and Telgarsky, Representational Strengths and Limitations of Transformers, arXiv 2306.02896.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from .fitting import fit, key_of, size_of
from .store import Experiment
from .three_way_model import Reader

SETTINGS = {
    "kinds": {
        "three-way": {
            "three_way": True,
            "width": 64,
            "heads": 4,
            "head_width": 16,
            "layers": 1,
            "steps": 1000,
        },
        # as many parameters: wider heads in place of the second keys and values
        "pairwise": {
            "three_way": False,
            "width": 64,
            "heads": 4,
            "head_width": 24,
            "layers": 1,
            "steps": 2000,
        },
        "pairwise, wider": {
            "three_way": False,
            "width": 128,
            "heads": 8,
            "head_width": 16,
            "layers": 1,
            "steps": 2000,
        },
        # a pair in the first layer, its third token in the second
        "pairwise, two layers": {
            "three_way": False,
            "width": 64,
            "heads": 4,
            "head_width": 24,
            "layers": 2,
            "steps": 2000,
        },
    },
    "modulus": 32,
    "length": 8,
    "seeds": [0, 1, 2],
    "batch": 256,
    "learning_rate": 3e-3,
    "weight_decay": 0.01,
    "test_sequences": 2048,
    "looks": 10,
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Every kind and seed."""
    for seed in settings["seeds"]:
        for kind in settings["kinds"]:
            yield key_of(kind, seed), functools.partial(train, settings, kind, seed)


def batch(settings: dict, rows: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens int64 [rows, length], and whether each is completed by two others, bool [rows, length]."""
    modulus, length = settings["modulus"], settings["length"]
    tokens = torch.randint(modulus, (rows, length), generator=draw)
    return tokens, completed(tokens, modulus)


def completed(tokens: Tensor, modulus: int) -> Tensor:
    """Bool [rows, L]: whether x_i + x_j + x_k = 0 modulo p for some j and k, all three of different places."""
    sums = tokens[:, :, None, None] + tokens[:, None, :, None] + tokens[:, None, None, :]
    same = torch.eye(tokens.shape[1], dtype=torch.bool)
    twice = same[:, :, None] | same[:, None, :] | same[None]
    return ((sums % modulus == 0) & ~twice).flatten(2).any(-1)


def train(settings: dict, kind: str, seed: int) -> dict:
    """Train one model and read it: accuracy on fresh sequences, along the way and at the end."""
    torch.manual_seed(seed)
    chosen = dict(settings["kinds"][kind])
    steps = chosen.pop("steps")
    model = Reader(settings["modulus"], **chosen)
    draw = torch.Generator().manual_seed(1000 + seed)
    test = batch(settings, settings["test_sequences"], torch.Generator().manual_seed(10_000 + seed))
    curve: list[list[float]] = []
    done = iter(range(1, steps + 1))

    def batch_loss() -> Tensor:
        tokens, labels = batch(settings, settings["batch"], draw)
        step = next(done)
        if step % (steps // settings["looks"]) == 0:
            curve.append([step, accuracy(model, *test)])
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten().long())

    loss = fit(model, batch_loss, steps, settings["learning_rate"], settings["weight_decay"])
    share = test[1].float().mean().item()
    return {
        "accuracy": accuracy(model, *test),
        "most_frequent": max(share, 1 - share),
        "loss": loss,
        "parameters": size_of(model),
        "steps": steps,
        "curve": curve,
    }


@torch.no_grad()
def accuracy(model: nn.Module, tokens: Tensor, labels: Tensor) -> float:
    """Share of tokens that are judged rightly."""
    return (model(tokens).argmax(-1) == labels).float().mean().item()


EXPERIMENT = Experiment("trilinear", SETTINGS, runs, rows=("kinds", "seeds"))
