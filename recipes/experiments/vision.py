"""A small DeiT on Fashion-MNIST from scratch: does another score than the dot product help a vision model, and how much
hangs on gamma and the mapping of a cone?

After Coneheads (arXiv 2306.00392), which reports gains of cone attention in DeiT on ImageNet.

The plan, by what was measured before (0.08 s of one core for a step of 64 images, 0.11 with a cone): 13 rows in order
of what they are worth, each with three runs of 200 steps for its learning rate and three of 800 steps.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, DeiTConfig, DeiTForImageClassification

from . import fitting
from .fitting import best_of, fit, size_of
from .scores import Scored
from .store import Experiment
from .vision_images import Fashion, Folder, mixed

CONTROLS = ("dot product", "normalised dot product", "Euclidean distance")
CONES = ("umbral cone, psi", "umbral cone, xi", "penumbral cone, psi")
GAMMAS = (1.0, 0.5, 0.1)
SETTINGS = {
    # Scores with gamma at the start, which is learned from there on; 1 where a score has none.
    "rows": [
        *([kind, 1.0] for kind in ("dot product", "umbral cone, psi", "Euclidean distance")),
        *([kind, 1.0] for kind in ("normalised dot product", "hyperbolic distance")),
        *(
            [kind, gamma]
            for gamma in (0.5, 0.1, 1.0)
            for kind in CONES
            if (kind, gamma) != ("umbral cone, psi", 1.0)
        ),
    ],
    "seeds": [0, 1, 2],
    "data": None,
    "classes": 10,
    "image": 28,
    "channels": 1,
    "patch": 4,
    "width": 64,
    "heads": 4,
    "layers": 4,
    "mlp": 128,
    # DeiT's 0.02 at its width of 384, as large for this width.
    "initializer_range": 0.05,
    "smoothing": 0.0,
    "mixup": False,
    "steps": 800,
    "batch": 64,
    "weight_decay": 0.05,
    # A learning rate for every row, by the accuracy on training images kept apart, after a quarter of the steps.
    "search": {"seed": 100, "steps": 200, "images": 2000, "rates": [1e-3, 2e-3, 4e-3]},
    "test": 5000,
}
#: DeiT-S on ImageNet, for GPUs: `python recipes/experiments vision --full --data FOLDER`, where the folder has
#: train/CLASS/*.JPEG and val/CLASS/*.JPEG. 300 epochs in batches of 256; the paper's rate of 5e-4 for 512 images is the
#: middle one.
FULL = {
    "rows": [[kind, 1.0] for kind in (*CONTROLS, "hyperbolic distance")]
    + [[kind, 0.5] for kind in CONES],
    "classes": 1000,
    "image": 224,
    "channels": 3,
    "patch": 16,
    "width": 384,
    "heads": 6,
    "layers": 12,
    "mlp": 1536,
    "initializer_range": 0.02,
    "smoothing": 0.1,
    "mixup": True,
    "steps": 1_500_000,
    "batch": 256,
    "search": {"seed": 100, "steps": 50_000, "images": 10_000, "rates": [1.25e-4, 2.5e-4, 5e-4]},
    "test": 50_000,
}


def row_of(kind: str, gamma: float) -> str:
    """The name of a row."""
    return f"{kind}, gamma {gamma:g}" if kind in CONES else kind


def key_of(kind: str, gamma: float, seed: int) -> str:
    """The name of a run."""
    return fitting.key_of(row_of(kind, gamma), seed)


def key_of_search(kind: str, gamma: float, rate: float) -> str:
    """The name of a run of the search for a learning rate."""
    return fitting.key_of_search(row_of(kind, gamma), rate)


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Row by row: the search for its learning rate, then every seed."""
    search = settings["search"]
    for kind, gamma in settings["rows"]:
        for rate in search["rates"]:
            do = functools.partial(
                train, settings, kind, gamma, search["seed"], rate, search["steps"], "search"
            )
            yield key_of_search(kind, gamma, rate), do
        for seed in settings["seeds"]:
            yield (
                key_of(kind, gamma, seed),
                functools.partial(train_at_best, settings, found, kind, gamma, seed),
            )


