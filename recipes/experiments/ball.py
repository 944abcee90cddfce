"""Words embedded in the ball with the package's own pieces: WordNet's mammals in few dimensions, as in Poincaré
embeddings (arXiv 1705.08039), beside points of Euclidean space with the same loss, search and steps.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_hyperattn.analysis.hyperbolicity import rank_correlation
from hf_hyperattn.geometry import poincare

from .debian import wordnet_nouns
from .fitting import fit
from .store import Experiment
from .wordnet import read_parents

BALL, FLAT = "ball", "Euclidean space"
SETTINGS = {
    "root": "mammal",
    "spaces": [BALL, FLAT],
    "dims": [2, 5],
    "steps": 1000,
    "batch": 256,
    "others": 20,
    "start": 0.01,
    "search": {"seed": 100, "rates": [1e-2, 3e-2, 1e-1]},
    "seeds": [0, 1, 2],
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """For every space and number of dimensions the search for a learning rate, then the seeds."""
    for space, dim in itertools.product(settings["spaces"], settings["dims"]):
        for rate in settings["search"]["rates"]:
            do = functools.partial(train, settings, space, dim, settings["search"]["seed"], rate)
            yield key_of_search(space, dim, rate), do
        for seed in settings["seeds"]:
            yield (
                key_of(space, dim, seed),
                functools.partial(train_at_best, settings, found, space, dim, seed),
            )


def key_of(space: str, dim: int, seed: int) -> str:
    """The name of a run."""
    return f"{space}, {dim} dimensions, seed {seed}"


def key_of_search(space: str, dim: int, rate: float) -> str:
    """The name of a run of the search for a learning rate."""
    return f"search, {space}, {dim} dimensions, learning rate {rate:g}"


def best_rate(settings: dict, found: dict, space: str, dim: int) -> float:
    """The learning rate with the best mean average precision in the search."""
    return max(
        settings["search"]["rates"],
        key=lambda rate: found[key_of_search(space, dim, rate)]["precision"],
    )


def train_at_best(settings: dict, found: dict, space: str, dim: int, seed: int) -> dict:
    """One run with the learning rate that the search found."""
    return train(settings, space, dim, seed, best_rate(settings, found, space, dim))


class Points(nn.Module):
    """Points [n, dim], in the ball by the exponential map at its origin, and a learned factor on their distances."""

    def __init__(self, space: str, count: int, dim: int, start: float):
        super().__init__()
        self.space = space
        self.rows = nn.Parameter(start * torch.randn(count, dim))
        self.log_factor = nn.Parameter(torch.zeros(()))

    def forward(self) -> Tensor:
        """The points themselves."""
        return poincare.expmap0(self.rows, 1.0) if self.space == BALL else self.rows

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Of points [..., dim]."""
        if self.space == BALL:
            return poincare.distance(x, y, 1.0)
        return (x - y).square().sum(-1).clamp_min(1e-12).sqrt()


def train(settings: dict, space: str, dim: int, seed: int, rate: float) -> dict:
    """One run: every word is drawn to the words above it, away from words that are not."""
    above, levels = closure(settings["root"])
    pairs = above.nonzero()
    torch.manual_seed(seed)
    model = Points(space, len(above), dim, settings["start"])

    def batch_loss() -> Tensor:
        word, ancestor = pairs[torch.randint(len(pairs), (settings["batch"],))].T
        others = torch.randint(len(above), (len(word), settings["others"]))
        wrong = above[word[:, None], others] | (others == word[:, None])
        points = model()
        chosen = torch.cat([ancestor[:, None], others], 1)
        logits = -model.log_factor.exp() * model.distance(points[word][:, None], points[chosen])
        logits = logits.masked_fill(F.pad(wrong, (1, 0)), -torch.inf)
        return F.cross_entropy(logits, torch.zeros(len(word), dtype=torch.long))

    loss = fit(model, batch_loss, settings["steps"], rate, decay=0.0)
    with torch.no_grad():
        return read(model, above, levels) | {"loss": round(loss, 5), "learning_rate": rate}


def read(model: Points, above: Tensor, levels: Tensor) -> dict:
    """Mean average precision of a word's ancestors among all words by distance, their mean rank among words that are
    none, and the rank correlation of norms with levels.
    """
    points, precisions, ranks = model(), [], []
    for i, mine in enumerate(above):
        if not mine.any():
            continue
        distances = model.distance(points[i], points)
        order = distances.masked_fill(torch.arange(len(above)) == i, torch.inf).argsort()
        places = mine[order].nonzero()[:, 0] + 1  # of the ancestors, from 1 on
        count = torch.arange(1, len(places) + 1)
        precisions.append((count / places).mean())
        ranks.append((places - count + 1).double().mean())
    return {
        "precision": round(torch.stack(precisions).mean().item(), 5),
        "rank": round(torch.stack(ranks).mean().item(), 3),
        "norm and level": round(rank_correlation(points.norm(dim=-1), levels).value, 4),
        "words": len(above),
    }


@functools.cache
def closure(root: str) -> tuple[Tensor, Tensor]:
    """Of the words under a root: whether the second is above the first, bool [n, n], and their levels [n]."""
    parents = read_parents(wordnet_nouns())
    top = next(name for name in parents if name.split(".")[0] == root)
    chains = {}
    for name in parents:
        chain = [name]
        while chain[-1] != top and parents[chain[-1]] is not None:
            chain.append(parents[chain[-1]])
        if chain[-1] == top:
            chains[name] = chain[1:]
    number = {name: i for i, name in enumerate(sorted(chains))}
    above = torch.zeros(len(number), len(number), dtype=torch.bool)
    for name, chain in chains.items():
        above[number[name], [number[other] for other in chain]] = True
    return above, above.sum(1).double()


EXPERIMENT = Experiment("ball", SETTINGS, runs, rows=("spaces", "dims", "seeds"), hours=0.06)
