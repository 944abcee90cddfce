"""Hierarchy in a pretrained model: of 64 words of WordNet, which is above a noun? MiniLM's states of words are frozen;
what is trained is one attention score over them, each score with a projection of queries and one of keys. The same of
names of diseases (ICD-10-CM) and of the human phenotype ontology.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_hyperattn import functional as ha
from hf_hyperattn.analysis.hyperbolicity import rank_correlation

from .coattention import spelt
from .debian import wordnet_nouns
from .fitting import fit, searched_runs, size_of
from .graphs import minus_distance
from .kernels import states
from .medical import icd10, phenotypes, read_icd10, read_phenotypes
from .store import Experiment
from .wordnet import read_parents, sample_paths


def dot(query: Tensor, key: Tensor) -> Tensor:
    """q·k / sqrt(d)."""
    return query @ key.mT / math.sqrt(query.shape[-1])


def cosine(query: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    """scale · log2(n² - n) · cos(q, k), of n keys (arXiv 2010.04245)."""
    n = key.shape[-2]
    return math.log2(n * n - n) * scale[:, None, None] * dot_of_units(query, key)


def dot_of_units(query: Tensor, key: Tensor) -> Tensor:
    """cos(q, k)."""
    return F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT


#: For each kind its scores of queries and keys [1, 1, n, d], and settings learned from 1 on.
KINDS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "no adapter": (dot_of_units, ()),
    "dot product": (dot, ()),
    "normalised dot product": (cosine, ("scale",)),
    "Euclidean distance": (minus_distance, ("temperature",)),
    "hyperbolic distance": (ha.hyperbolic_scores, ("curvature", "temperature")),
    "umbral cone, xi": (partial(ha.cone_scores, variant="umbral"), ("gamma", "radius")),
    "umbral cone, psi": (
        partial(ha.cone_scores, variant="umbral", mapping="psi"),
        ("gamma", "radius"),
    ),
    "penumbral cone, psi": (partial(ha.cone_scores, variant="penumbral"), ("gamma", "radius")),
}
WORDNET = "WordNet"
SETTINGS = {
    "kinds": list(KINDS),
    "depth": 8,
    # Beside WordNet, and at which depth their leaves are.
    "sources": {"ICD-10": 6, "phenotypes": 8},
    "nouns": 2000,
    "read": {"search": 300, "test": 500},
    "questions": 2048,
    "width": 32,
    "batch": 64,
    "steps": 300,
    "weight_decay": 0.01,
    "search": {"seed": 100, "rates": [1e-3, 3e-3, 1e-2, 3e-2]},
    "seeds": list(range(6)),
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """As in `searched_runs`, one source after the other."""
    for source in (WORDNET, *settings["sources"]):
        rows = [row_of(source, kind) for kind in settings["kinds"]]
        yield from searched_runs(settings | {"kinds": rows}, found, train)


def row_of(source: str, kind: str) -> str:
    """How the runs of a source and a kind are named."""
    return kind if source == WORDNET else f"{source}: {kind}"


def parents_of(source: str) -> dict[str, str | None]:
    """The parent of every node of a source; nodes are "name.number"."""
    if source == WORDNET:
        return read_parents(wordnet_nouns())
    return read_icd10(icd10()) if source == "ICD-10" else read_phenotypes(phenotypes())


@dataclass(frozen=True)
class Tree:
    """Words and how they lie.

    Args:
        words: [nodes, d], each of mean 0 and variance 1.
        paths: int64 [leaves, depth], the nodes of each path from below the root to the leaf.
    """

    words: Tensor
    paths: Tensor


@functools.cache
def tree_of(source: str, depth: int, leaves: int) -> Tree:
    """Paths of a source, drawn once, and MiniLM's last states of every word on them, each word alone."""
    paths = sample_paths(parents_of(source), depth, leaves, 0)
    names = sorted({name for path in paths for name in path})
    number = {name: i for i, name in enumerate(names)}
    words = states([spelt(name) for name in names])[-1]
    return Tree(
        F.layer_norm(words, words.shape[-1:]),
        torch.tensor([[number[n] for n in path] for path in paths]),
    )


