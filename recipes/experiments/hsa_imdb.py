"""The paper's from-scratch setting on IMDB: one layer over paragraphs, sentences and words of reviews, with
hierarchical attention against flat attention in the same model, and against no layer at all.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import hf_hyperattn as ha

from .fitting import fit, size_of
from .hsa_fashion import WORD
from .hsa_texts import labelled
from .store import Experiment

SETTINGS = {
    "models": {
        "tree": {"attention": "tree"},
        "flat": {"attention": "flat"},
        "no layer": {"attention": "flat", "num_hidden_layers": 0},
        "tree, diagonal masked": {"attention": "tree", "keep_diagonal": False},
    },
    "levels": ["paragraph", "sentence"],
    "seeds": [0, 1, 2],
    "train": 4000,
    "test": 1000,
    "split": 5,
    "length": 256,
    "least": 3,
    "steps": 200,
    "batch": 32,
    "learning_rate": 5e-3,
    "weight_decay": 0.05,
    "dropout": 0.2,
    "width": 64,
    "heads": 4,
    "initializer_range": 0.06,
}
PADDING, UNKNOWN = 0, 1

Rows = list[tuple[str, int]]


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The runs of the experiment: for each its name and what computes it."""
    for name in settings["models"]:
        for seed in settings["seeds"]:
            yield f"{name}, seed {seed}", functools.partial(train, settings, name, seed)


def vocabulary(rows: Rows, least: int) -> dict[str, int]:
    """Numbers from 2 on for the words, in small letters, that occur so often, in alphabetical order."""
    counts = Counter(word for text, _ in rows for word in WORD.findall(text.lower()))
    return {word: i for i, word in enumerate(sorted(w for w, n in counts.items() if n >= least), 2)}


@functools.cache
def data(train: int, test: int, split: int, least: int) -> tuple[Rows, Rows, dict[str, int]]:
    """Reviews to train on, reviews to read, and the vocabulary of the first."""
    first, second = labelled(train, test, split)
    return first, second, vocabulary(first, least)


def encode(texts: list[str], known: dict[str, int], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of words and punctuation [B, L], the mask of what is no padding, and places in the text [B, L, 2].

    Args:
        texts: each has at least one word.
        known: numbers of the words; others are `UNKNOWN`.
        length: the most words of a text; those after are left out.
    """
    spans = [[match.span() for match in WORD.finditer(text)][:length] for text in texts]
    longest = max(map(len, spans))
    ids, offsets = (
        torch.full((len(texts), longest), PADDING),
        torch.zeros(len(texts), longest, 2).long(),
    )
    for row, (text, places) in enumerate(zip(texts, spans, strict=True)):
        ids[row, : len(places)] = torch.tensor(
            [known.get(text[a:b].lower(), UNKNOWN) for a, b in places]
        )
        offsets[row, : len(places)] = torch.tensor(places)
    return ids, (ids != PADDING).long(), offsets


def inputs_of(settings: dict, name: str, texts: list[str], known: dict[str, int]) -> dict:
    """What a model is given; only those with a tree are given the texts' hierarchies."""
    ids, mask, offsets = encode(texts, known, settings["length"])
    found = {"input_ids": ids, "attention_mask": mask}
    if settings["models"][name]["attention"] == "tree":
        found["hierarchy"] = ha.Hierarchy.from_text(texts, offsets, settings["levels"], mask)
    return found


def model_of(settings: dict, name: str, words: int) -> ha.HsaEncoderForSequenceClassification:
    """An untrained classifier, of the name that the settings give it, with a vocabulary of so many words."""
    width, most = settings["width"], settings["length"]
    config = {
        "vocab_size": words + 2,
        "image_size": 0,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": settings["heads"],
        "max_position_embeddings": most,
        "sibling_positions": dict.fromkeys(("text", *settings["levels"]), most),
        "hidden_dropout_prob": settings["dropout"],
        "initializer_range": settings["initializer_range"],
        "pad_token_id": PADDING,
        "num_labels": 2,
    }
    return ha.HsaEncoderForSequenceClassification(
        ha.HsaEncoderConfig(**config | settings["models"][name])
    )


def train(settings: dict, name: str, seed: int) -> dict:
    """One run; a seed is of the first weights and of the batches, the reviews are the same in all runs."""
    rows, test, known = data(*(settings[k] for k in ("train", "test", "split", "least")))
    torch.manual_seed(seed)
    model = model_of(settings, name, len(known))
    draw = torch.Generator().manual_seed(seed)

    def batch_loss() -> Tensor:
        mine = [
            rows[i] for i in torch.randint(len(rows), (settings["batch"],), generator=draw).tolist()
        ]
        labels = torch.tensor([label for _, label in mine])
        return model(
            **inputs_of(settings, name, [text for text, _ in mine], known), labels=labels
        ).loss

    loss = fit(
        model, batch_loss, settings["steps"], settings["learning_rate"], settings["weight_decay"]
    )
    found = {"accuracy": accuracy(settings, name, model.eval(), test, known), "loss": loss}
    return found | {"parameters": size_of(model)}


@torch.no_grad()
def accuracy(settings: dict, name: str, model, rows: Rows, known: dict[str, int]) -> float:
    """The share of reviews that the model judges rightly."""
    right, rows = 0, sorted(rows, key=lambda row: len(row[0]))
    for start in range(0, len(rows), settings["batch"]):
        mine = rows[start : start + settings["batch"]]
        guess = model(**inputs_of(settings, name, [text for text, _ in mine], known)).logits.argmax(
            -1
        )
        right += int((guess == torch.tensor([label for _, label in mine])).sum())
    return round(right / len(rows), 4)


EXPERIMENT = Experiment("hsa_imdb", SETTINGS, runs)
