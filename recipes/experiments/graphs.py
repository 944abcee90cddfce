"""Attention over the edges of a graph: the sections of Debian's packages, told by their dependencies and descriptions.

A graph attention network of two layers (arXiv 1710.10903) whose score varies; beside scores without geometry stand the
mean over neighbours, without any score, and a network that sees no edge.
"""

from __future__ import annotations

import functools
import random
import re
import statistics
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_hyperattn import functional as ha

from .fitting import fit, searched_runs, size_of
from .store import Experiment


def no_score(query: Tensor, key: Tensor) -> Tensor:
    """0 for every pair, which makes attention a mean."""
    return (query @ key.mT) * 0


def minus_distance(query: Tensor, key: Tensor, temperature: Tensor) -> Tensor:
    """-|q - k| / temperature; queries and keys [B, H, n, d], temperature [H]."""
    squared = (query[..., :, None, :] - key[..., None, :, :]).square().sum(-1)
    return -squared.clamp_min(1e-12).sqrt() / temperature[:, None, None]


umbral_psi = functools.partial(ha.cone_scores, mapping="psi")
#: For each kind its scores (None: the dot product), and settings learned per head from 1 on.
KINDS: dict[str, tuple[Callable | None, tuple[str, ...]]] = {
    "no edges": (no_score, ()),
    "mean of neighbours": (no_score, ()),
    "dot product": (None, ()),
    "Euclidean distance": (minus_distance, ("temperature",)),
    "hyperbolic distance": (ha.hyperbolic_scores, ("curvature", "temperature")),
    "umbral cone, psi": (umbral_psi, ("gamma", "radius")),
}
SETTINGS = {
    "kinds": list(KINDS),
    # Sections with so many packages, all of these; edges in both directions.
    "packages": [400, 1100],
    "words": 256,
    "labelled": 20,
    "read": {"search": 1000, "test": 3000},
    "width": 32,
    "heads": 2,
    "dropout": 0.5,
    "steps": 60,
    "weight_decay": 5e-4,
    "search": {"seed": 100, "rates": [3e-3, 1e-2, 3e-2]},
    "seeds": [0, 1, 2],
}


@dataclass(frozen=True)
class Graph:
    """Packages as nodes.

    Args:
        words: [n, words], the hashed words of the description, each row of norm 1.
        labels: int64 [n], the number of the section.
        edges: int64 [2, E], sources and targets, each edge in both directions, and each node to itself.
        sections: their names.
    """

    words: Tensor
    labels: Tensor
    edges: Tensor
    sections: tuple[str, ...]

    @property
    def homophily(self) -> float:
        """The share of edges, those to a node itself left out, whose ends have one label."""
        source, target = self.edges[:, self.edges[0] != self.edges[1]]
        return (self.labels[source] == self.labels[target]).double().mean().item()


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The graph, the search for learning rates, then every seed and kind."""
    yield "graph", functools.partial(describe, settings)
    yield from searched_runs(settings, found, train)


def describe(settings: dict) -> dict:
    """What the graph has, by which one tells whether it is the same: packages differ from day to day."""
    graph = graph_of(settings)
    return {
        "nodes": len(graph.labels),
        "edges": (graph.edges[0] < graph.edges[1]).sum().item(),
        "homophily": round(graph.homophily, 4),
        "sections": list(graph.sections),
        "checksum": zlib.crc32(graph.edges.numpy().tobytes()),
    }


class Layer(nn.Module):
    """Attention over edges, [n, inner] to [n, heads, width / heads].

    Args:
        kind: a key of `KINDS`.
        inner: numbers of a row.
        width: of all heads together.
        heads: number of heads.
    """

    def __init__(self, kind: str, inner: int, width: int, heads: int):
        super().__init__()
        self.scores, learned = KINDS[kind]
        self.heads = heads
        self.projections = nn.Linear(inner, 3 * width)
        self.logs = nn.ParameterDict({name: nn.Parameter(torch.zeros(heads)) for name in learned})

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Rows [n, inner] and edges [2, E]."""
        query, key, value = self.projections(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        learned = {name: log.exp() for name, log in self.logs.items()}
        return ha.edge_attention(query, key, value, edges, self.scores, **learned)


class Network(nn.Module):
    """Two layers; the second has heads as wide as there are classes, of which the mean is taken."""

    def __init__(self, kind: str, words: int, classes: int, settings: dict):
        super().__init__()
        heads, width = settings["heads"], settings["width"]
        self.dropout = nn.Dropout(settings["dropout"])
        self.first = Layer(kind, words, width, heads)
        self.second = Layer(kind, width, heads * classes, heads)

    def forward(self, words: Tensor, edges: Tensor) -> Tensor:
        """Rows [n, words] to logits [n, classes]."""
        rows = F.elu(self.first(self.dropout(words), edges).flatten(1))
        return self.second(self.dropout(rows), edges).mean(1)


def train(settings: dict, kind: str, seed: int, rate: float, part: str) -> dict:
    """One run: train on the labels of some nodes with the whole graph at hand, and read others."""
    graph = graph_of(settings)
    own = graph.edges[:, graph.edges[0] == graph.edges[1]]
    edges = own if kind == "no edges" else graph.edges
    torch.manual_seed(seed)
    model = Network(kind, graph.words.shape[1], len(graph.sections), settings)
    known, others = split(graph, settings, seed, part)

    def batch_loss() -> Tensor:
        return F.cross_entropy(model(graph.words, edges)[known], graph.labels[known])

    loss = fit(model, batch_loss, settings["steps"], rate, settings["weight_decay"])
    model.eval()
    with torch.no_grad():
        right = model(graph.words, edges)[others].argmax(-1) == graph.labels[others]
    by_class = [
        right[graph.labels[others] == i].double().mean().item() for i in range(len(graph.sections))
    ]
    return {
        "accuracy": round(right.double().mean().item(), 5),
        "by_class": round(statistics.mean(by_class), 5),
        "loss": round(loss, 5),
        "parameters": size_of(model),
        "learning_rate": rate,
    }


def split(graph: Graph, settings: dict, seed: int, part: str) -> tuple[Tensor, Tensor]:
    """Nodes whose labels are known, as many of every class, and nodes that are read; another seed draws others, and
    what is read for the search is never read for the test.
    """
    fixed = torch.randperm(len(graph.labels), generator=torch.Generator().manual_seed(0))
    search = settings["read"]["search"]
    read, rest = (fixed[:search], fixed[search:]) if part == "search" else (None, fixed[search:])
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))]
    known = torch.cat(
        [rest[graph.labels[rest] == i][: settings["labelled"]] for i in range(len(graph.sections))]
    )
    if read is None:
        read = rest[~torch.isin(rest, known)][: settings["read"]["test"]]
    return known, read


