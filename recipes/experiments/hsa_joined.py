"""HsaEncoder trained from scratch on images joined with texts, each partly corrupted: hierarchical attention against
flat attention in the same model, and against each signal alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import hf_hyperattn as ha

from .fitting import fit, size_of
from .hsa_fashion import VOCABULARY, descriptions, fashion, hidden, hierarchy
from .store import Experiment

SETTINGS = {
    "models": {
        "joined, tree": {"attention": "tree", "text": True, "image": True},
        "joined, flat": {"attention": "flat", "text": True, "image": True},
        "text alone, tree": {"attention": "tree", "text": True, "image": False},
        "image alone, tree": {"attention": "tree", "text": False, "image": True},
    },
    "seeds": [0, 1, 2],
    "hidden_patches": 0.5,
    "noise": 0.2,
    "wrong_facts": 0.4,
    "steps": 250,
    "batch": 64,
    "learning_rate": 4e-3,
    "weight_decay": 0.05,
    "width": 64,
    "layers": 1,
    "heads": 4,
    "initializer_range": 0.06,
    "test": 2000,
}
#: Of the pixels of Fashion-MNIST.
MEAN, DEVIATION = 0.286, 0.353


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The runs of the experiment: for each its name and what computes it."""
    for seed in settings["seeds"]:
        for name in settings["models"]:
            yield f"{name}, seed {seed}", functools.partial(train, settings, name, seed)


def model_of(settings: dict, name: str) -> ha.HsaEncoderForSequenceClassification:
    """An untrained classifier, of the name that the settings give it."""
    kind, width = settings["models"][name], settings["width"]
    config = ha.HsaEncoderConfig(
        vocab_size=len(VOCABULARY) if kind["text"] else 0,
        image_size=28 if kind["image"] else 0,
        patch_size=4,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=settings["layers"],
        num_attention_heads=settings["heads"],
        max_position_embeddings=32,
        attention=kind["attention"],
        sibling_positions={
            "signals": 2,
            "text": 2,
            "paragraph": 2,
            "sentence": 8,
            "image": 4,
            "cell": 4,
        },
        initializer_range=settings["initializer_range"],
        num_labels=10,
    )
    return ha.HsaEncoderForSequenceClassification(config)


def inputs_of(
    settings: dict, name: str, images: Tensor, labels: Tensor, draw: torch.Generator
) -> dict:
    """What a model is given; both signals are drawn in any case, so that all models see the same corruption."""
    kind = settings["models"][name]
    ids = descriptions(labels, settings["wrong_facts"], draw)
    seen = hidden(images, settings["hidden_patches"], settings["noise"], draw)
    found = {"input_ids": ids} if kind["text"] else {}
    if kind["text"] and kind["attention"] == "tree":
        found["hierarchy"] = text_tree()
    return found | ({"pixel_values": (seen - MEAN) / DEVIATION} if kind["image"] else {})


text_tree = functools.cache(hierarchy)


def train(settings: dict, name: str, seed: int) -> dict:
    """One run; accuracy on test images with one corruption, the same for all runs."""
    images, labels = fashion("train")
    torch.manual_seed(seed)
    model = model_of(settings, name)
    draw = torch.Generator().manual_seed(seed)

    def batch_loss() -> Tensor:
        rows = torch.randint(len(labels), (settings["batch"],), generator=draw)
        inputs = inputs_of(settings, name, images[rows], labels[rows], draw)
        return model(**inputs, labels=labels[rows]).loss

    loss = fit(
        model, batch_loss, settings["steps"], settings["learning_rate"], settings["weight_decay"]
    )
    return {
        "accuracy": accuracy(settings, name, model.eval()),
        "loss": loss,
        "parameters": size_of(model),
    }


@torch.no_grad()
def accuracy(settings: dict, name: str, model) -> float:
    """The share of test images that the model names rightly."""
    first = settings.get("first", 0)
    images, labels = (x[first : first + settings["test"]] for x in fashion("t10k"))
    draw, right = torch.Generator().manual_seed(12345), 0
    for rows in torch.arange(len(labels)).split(200):
        inputs = inputs_of(settings, name, images[rows], labels[rows], draw)
        right += int((model(**inputs).logits.argmax(-1) == labels[rows]).sum())
    return round(right / len(labels), 4)


EXPERIMENT = Experiment("hsa_joined", SETTINGS, runs)
