"""The training loop that the experiments share, the names of its runs, and which rate a search found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from .pausing import wait_while_paused

#: Share of the steps in which the learning rate rises; it falls as a half cosine in the rest.
WARM_UP = 0.1
#: The loss that is reported is a mean over this many steps at the end.
LAST = 50


def key_of(row: str, seed: int) -> str:
    """The name of a run of a row."""
    return f"{row}, seed {seed}"


def key_of_search(row: str, rate: float) -> str:
    """The name of a row's run of the search for a learning rate."""
    return f"search, {row}, learning rate {rate:g}"


def best_of(
    rates: Sequence[float], found: dict, row: str, measure: str, best: Callable = min
) -> float:
    """The learning rate with the least `measure` in the search; the largest by `best=max`."""
    return best(rates, key=lambda rate: found[key_of_search(row, rate)][measure])


def best_rate(settings: dict, found: dict, kind: str) -> float:
    """The learning rate with the best accuracy in the search of a kind."""
    return best_of(settings["search"]["rates"], found, kind, "accuracy", max)


def searched_runs(
    settings: dict, found: dict, train: Callable
) -> Iterator[tuple[str, Callable[[], dict]]]:
    """First the search for learning rates, the same for every kind, then every seed and kind at the best of them.

    Args:
        settings: with "kinds", "seeds" and "search", which has "seed" and "rates".
        found: the runs that are done; those of the search have an "accuracy".
        train: called with the settings, a kind, a seed, a rate, and what it is read on: "search" or "test".
    """
    search = settings["search"]
    for kind in settings["kinds"]:
        for rate in search["rates"]:
            yield (
                key_of_search(kind, rate),
                partial(train, settings, kind, search["seed"], rate, "search"),
            )
    at_best = lambda kind, seed: train(
        settings, kind, seed, best_rate(settings, found, kind), "test"
    )
    for seed in settings["seeds"]:
        for kind in settings["kinds"]:
            yield key_of(kind, seed), partial(at_best, kind, seed)


def fit(
    model: nn.Module,
    batch_loss: Callable[[], Tensor],
    steps: int,
    rate: float,
    decay: float,
    groups: list[dict] | None = None,
) -> float:
    """Train all that is trainable with AdamW, gradients cut at norm 1; the mean loss at the end.

    Args:
        model: whatever `batch_loss` trains.
        batch_loss: the loss of a fresh batch, a scalar.
        steps: number of batches.
        rate: the highest learning rate.
        decay: weight decay of matrices; vectors have none.
        groups: of parameters with their own rates and decays, as torch's optimizers have them; None: by the above.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if groups is None:
        matrices = {"params": [p for p in trained if p.ndim > 1], "weight_decay": decay}
        vectors = {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0}
        groups = [matrices, vectors]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, steps))
    losses = []
    for _ in range(steps):
        wait_while_paused()
        loss = batch_loss()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-LAST:]) / len(losses[-LAST:])


def share_of_rate(step: int, steps: int) -> float:
    """The learning rate of a step as a share of the highest."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def size_of(model: nn.Module) -> int:
    """Number of numbers in a model's parameters."""
    return sum(p.numel() for p in model.parameters())
