"""Hierarchical attention on a graph: the sections of Debian's packages, told by the neighbourhood of each as a tree: a
package, some of its neighbours, and some neighbours of each of these, drawn anew at every step (as GraphSAGE draws
them, arXiv 1706.02216).

Beside the tree stand the same trees with their packages shuffled, flat attention over the same packages, their mean,
and the package alone; all know which of them is the package, a neighbour, or a neighbour's neighbour.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hf_hyperattn as ha
from hf_hyperattn.functional import hierarchical_attention

from .fitting import fit, searched_runs, size_of
from .graphs import Graph, describe, graph_of, split
from .store import Experiment

TREE, SHUFFLED, FLAT, MEAN, ALONE = (
    "tree",
    "shuffled tree",
    "flat attention",
    "mean of all",
    "package alone",
)
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
    "search": {"seed": 100, "rates": [3e-3, 1e-2, 3e-2, 1e-1, 3e-1]},
    "seeds": [0, 1, 2, 3, 4],
}


class Neighbours:
    """The neighbours of every node, from which some are drawn.

    Args:
        edges: int64 [2, E], each in both directions; those from a node to itself count where a node has no other.
        nodes: number of nodes.
    """

    def __init__(self, edges: Tensor, nodes: int):
        source, target = edges[:, edges[0] != edges[1]]
        lonely = (
            torch.ones(nodes, dtype=torch.bool).index_fill(0, source, False).nonzero().flatten()
        )
        source, order = torch.cat([source, lonely]).sort(stable=True)
        self.others = torch.cat([target, lonely])[order]
        self.count = source.bincount(minlength=nodes)
        self.first = self.count.cumsum(0) - self.count

    def drawn(self, nodes: Tensor, count: int, draw: torch.Generator) -> Tensor:
        """So many neighbours of each node [...], with repetition: [..., count]."""
        numbers = torch.rand(*nodes.shape, count, generator=draw) * self.count[nodes][..., None]
        return self.others[self.first[nodes][..., None] + numbers.long()]


def hierarchy(first: int, second: int) -> ha.Hierarchy:
    """A token for a package, and below the same root, for every neighbour, a family of it and of its own neighbours."""
    families, size = range(first), 1 + second
    root, tokens = 1 + first * size + first, 1 + first * size
    return ha.Hierarchy.from_parents(
        [root, *(tokens + i for i in families for _ in range(size)), *[root] * first, -1]
    )


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
        self.projections = nn.Linear(width, 3 * width)
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, words: Tensor, roles: Tensor) -> Tensor:
        """Rows [B, T, words], the package first, and which of `roles` each is, [B, T], to logits [B, classes]."""
        x = F.elu(self.words(self.dropout(words)) + self.roles[roles])
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
    """The graph and its neighbourhoods, the search for learning rates, then every seed and kind."""
    yield "graph", functools.partial(describe, settings)
    yield "neighbourhoods", functools.partial(neighbourhoods, settings)
    yield from searched_runs(settings, found, train)


def neighbourhoods(settings: dict) -> dict:
    """The share of packages that have no neighbour, and of those that have one."""
    graph = graph_of(settings)
    source = graph.edges[0, graph.edges[0] != graph.edges[1]]
    count = source.bincount(minlength=len(graph.labels))
    return {
        name: round((count == i).double().mean().item(), 4)
        for i, name in enumerate(("none", "one"))
    }


class Draws:
    """Random numbers of a run: of the neighbours, the same for all kinds, and of the order of shuffled trees."""

    def __init__(self, seed: int):
        self.neighbours, self.order = (torch.Generator().manual_seed(seed) for _ in range(2))


def surroundings(
    settings: dict, kind: str, near: Neighbours, nodes: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """The tokens' nodes and their roles, int64 [B, T]: each node (0), and for every neighbour drawn it (1) and
    neighbours of it (2).
    """
    first, second = settings["neighbours"]
    draw = draws.neighbours
    ones = near.drawn(nodes, first, draw)
    both = torch.cat([ones[..., None], near.drawn(ones, second, draw)], -1)
    found = torch.cat([nodes[:, None], both.flatten(1)], 1)
    roles = torch.tensor([0, *([1] + [2] * second) * first]).expand_as(found)
    if kind != SHUFFLED:
        return found, roles
    order = (
        torch.rand(found.shape, generator=draws.order)
        .index_fill(1, torch.tensor([0]), -1.0)
        .argsort(1)
    )
    return found.gather(1, order), roles.gather(1, order)


def train(settings: dict, kind: str, seed: int, rate: float, part: str) -> dict:
    """One run: train on the labels of some packages, and read others."""
    graph = graph_of(settings)
    near = Neighbours(graph.edges, len(graph.labels))
    torch.manual_seed(seed)
    model, draws = Network(kind, len(graph.sections), settings), Draws(seed)
    known, others = split(graph, settings, seed, part)

    def batch_loss() -> Tensor:
        nodes, roles = surroundings(settings, kind, near, known, draws)
        return F.cross_entropy(model(graph.words[nodes], roles), graph.labels[known])

    loss = fit(model, batch_loss, settings["steps"], rate, settings["weight_decay"])
    right = told(settings, kind, model.eval(), graph, near, others)
    return {
        "accuracy": round(right.double().mean().item(), 5),
        "with_two": round(right[near.count[others] >= 2].double().mean().item(), 5),
        "loss": round(loss, 5),
        "parameters": size_of(model),
        "learning_rate": rate,
    }


@torch.no_grad()
def told(
    settings: dict, kind: str, model: Network, graph: Graph, near: Neighbours, nodes: Tensor
) -> Tensor:
    """Whether the section of each package is told, by the mean of some drawings, which are the same for all models."""
    draws, right = Draws(12345), []
    for some in nodes.split(500):
        drawings = (
            surroundings(settings, kind, near, some, draws) for _ in range(settings["drawings"])
        )
        logits = sum(model(graph.words[drawn], roles).log_softmax(-1) for drawn, roles in drawings)
        right.append(logits.argmax(-1) == graph.labels[some])
    return torch.cat(right)


EXPERIMENT = Experiment("graph_trees", SETTINGS, runs, rows=("kinds", "seeds"), hours=0.3)
