"""The paper's own zero-shot experiment: a sentiment classifier, such as RoBERTa fine-tuned on IMDB, whose interleaved
late layers get hierarchical attention without training.

    python recipes/experiments hsa_classifier --model textattack/roberta-base-imdb --layers 7,9,11

The model is a folder, or an id on the Hub where that can be reached. The paper names layers 7, 9, 11 of 12, or the even
ones from 16 to 24 of 24, and does not say whether it counts from 0; here layers count from 0.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hf_hyperattn as ha

from .hsa_texts import labelled
from .store import Experiment

WINDOWS = [2, 8, 64, 1024]
SETTINGS = {
    "ways": {
        "both, 2-8-64-1024, diagonal masked": {
            "tying": "both",
            "windows": WINDOWS,
            "keep_diagonal": False,
        },
        "both, 2-8-64-1024": {"tying": "both", "windows": WINDOWS},
        "key, 16-64, near 32, top 4": {
            "tying": "key",
            "windows": [16, 64],
            "near": 32,
            "sinks": 1,
            "refine_top_k": 4,
        },
    },
    "test": 500,
    "seed": 3,
    "length": 512,
    "batch": 8,
}


def experiment(model: str, layers: list[int]) -> Experiment:
    """The experiment for one model; its results are in a file of their own."""
    name = "hsa_classifier_" + re.sub(r"[^\w.-]+", "-", model.rstrip("/").rsplit("/", 1)[-1])
    return Experiment(name, SETTINGS | {"model": model, "layers": layers}, runs)


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The runs of the experiment: for each its name and what computes it."""
    yield "stock", functools.partial(accuracy, settings, None)
    for way in settings["ways"]:
        yield way, functools.partial(accuracy, settings, way)


@functools.cache
def loaded(model: str):
    """Tokenizer and classifier of two classes.

    Raises:
        ValueError: another number of classes.
    """
    found = AutoModelForSequenceClassification.from_pretrained(model).eval()
    if found.config.num_labels != 2:
        raise ValueError(
            f"{model} tells {found.config.num_labels} classes apart; allowed: classifiers of two, negative first"
        )
    return AutoTokenizer.from_pretrained(model), found


@torch.no_grad()
def accuracy(settings: dict, way: str | None) -> dict:
    """Accuracy on IMDB's reviews; `right` has a 1 or 0 for every one."""
    tokenizer, model = loaded(settings["model"])
    if way is not None:
        known = {k: tuple(v) if k == "windows" else v for k, v in settings["ways"][way].items()}
        ha.patch_model(model, ha.HsaConfig(**known), mode="replace", layers=settings["layers"])
    try:
        rows = labelled(0, settings["test"], settings["seed"])[1]
        right = [0] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
        for start in range(0, len(order), settings["batch"]):
            mine = order[start : start + settings["batch"]]
            batch = tokenizer(
                [rows[i][0] for i in mine],
                padding=True,
                truncation=True,
                max_length=settings["length"],
                return_tensors="pt",
            )
            for i, guess in zip(mine, model(**batch).logits.argmax(-1).tolist()):
                right[i] = int(guess == rows[i][1])
    finally:
        if way is not None:
            ha.unpatch_model(model)
    return {"accuracy": round(sum(right) / len(right), 4), "right": "".join(map(str, right))}
