"""Hyperbolicity first: are the points that SmolLM2, MiniLM and the models of the depth task use arranged like a tree,
do their norms follow frequency or depth, and does that tell where a hyperbolic score gains?
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from hf_hyperattn.analysis.hyperbolicity import hyperbolicity, rank_correlation, shuffled

from . import depth as depth_experiment
from .coattention import spelt
from .debian import bible_text, wordnet_nouns
from .fitting import fit
from .head_pruning import pretrained, tokenizer
from .hsa_minilm import encoder
from .hypernyms import parents_of
from .lca_task import CLS, LcaTask
from .store import Experiment, load
from .wordnet import read_parents

MODELS = ("SmolLM2", "MiniLM")
SETTINGS = {
    "models": list(MODELS),
    # Of `hyperbolicity`, the same for all points.
    "size": 100,
    "draws": 10,
    "quadruples": 20000,
    "words": 2000,
    # Names of several words, beside the nouns: as many nodes, of any level.
    "sources": ["ICD-10", "phenotypes"],
    # The depth task: scores, and the trees of the experiment with that name.
    "kinds": ["dot product", "Euclidean distance", "hyperbolic distance"],
    "depths": [10],
    "seeds": [0, 1, 2],
    "task": {
        name: depth_experiment.SETTINGS[name]
        for name in (
            "leaves",
            "named",
            "width",
            "heads",
            "layers",
            "steps",
            "batch",
            "test_pairs",
            "weight_decay",
        )
    },
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The pretrained models, points without structure, then the models of the depth task."""
    for name in settings["models"]:
        yield f"{name}, words", functools.partial(read_words, settings, name)
    for name, source in itertools.product(settings["models"], settings["sources"]):
        yield f"{name}, {source}", functools.partial(read_names, settings, name, source)
    yield "normal numbers", functools.partial(read_normal, settings)
    for level, kind, seed in itertools.product(
        settings["depths"], settings["kinds"], settings["seeds"]
    ):
        yield (
            key_of(level, kind, seed),
            functools.partial(read_trained, settings, level, kind, seed),
        )


def key_of(level: int, kind: str, seed: int) -> str:
    """The name of a run."""
    return f"depth {level}, {kind}, seed {seed}"


def measured(settings: dict, points: Tensor) -> dict:
    """The hyperbolicity of points, and of the same with every coordinate shuffled."""
    options = {name: settings[name] for name in ("size", "draws", "quadruples")}
    return {
        name: {k: round(v, 5) for k, v in vars(hyperbolicity(x, **options)).items()}
        for name, x in (("points", points), ("shuffled", shuffled(points)))
    }


def correlated(first: Tensor, second: Tensor) -> dict:
    """Their rank correlation and its interval."""
    return {k: round(v, 4) for k, v in vars(rank_correlation(first, second)).items()}


def read_normal(settings: dict) -> dict:
    """Points drawn from a normal distribution of SmolLM2's width: what no structure at all looks like."""
    points = torch.randn(settings["words"], 576, generator=torch.Generator().manual_seed(0))
    return {"drawn": measured(settings, points)}


def read_words(settings: dict, name: str) -> dict:
    """Nouns of WordNet that are one token: their rows in the table of words and their last hidden states."""
    words, ids, levels = nouns(name, settings["words"])
    table, states = table_of(name)[ids].detach(), last_states(name, ids)
    counts = frequencies()
    logs = torch.tensor([1.0 + counts[word] for word in words]).log()
    level = torch.tensor(levels, dtype=torch.float64)
    return {
        "count": len(words),
        "frequency and depth": correlated(logs, level),
    } | {
        where: measured(settings, points)
        | {
            "norm and frequency": correlated(points.norm(dim=-1), logs),
            "norm and depth": correlated(points.norm(dim=-1), level),
        }
        for where, points in (("table of words", table), ("last hidden states", states))
    }


def read_names(settings: dict, name: str, source: str) -> dict:
    """Names of diseases or phenotypes: their last hidden states, and how long they are, which grows with the depth."""
    parents = parents_of(source)
    chosen = torch.randperm(len(parents), generator=torch.Generator().manual_seed(0))[
        : settings["words"]
    ]
    nodes = [sorted(parents)[i] for i in chosen]
    ids = ids_of([spelt(node) for node in nodes], name)
    level = torch.tensor([level_of(parents, node) for node in nodes], dtype=torch.float64)
    length = torch.tensor([len(one) for one in ids], dtype=torch.float64)
    points = states_of(name, ids)
    return {
        "count": len(nodes),
        "length and depth": correlated(length, level),
        f"last hidden states, {source}": measured(settings, points)
        | {
            "norm and length": correlated(points.norm(dim=-1), length),
            "norm and depth": correlated(points.norm(dim=-1), level),
        },
    }


def states_of(name: str, ids: list[Tensor]) -> Tensor:
    """`last_states` of every name [n, width], those of one length together."""
    found: dict[int, Tensor] = {}
    for length in {len(one) for one in ids}:
        places = [i for i, one in enumerate(ids) if len(one) == length]
        found |= dict(zip(places, last_states(name, torch.stack([ids[i] for i in places]))))
    return torch.stack([found[i] for i in range(len(ids))])


def ids_of(texts: list[str], name: str) -> list[Tensor]:
    """Token ids of each text, without what a model wants around them."""
    known = tokenizer() if name == "SmolLM2" else encoder()[0]
    return [torch.tensor(known(text, add_special_tokens=False)["input_ids"]) for text in texts]