class Score(nn.Module):
    """Logits of every noun for every word.

    Args:
        kind: a key of `KINDS`.
        inner: numbers of a word.
        width: of queries and keys.
    """

    def __init__(self, kind: str, inner: int, width: int):
        super().__init__()
        self.scores, learned = KINDS[kind]
        bare = kind == "no adapter"
        self.query, self.key = (
            nn.Identity() if bare else nn.Linear(inner, width) for _ in range(2)
        )
        self.logs = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in learned})

    def forward(self, nouns: Tensor, words: Tensor) -> Tensor:
        """[n, d] and [m, d] to [n, m]."""
        learned = {name: log.exp() for name, log in self.logs.items()}
        return self.scores(self.query(nouns)[None, None], self.key(words)[None, None], **learned)[
            0, 0
        ]


def questions(tree: Tree, leaves: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Of each leaf one node above it, from just below the root to just above the leaf.

    Args:
        tree: the words.
        leaves: int64 [B].
        draw: random numbers.

    Returns:
        Nodes asked about [B], nodes offered [B], the right one of each in its place, and bool [B, B]: whether an
        offered node is in the race, which others that are above the noun are not.
    """
    paths = tree.paths[leaves]
    level = torch.randint(paths.shape[1] - 1, (len(paths), 1), generator=draw)
    offered = paths.gather(1, level)[:, 0]
    above = (paths[:, None, :] == offered[None, :, None]).any(-1)
    return paths[:, -1], offered, ~above | torch.eye(len(paths), dtype=torch.bool)


def split(settings: dict, seed: int, part: str) -> tuple[Tensor, Tensor]:
    """Leaves to train on, and others to be read; what is read for the search is in no other run."""
    fixed = torch.randperm(settings["nouns"], generator=torch.Generator().manual_seed(0))
    search, rest = fixed[: settings["read"]["search"]], fixed[settings["read"]["search"] :]
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))]
    test, known = rest[: settings["read"]["test"]], rest[settings["read"]["test"] :]
    return known, search if part == "search" else test


def train(settings: dict, row: str, seed: int, rate: float, part: str) -> dict:
    """One run of a row, as `row_of` names it: train on some leaves of the tree, and read others."""
    source, kind = row.split(": ") if ": " in row else (WORDNET, row)
    depth = settings["depth"] if source == WORDNET else settings["sources"][source]
    tree = tree_of(source, depth, settings["nouns"])
    known, others = split(settings, seed, part)
    torch.manual_seed(seed)
    model = Score(kind, tree.words.shape[-1], settings["width"])
    draw = torch.Generator().manual_seed(seed)

    def batch_loss() -> Tensor:
        leaves = known[torch.randint(len(known), (settings["batch"],), generator=draw)]
        return F.cross_entropy(*asked(model, tree, leaves, draw))

    found = {"learning_rate": rate, "parameters": size_of(model)}
    if found["parameters"]:
        found["loss"] = round(
            fit(model, batch_loss, settings["steps"], rate, settings["weight_decay"]), 5
        )
    return found | read(model, tree, others, settings)


def asked(model: Score, tree: Tree, leaves: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits [B, B] and the places of the right ones."""
    nouns, offered, race = questions(tree, leaves, draw)
    logits = model(tree.words[nouns], tree.words[offered]).masked_fill(~race, -torch.inf)
    return logits, torch.arange(len(leaves))


@torch.no_grad()
def read(model: Score, tree: Tree, leaves: Tensor, settings: dict) -> dict:
    """The share of questions that are answered rightly, the same for every model; and the rank correlation of the norms
    of keys with the level of the node, of all nodes above these leaves.
    """
    draw, right, size = torch.Generator().manual_seed(12345), 0, settings["batch"]
    count = -(-settings["questions"] // size)
    for _ in range(count):
        logits, places = asked(
            model, tree, leaves[torch.randperm(len(leaves), generator=draw)[:size]], draw
        )
        right += int((logits.argmax(-1) == places).sum())
    nodes, at = tree.paths[leaves].unique(return_inverse=True)
    level = torch.zeros(len(nodes))
    level[at] = torch.arange(1.0, tree.paths.shape[1] + 1)
    norms = model.key(tree.words[nodes]).norm(dim=-1)
    return {
        "accuracy": right / (count * min(size, len(leaves))),
        "norm and level": round(rank_correlation(norms, level).value, 4),
    }


EXPERIMENT = Experiment("hypernyms", SETTINGS, runs, rows=("kinds", "sources", "seeds"), hours=0.1)
