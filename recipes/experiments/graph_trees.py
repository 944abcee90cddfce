"""Hierarchical attention on a graph: the sections of Debian's packages, told by the neighbourhood of each as a tree: a
package, some of its neighbours, and some neighbours of each of these, drawn anew at every step (as GraphSAGE draws
them, arXiv 1706.02216).

Beside the tree stand the same trees with their packages shuffled, flat attention over the same packages, their mean,
and the package alone; all know which of them is the package, a neighbour, or a neighbour's neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hf_hyperattn as ha
from hf_hyperattn.functional import hierarchical_attention

from .fitting import fit, searched_runs, size_of
from .graphs import Graph, graph_of, split
from .store import Experiment

TREE, SHUFFLED, FLAT, MEAN, ALONE = "tree", "shuffled tree", "flat attention", "mean of all", "package alone"
SETTINGS = {
    "kinds": [TREE, SHUFFLED, FLAT, MEAN, ALONE],
    "packages": [400, 1100],
    "words": 256,
    "labelled": 20,
    "read": {"search": 1000, "test": 3000},
    # Drawn of a package, and of each that was drawn; what is read is the mean of so many drawings.
    "neighbours": [6, 4],
    "drawings": 4,
    "width": 32,
    "heads": 2,
    "dropout": 0.5,
    "steps": 100,
    "weight_decay": 5e-4,
    "search": {"seed": 100, "rates": [1e-3, 3e-3, 1e-2, 3e-2]},
    "seeds": [0, 1, 2, 3, 4],
}


@dataclass(frozen=True)
class Neighbours:
    """The neighbours of every node, from which some are drawn.

    Args:
        edges: int64 [2, E], each in both directions; those from a node to itself count where a node has no other.
        nodes: number of nodes.
    """

    edges: Tensor
    nodes: int

    def __post_init__(self):
        source, target = self.edges[:, self.edges[0] != self.edges[1]]
        lonely = torch.ones(self.nodes, dtype=torch.bool).index_fill(0, source, False).nonzero().flatten()
        source, order = torch.cat([source, lonely]).sort(stable=True)
        count = source.bincount(minlength=self.nodes)
        object.__setattr__(self, "_others", torch.cat([target, lonely])[order])
        object.__setattr__(self, "_count", count)
        object.__setattr__(self, "_first", count.cumsum(0) - count)

    def drawn(self, nodes: Tensor, count: int, draw: torch.Generator) -> Tensor:
        """So many neighbours of each node [...], with repetition: [..., count]."""
        numbers = torch.rand(*nodes.shape, count, generator=draw) * self._count[nodes][..., None]
        return self._others[self._first[nodes][..., None] + numbers.long()]


def hierarchy(first: int, second: int) -> ha.Hierarchy:
    """A token for a package, and below the same root, for every neighbour, a family of it and of its own neighbours."""
    families, size = range(first), 1 + second
    root, tokens = 1 + first * size + first, 1 + first * size
    return ha.Hierarchy.from_parents([root, *(tokens + i for i in families for _ in range(size)), *[root] * first, -1])


class Network(nn.Module):
    """One layer of attention over a package and what was drawn round it, read where the package stands.

    Args:
        kind: one of the settings' kinds.
        classes: number of sections.
        settings: of the experiment.
    """

    def __init__(self, kind: str, classes: int, settings: dict):
        super().__init__()
        width, (first, second) = settings["width"], settings["neighbours"]
        self.kind, self.heads, self.tree = kind, settings["heads"], hierarchy(first, second)
        self.dropout = nn.Dropout(settings["dropout"])
        self.words = nn.Linear(settings["words"], width)
        self.roles = nn.Parameter(torch.zeros(3, width))
        self.register_buffer("role", torch.tensor([0, *([1] + [2] * second) * first]))
        self.projections = nn.Linear(width, 3 * width)
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, words: Tensor) -> Tensor:
        """Rows [B, T, words], the package first, to logits [B, classes]."""
        x = F.elu(self.words(self.dropout(words)) + self.roles[self.role])
        heads = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        query, key, value = map(heads, self.projections(x).chunk(3, -1))
        return self.out(x[:, 0] + self.attended(query, key, value).flatten(1))

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What the package gets, [B, H, d]; all are [B, H, T, d]."""
        if self.kind == ALONE:
            return value[:, :, 0]
        if self.kind == MEAN:
            return value.mean(2)
        if self.kind == FLAT:
            return F.scaled_dot_product_attention(query[:, :, :1], key, value)[:, :, 0]
        return hierarchical_attention(query, key, value, hierarchy=self.tree)[:, :, 0]


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The search for learning rates, then every seed and kind."""
    yield from searched_runs(settings, found, train)


def surroundings(settings: dict, kind: str, near: Neighbours, nodes: Tensor, draw: torch.Generator) -> Tensor:
    """The tokens' nodes, int64 [B, T]: each node, and for every neighbour drawn it and neighbours of it."""
    first, second = settings["neighbours"]
    ones = near.drawn(nodes, first, draw)
    both = torch.cat([ones[..., None], near.drawn(ones, second, draw)], -1)
    found = torch.cat([nodes[:, None], both.flatten(1)], 1)
    if kind != SHUFFLED:
        return found
    order = torch.rand(found.shape, generator=draw).index_fill(1, torch.tensor([0]), -1.0).argsort(1)
    return found.gather(1, order)


def train(settings: dict, kind: str, seed: int, rate: float, part: str) -> dict:
    """One run: train on the labels of some packages, and read others."""
    graph = graph_of(settings)
    near = Neighbours(graph.edges, len(graph.labels))
    torch.manual_seed(seed)
    model, draw = Network(kind, len(graph.sections), settings), torch.Generator().manual_seed(seed)
    known, others = split(graph, settings, seed, part)

    def batch_loss() -> Tensor:
        nodes = surroundings(settings, kind, near, known, draw)
        return F.cross_entropy(model(graph.words[nodes]), graph.labels[known])

    loss = fit(model, batch_loss, settings["steps"], rate, settings["weight_decay"])
    return {
        "accuracy": round(accuracy(settings, kind, model.eval(), graph, near, others), 5),
        "loss": round(loss, 5),
        "parameters": size_of(model),
        "learning_rate": rate,
    }


@torch.no_grad()
def accuracy(settings: dict, kind: str, model: Network, graph: Graph, near: Neighbours, nodes: Tensor) -> float:
    """The share of packages whose section is told, by the mean of some drawings, which are the same for all models."""
    draw, right = torch.Generator().manual_seed(12345), 0
    for some in nodes.split(500):
        drawings = (surroundings(settings, kind, near, some, draw) for _ in range(settings["drawings"]))
        logits = sum(model(graph.words[drawn]).log_softmax(-1) for drawn in drawings)
        right += int((logits.argmax(-1) == graph.labels[some]).sum())
    return right / len(nodes)


EXPERIMENT = Experiment("graph_trees", SETTINGS, runs, rows=("kinds", "seeds"), hours=0.3)