def nouns(name: str, most: int) -> tuple[list[str], Tensor, list[int]]:
    """Nouns that the model has as one token: words, token ids, and the depth of the sense that is listed first."""
    parents = read_parents(wordnet_nouns())
    first: dict[str, str] = {}
    for synset in parents:
        first.setdefault(synset.split(".")[0], synset)
    ids_of = words_of(name)
    known = sorted(word for word in first if re.fullmatch("[a-z]{3,}", word) and word in ids_of)
    chosen = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))[:most]
    words = [known[i] for i in chosen]
    return (
        words,
        torch.tensor([ids_of[word] for word in words]),
        [level_of(parents, first[word]) for word in words],
    )


def level_of(parents: dict[str, str | None], node: str) -> int:
    """The number of nodes above it."""
    level, above = 0, parents[node]
    while above is not None:
        level, above = level + 1, parents[above]
    return level


def words_of(name: str) -> dict[str, int]:
    """Token ids of the words that are one token, led by a space where the model writes it so."""
    vocabulary = (tokenizer() if name == "SmolLM2" else encoder()[0]).get_vocab()
    lead = "Ġ" if name == "SmolLM2" else ""
    return {token[len(lead) :]: i for token, i in vocabulary.items() if token.startswith(lead)}


@functools.cache
def model_of(name: str) -> torch.nn.Module:
    """The pretrained model, in float32."""
    return pretrained() if name == "SmolLM2" else encoder()[1]


def table_of(name: str) -> Tensor:
    """The table of words, [vocabulary, width]."""
    return model_of(name).get_input_embeddings().weight


@torch.no_grad()
def last_states(name: str, ids: Tensor) -> Tensor:
    """The last layer's hidden state of each word or name alone, between the tokens that the model wants around it:
    ids [n] or [n, tokens] to [n, width]. SmolLM2's is that of the last token.

    For MiniLM it is the mean over these tokens, which its sentence embeddings are before they are normalised.
    """
    ids = ids if ids.ndim == 2 else ids[:, None]
    around = lambda token: torch.full_like(ids[:, :1], token)
    if name == "SmolLM2":
        texts = torch.cat([around(tokenizer().bos_token_id), ids], 1)
    else:
        known = encoder()[0]
        texts = torch.cat([around(known.cls_token_id), ids, around(known.sep_token_id)], 1)
    found = [
        model_of(name)(input_ids=rows, output_hidden_states=True).hidden_states[-1]
        for rows in texts.split(100)
    ]
    states = torch.cat(found)
    return states[:, -1] if name == "SmolLM2" else states.mean(1)


@functools.cache
def frequencies() -> Counter:
    """How often each word stands in the King James Bible and in the source of Python's library."""
    from finetuning.texts import library

    return Counter(re.findall("[a-z]+", " ".join([bible_text(), *library()["text"]]).lower()))


def read_trained(settings: dict, level: int, kind: str, seed: int) -> dict:
    """A model of the depth task before and after its training: hyperbolicity of its table of nodes, and the rank
    correlation of the norms of its first keys with the depth of the node, all nodes at one place. The rate is the best
    of the depth experiment.
    """
    made = settings["task"] | {"sizes": {"full": 1.0}}
    task = depth_experiment.task_of(level, made["leaves"], made["named"], seed)
    torch.manual_seed(seed)
    model, results = depth_experiment.model_of(made, task, kind, made["width"]), load("depth")
    rate = depth_experiment.best_rate(results["settings"], results["runs"], kind, level, "full")
    found = {"before": orders(settings, model, task)}
    draw = np.random.default_rng([seed, 0])

    def batch_loss() -> Tensor:
        ids, labels = task.batch(made["batch"], draw)
        return torch.nn.functional.cross_entropy(model(ids), labels)

    fit(model, batch_loss, made["steps"], rate, made["weight_decay"])
    return found | {
        "accuracy": depth_experiment.score(model, task, made["test_pairs"], seed)["accuracy"],
        "after": orders(settings, model, task) | measured(settings, table_of_nodes(model, task)[0]),
    }


def table_of_nodes(model: torch.nn.Module, task: LcaTask) -> tuple[Tensor, Tensor]:
    """The rows of all nodes [n, width], and their levels [n]."""
    level = torch.zeros(task.vocabulary)
    level[torch.from_numpy(task.paths)] = torch.arange(1.0, task.depth + 1)
    nodes = level > 0
    return model.tokens.weight[nodes].detach(), level[nodes]


@torch.no_grad()
def orders(settings: dict, model: torch.nn.Module, task: LcaTask) -> dict:
    """Rank correlations of norms with the level: of the table's rows, and of each head's keys in the first block."""
    rows, level = table_of_nodes(model, task)
    norm, attention = model.blocks[0][0], model.blocks[0][1]
    keys = attention.qkv(norm(rows + model.places.weight[CLS + 1])).unflatten(
        -1, (3, attention.heads, -1)
    )[:, 1]
    return {
        "table": correlated(rows.norm(dim=-1), level),
        "keys": [correlated(head.norm(dim=-1), level) for head in keys.unbind(1)],
    }


EXPERIMENT = Experiment(
    "hyperbolicity", SETTINGS, runs, rows=("models", "sources", "kinds", "seeds"), hours=0.2
)
