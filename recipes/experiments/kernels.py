"""Does a kernel that multiple kernel learning finds align with the task's own similarity? MiniLM's seven layers give
seven kernels of nouns, attention over labelled nouns tells a noun's class in WordNet, and the weights of the mixture
are learned by that alone, with the kernels as they are and with projections that are learned beside the weights.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_hyperattn import functional as ha

from .debian import wordnet_nouns
from .fitting import fit, searched_runs
from .hsa_minilm import encoder
from .store import Experiment
from .wordnet import read_parents, sample_paths

#: How heads are weighted: alike, by numbers that are drawn, by numbers that are learned, or by both tokens.
EVEN, RANDOM, LEARNED, BY_TOKEN = "even", "random", "learned", "by token"
SETTINGS = {
    # "layers": what kernels are mixed, -1 the last layer's alone; "width": of learned projections, None for none;
    # "distance": minus the distance of all features in place of the sum of cosines.
    "kinds": {
        "even mixture": {"weights": EVEN},
        "random mixture": {"weights": RANDOM},
        "learned mixture": {"weights": LEARNED},
        "mixture by token": {"weights": BY_TOKEN},
        "last layer": {"weights": EVEN, "layers": -1},
        "Euclidean distance": {"weights": EVEN, "distance": True},
        "projected: even mixture": {"weights": EVEN, "width": 16},
        "projected: random mixture": {"weights": RANDOM, "width": 16},
        "projected: learned mixture": {"weights": LEARNED, "width": 16},
        "projected: mixture by token": {"weights": BY_TOKEN, "width": 16},
        "projected: last layer": {"weights": EVEN, "width": 112, "layers": -1},
        "projected: Euclidean distance": {"weights": EVEN, "width": 16, "distance": True},
    },
    # Nouns at this depth; their class is the one above at `class_depth`, among so many classes.
    "depth": 8,
    "class_depth": 4,
    "nouns": 3000,
    "classes": 16,
    "most_of_a_class": 60,
    "test": 0.4,
    "labelled": 128,
    "asked": 64,
    "steps": 200,
    "weight_decay": 0.01,
    "random_deviation": 1.5,
    "search": {"seed": 100, "rates": [3e-3, 1e-2, 3e-2, 1e-1]},
    "seeds": list(range(10)),
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """As in `searched_runs`; the search has nouns that no other run draws so."""
    return searched_runs(
        settings, found, lambda settings, kind, seed, rate, _: train(settings, kind, seed, rate)
    )


class Nouns:
    """Nouns, the first of them to be trained on.

    Args:
        features: [layers, n, d], each row of norm 1, their mean over the nouns trained on taken off before.
        labels: int64 [n].
        paths: int64 [n, depth], the node of every level, from the root down.
        trained: how many of the first are trained on; the others are read.
    """

    def __init__(self, features: Tensor, labels: Tensor, paths: Tensor, trained: int):
        centred = features - features[:, :trained].mean(1, keepdim=True)
        self.features, self.labels, self.paths, self.trained = (
            F.normalize(centred, dim=-1),
            labels,
            paths,
            trained,
        )

    def similarity(self, rows: slice) -> dict[str, Tensor]:
        """The task's own kernels, [n, n] each: 1 within a class, and how many nodes two paths share."""
        label, path = self.labels[rows], self.paths[rows]
        return {
            "class": (label[:, None] == label[None]).double(),
            "tree": (path[:, None] == path[None]).cumprod(-1).sum(-1).double(),
        }


@functools.lru_cache(maxsize=1)
def nouns_of(
    depth: int, class_depth: int, count: int, classes: int, most: int, test: float, seed: int
) -> Nouns:
    """Nouns of WordNet drawn with this seed, in the classes that have most of them."""
    paths = sample_paths(read_parents(wordnet_nouns()), depth, count, seed)
    draw = torch.Generator().manual_seed(seed)
    paths = [paths[i] for i in torch.randperm(len(paths), generator=draw)]
    frequent = [
        name for name, _ in Counter(path[class_depth - 1] for path in paths).most_common(classes)
    ]
    kept, had = [], Counter()
    for path in paths:
        name = path[class_depth - 1]
        had[name] += 1
        if name in frequent and had[name] <= most:
            kept.append(path)
    number = {name: i for i, name in enumerate(sorted({name for path in kept for name in path}))}
    words = [path[-1].rsplit(".", 1)[0].replace("_", " ") for path in kept]
    labels = torch.tensor([frequent.index(path[class_depth - 1]) for path in kept])
    nodes = torch.tensor([[number[name] for name in path] for path in kept])
    return Nouns(states(words), labels, nodes, len(kept) - round(test * len(kept)))


@torch.no_grad()
def states(words: list[str], batch: int = 100) -> Tensor:
    """MiniLM's hidden states of each word alone, the mean over its tokens: [layers + 1, n, width]."""
    tokenizer, model = encoder()
    found = []
    for start in range(0, len(words), batch):
        inputs = tokenizer(words[start : start + batch], padding=True, return_tensors="pt")
        mask = inputs["attention_mask"][None, ..., None]
        hidden = torch.stack(model(**inputs, output_hidden_states=True).hidden_states)
        found.append((hidden * mask).sum(2) / mask.sum(2))
    return torch.cat(found, 1)


