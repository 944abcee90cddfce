"""MiniLM with shared queries and keys: the projections of all six layers decomposed at several ranks, without training.

Each rank is decomposed twice: for the weights alone, as in the paper (arXiv 2006.16362), and for the logits on a few
texts. The embeddings of 500 other texts are compared with those of the model as it was, and a linear probe reads
sentiment from the embeddings of reviews.
"""

from __future__ import annotations

import functools
import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor
from transformers.utils import logging as hf_logging

import hf_hyperattn as ha
from hf_hyperattn.config import HyperAttnConfig
from hf_hyperattn.integration.architectures.collaborative import conversion

from .hsa_minilm import READ, embeddings, encoder
from .hsa_texts import glosses, labelled, reviews, sample, verses
from .store import Experiment

SETTINGS = {
    "ranks": [384, 288, 192, 96],
    "steps": 100,
    "seed": 0,
    "examples": {"verses": 64, "glosses": 64, "reviews": 64},
    "read_on": {"verses": 200, "glosses": 150, "reviews": 150},
    "length": 128,
    "batch": 16,
    "probe": {"train": 500, "test": 500, "C": 10.0, "seed": 3},
}
WAYS = ("weights", "logits")


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The runs of the experiment: for each its name and what computes it."""
    yield "stock", functools.partial(stock, settings)
    for rank in settings["ranks"]:
        for way in WAYS if rank < max(settings["ranks"]) else WAYS[:1]:
            yield f"{way}, rank {rank}", functools.partial(shared, settings, rank, way)


def stock(settings: dict) -> dict:
    """The model as it is."""
    return {**size(encoder()[1]), "probe": probe(settings)}


def shared(settings: dict, rank: int, way: str) -> dict:
    """The model converted, and given back."""
    texts = sample(settings["read_on"], READ)
    every = sum(texts.values(), [])
    before = embeddings(settings, every, None)
    examples = calls(settings) if way == "logits" else None
    layers = convert(settings, rank, examples)
    try:
        alike = (embeddings(settings, every, None) * before).sum(-1)
        kinds = dict(zip(texts, alike.split([len(t) for t in texts.values()])))
        return {
            "layers": layers,
            **size(encoder()[1]),
            "cosine": {name: round(value.mean().item(), 5) for name, value in kinds.items()}
            | {"mean": round(alike.mean().item(), 5), "least": round(alike.min().item(), 5)},
            "probe": probe(settings),
        }
    finally:
        ha.unpatch_model(encoder()[1])


def convert(settings: dict, rank: int, examples: list[dict] | None) -> list[dict]:
    """What `hf_hyperattn.convert` does, with the errors of each layer as numbers."""
    model = encoder()[1]
    config = ha.CollaborativeConfig(rank=rank, steps=settings["steps"], seed=settings["seed"])
    parts: list = []
    solve = conversion.solve_parts

    def noted(*args):
        parts.extend(solve(*args))
        return parts

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity(logging.ERROR)
    conversion.solve_parts = noted
    try:
        ha.convert(model, HyperAttnConfig((config,), mode="replace"), True, examples=examples)
    finally:
        conversion.solve_parts = solve
        hf_logging.set_verbosity(level)
    return [
        {
            "weights": round(p.result.error, 4),
            "logits": None if p.result.logit_error is None else round(p.result.logit_error, 4),
            "steps": p.result.steps,
            "parameters": list(p.parameters),
        }
        for p in parts
    ]


def calls(settings: dict) -> list[dict]:
    """Calls of the model on texts that are not read later."""
    read = {text for texts in sample(settings["read_on"], READ).values() for text in texts}
    wanted = settings["probe"]
    read |= {
        text
        for part in labelled(wanted["train"], wanted["test"], wanted["seed"])
        for text, _ in part
    }
    sources = {
        "verses": verses,
        "glosses": glosses,
        "reviews": lambda: [text for text, _ in reviews()],
    }
    texts = []
    for kind, count in settings["examples"].items():
        fresh = [text for text in sources[kind]() if text not in read]
        texts += random.Random(f"{kind} examples").sample(fresh, count)
    tokenizer = encoder()[0]
    batches = (texts[i : i + settings["batch"]] for i in range(0, len(texts), settings["batch"]))
    how = dict(padding=True, truncation=True, max_length=settings["length"], return_tensors="pt")
    return [dict(tokenizer(batch, **how)) for batch in batches]


def size(model) -> dict:
    """Parameters, and bytes of the saved weights."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return {"parameters": sum(p.numel() for p in model.parameters()), "bytes": saved}


def probe(settings: dict) -> dict:
    """Test accuracy of logistic regression on the embeddings of reviews; `right` has a 1 or 0 for every one."""
    from sklearn.linear_model import LogisticRegression

    how, data = settings["probe"], []
    for part in labelled(how["train"], how["test"], how["seed"]):
        found: Tensor = embeddings(settings, [text for text, _ in part], None)
        data.append((found.double().numpy(), [label for _, label in part]))
    (x, y), (test_x, test_y) = data
    guess = LogisticRegression(C=how["C"], max_iter=5000).fit(x, y).predict(test_x)
    right = [int(a == b) for a, b in zip(guess, test_y)]
    return {"accuracy": round(sum(right) / len(right), 4), "right": "".join(map(str, right))}


EXPERIMENT = Experiment("collaborative", SETTINGS, runs)