def best_rate(settings: dict, found: dict, kind: str, gamma: float) -> float:
    """The learning rate with the best accuracy in the search."""
    return best_of(settings["search"]["rates"], found, row_of(kind, gamma), "accuracy", max)


def train_at_best(settings: dict, found: dict, kind: str, gamma: float, seed: int) -> dict:
    """One run with the learning rate that the search found."""
    rate = best_rate(settings, found, kind, gamma)
    return train(settings, kind, gamma, seed, rate, settings["steps"], "test")


def attend(module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_):
    """What Transformers calls: the score that hangs on the module; all tokens of an image take part."""
    return module.scored(query, key, value).transpose(1, 2), None


AttentionInterface.register("scored", attend)


def model_of(settings: dict, kind: str, gamma: float) -> DeiTForImageClassification:
    """Transformers' DeiT, untrained, with one score in all layers."""
    config = DeiTConfig(
        image_size=settings["image"],
        patch_size=settings["patch"],
        num_channels=settings["channels"],
        hidden_size=settings["width"],
        num_attention_heads=settings["heads"],
        num_hidden_layers=settings["layers"],
        intermediate_size=settings["mlp"],
        initializer_range=settings["initializer_range"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=settings["classes"],
        attn_implementation="scored",
    )
    model = DeiTForImageClassification(config)
    for layer in model.deit.layers:
        scored = Scored(kind, settings["heads"], backend="auto")
        if kind in CONES:
            torch.nn.init.constant_(scored.logs["gamma"], torch.tensor(gamma).log().item())
        layer.attention.scored = scored
    return model


def train(
    settings: dict, kind: str, gamma: float, seed: int, rate: float, steps: int, part: str
) -> dict:
    """One run, and its accuracy on the images of a part."""
    data, device = data_of(*data_key(settings)), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    model = model_of(settings, kind, gamma).to(device).train()
    batches = data.batches(settings["batch"], seed)

    def batch_loss() -> Tensor:
        images, labels = (x.to(device) for x in next(batches))
        wanted = F.one_hot(labels, settings["classes"]).float()
        if settings["mixup"]:
            images, wanted = mixed(images, wanted)
        return F.cross_entropy(model(images).logits, wanted, label_smoothing=settings["smoothing"])

    loss = fit(model, batch_loss, steps, rate, settings["weight_decay"])
    found = accuracy(model.eval(), data.in_order(part, 250), device)
    learned = {
        n: [
            log
            for layer in model.deit.layers
            for log in layer.attention.scored.logs[n].exp().tolist()
        ]
        for n in model.deit.layers[0].attention.scored.logs
    }
    return {
        "accuracy": round(found, 5),
        "loss": round(loss, 5),
        "parameters": size_of(model),
        "learning_rate": rate,
        "learned": {name: round(statistics.mean(values), 4) for name, values in learned.items()},
    }


@torch.no_grad()
def accuracy(model, batches: Iterator[tuple[Tensor, Tensor]], device: str) -> float:
    """The share of images that the model names rightly."""
    right = total = 0
    for images, labels in batches:
        right += int((model(images.to(device)).logits.argmax(-1).cpu() == labels).sum())
        total += len(labels)
    return right / total


def data_key(settings: dict) -> tuple:
    """What `data_of` depends on."""
    return settings["data"], settings["search"]["images"], settings["test"], settings["image"]


@functools.cache
def data_of(folder: str | None, search: int, test: int, size: int) -> Fashion | Folder:
    """The images of a folder, or Fashion-MNIST."""
    return Folder(Path(folder), search, test, size) if folder else Fashion(search, test)


EXPERIMENT = Experiment("vision", SETTINGS, runs, rows=("rows", "seeds"), hours=1.3)