class Mixture(nn.Module):
    """Attention of nouns over labelled nouns, heads being kernels.

    Args:
        kind: a value of the setting "kinds".
        layers, width: of the features.
        deviation: of the drawn logits of random weights.
    """

    def __init__(self, kind: dict, layers: int, width: int, deviation: float):
        super().__init__()
        self.weights, self.distance, self.chosen = (
            kind["weights"],
            kind.get("distance"),
            kind.get("layers"),
        )
        heads = 1 if self.chosen == -1 else layers
        drawn = deviation * torch.randn(heads)  # the same numbers whatever the kind
        self.beta = nn.Parameter(
            drawn if self.weights == RANDOM else torch.zeros(heads), self.weights == LEARNED
        )
        self.by_token = (
            nn.Parameter(torch.zeros(heads, width)) if self.weights == BY_TOKEN else None
        )
        narrow = kind.get("width")
        self.maps = (
            nn.Parameter(torch.randn(heads, width, narrow) / math.sqrt(width)) if narrow else None
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def points(self, features: Tensor) -> Tensor:
        """Rows of every kernel, [1, heads, n, d]."""
        rows = features[-1:] if self.chosen == -1 else features
        return (rows if self.maps is None else F.normalize(rows @ self.maps, dim=-1))[None]

    def logits_of(self, features: Tensor) -> Tensor:
        """Logits of the weights by token, [1, heads, n]; those of the last layer's features."""
        return (self.beta[:, None] + self.by_token @ features[-1].T)[None]

    def kernel(self, features: Tensor) -> Tensor:
        """The mixture of all pairs [n, n], double, without its scale."""
        points = self.points(features)[0].double()
        if self.distance:
            together = points.transpose(0, 1).flatten(1)
            return -torch.cdist(together, together)
        kernels = points @ points.mT
        if self.by_token is None:
            return (kernels * self.beta.softmax(0)[:, None, None]).sum(0)
        weight = self.logits_of(features)[0].softmax(0).double() * len(self.beta)
        return (kernels * weight[:, :, None] * weight[:, None]).mean(0)

    def forward(self, asked: Tensor, known: Tensor, values: Tensor) -> Tensor:
        """Features [layers, n, d] and [layers, m, d], values [m, classes] to their means [n, classes]."""
        query, key = self.points(asked), self.points(known)
        if self.distance:
            together = [x[0].transpose(0, 1).flatten(1) for x in (query, key)]
            squared = (2 * len(query[0]) - 2 * together[0] @ together[1].T).clamp_min(
                1e-12
            )  # of unit rows
            return (-self.log_scale.exp() * squared.sqrt()).softmax(-1) @ values
        if self.by_token is None:
            weights = {"beta": self.beta}
        else:
            weights = {"beta": self.logits_of(asked), "key_beta": self.logits_of(known)}
        query, scale = (
            query * self.log_scale.exp(),
            1 / query.shape[1],
        )  # the mean of cosines, where weights are even
        rows = values.expand(1, query.shape[1], *values.shape)
        return ha.mkl_attention(query, key, rows, scale=scale, combine=True, **weights)[0, 0]


def train(settings: dict, kind: str, seed: int, rate: float) -> dict:
    """One run: train on some nouns; accuracy and alignment on others, before and after."""
    names = ("depth", "class_depth", "nouns", "classes", "most_of_a_class", "test")
    nouns = nouns_of(*(settings[name] for name in names), seed)
    torch.manual_seed(seed)
    layers, _, width = nouns.features.shape
    model = Mixture(settings["kinds"][kind], layers, width, settings["random_deviation"])
    values = F.one_hot(nouns.labels, settings["classes"]).float()
    draw = torch.Generator().manual_seed(seed)

    def batch_loss() -> Tensor:
        order = torch.randperm(nouns.trained, generator=draw)
        asked, known = (
            order[: settings["asked"]],
            order[settings["asked"] :][: settings["labelled"]],
        )
        means = model(nouns.features[:, asked], nouns.features[:, known], values[known])
        return F.nll_loss((means + 1e-4).log(), nouns.labels[asked])

    before = alignments(model, nouns)
    loss = fit(model, batch_loss, settings["steps"], rate, settings["weight_decay"])
    with torch.no_grad():
        features, end = nouns.features, nouns.trained
        means = model(features[:, end:], features[:, :end], values[:end])
    return {
        "accuracy": round((means.argmax(-1) == nouns.labels[end:]).double().mean().item(), 5),
        "before": before,
        "after": alignments(model, nouns),
        "weights": [round(x, 4) for x in model.beta.softmax(0).tolist()],
        "nouns": len(nouns.labels),
        "loss": round(loss, 5),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "learning_rate": rate,
    }


@torch.no_grad()
def alignments(model: Mixture, nouns: Nouns) -> dict[str, float]:
    """Centred alignment of the mixture with the task's kernels, on the nouns that are read; and with that of the
    classes in another order, which is what chance gives.
    """
    rows = slice(nouns.trained, None)
    kernel, wanted = model.kernel(nouns.features[:, rows]), nouns.similarity(rows)
    order = torch.randperm(len(kernel), generator=torch.Generator().manual_seed(0))
    wanted["chance"] = wanted["class"][order][:, order]
    return {name: round(alignment(kernel, other), 5) for name, other in wanted.items()}


def alignment(first: Tensor, second: Tensor) -> float:
    """<K, L> / (|K|·|L|) of centred kernels [n, n] (Cortes, Mohri and Rostamizadeh, JMLR 13, 2012)."""
    first, second = (k - k.mean(0) - k.mean(1, keepdim=True) + k.mean() for k in (first, second))
    return ((first * second).sum() / (first.norm() * second.norm())).item()


EXPERIMENT = Experiment("kernels", SETTINGS, runs, rows=("kinds", "seeds"), hours=0.15)