def graph_of(settings: dict) -> Graph:
    """The graph of these settings, made once."""
    return made(tuple(settings["packages"]), settings["words"])


@functools.cache
def made(packages: tuple[int, int], words: int) -> Graph:
    """The graph of the sections with so many packages."""
    return graph_from(available(), packages, words)


def available() -> str:
    """What apt knows of all packages.

    Raises:
        ValueError: there is no apt-cache, or its lists are empty.
    """
    try:
        text = subprocess.run(
            ["apt-cache", "dumpavail"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"apt-cache dumpavail failed ({error}); run it on Debian or Ubuntu"
        ) from error
    if text.count("\nSection:") < 1000:
        raise ValueError("apt-cache dumpavail lists hardly any package; run: apt-get update")
    return text


def graph_from(text: str, packages: tuple[int, int], words: int) -> Graph:
    """The graph of a list of packages in Debian's format."""
    found: dict[str, dict[str, str]] = {}
    for entry in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Section|Depends|Description): (.*)$", entry, re.M))
        if {"Package", "Section", "Description"} <= fields.keys():
            found[fields["Package"]] = fields
    count = {}
    for fields in found.values():
        count[fields["Section"]] = count.get(fields["Section"], 0) + 1
    sections = tuple(sorted(s for s, n in count.items() if packages[0] <= n <= packages[1]))
    names = sorted(name for name, fields in found.items() if fields["Section"] in sections)
    random.Random(0).shuffle(names)
    number = {name: i for i, name in enumerate(names)}
    edges = {(i, i) for i in number.values()}
    rows = torch.zeros(len(names), words)
    for name, i in number.items():
        for other in re.split("[,|]", found[name].get("Depends", "")):
            j = number.get(other.strip().split(" ")[0].split(":")[0])
            if j is not None:
                edges |= {(i, j), (j, i)}
        for word in re.findall("[a-z]{3,}", found[name]["Description"].lower()):
            rows[i, zlib.crc32(word.encode()) % words] += 1
    labels = torch.tensor([sections.index(found[name]["Section"]) for name in names])
    return Graph(
        F.normalize(rows, dim=1), labels, torch.tensor(sorted(edges)).T.contiguous(), sections
    )


EXPERIMENT = Experiment("graphs", SETTINGS, runs, rows=("kinds", "seeds"), hours=0.05)
