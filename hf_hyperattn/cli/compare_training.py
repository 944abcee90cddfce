"""One run of `hyperattn compare`: LoRA, and beside it a mechanism, trained on a text and read on another."""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import hf_hyperattn as ha

from ..analysis import perplexity
from ..integration.checkpoint_files import errors_as
from .models import load, patch

NONE = "none"  # the control: LoRA alone
WARM_UP = (
    0.1  # share of the steps in which learning rates rise; they fall as a half cosine in the rest
)
SCALE = 2.0  # LoRA's alpha over its rank


@dataclass
class Trial:
    """What all runs share.

    Args:
        args: of the command line, with device "cpu" and the like.
        train, held_out: token ids [N]; those held out are whole windows of `length`.
        prefix: ids before every window.
        targets: by recipe, the linear layers that LoRA goes to; the same for all.
        added: by recipe, how many parameters it adds.
    """

    args: argparse.Namespace
    train: Tensor
    held_out: Tensor
    prefix: list[int]
    length: int
    targets: list[tuple[str, int]] = field(default_factory=list)
    added: dict[str, int] = field(default_factory=dict)


def base_model(trial: Trial, recipe: str) -> Any:
    """The model, patched by a recipe in the layers that are trained."""
    model = load(trial.args)
    return model if recipe == NONE else patch(model, recipe, "blend", trial.args.layers)


def survey(trial: Trial, recipe: str) -> None:
    """Note what a recipe adds, and which linear layers there are; raises ValueError where it is no patch here."""
    model = base_model(trial, recipe)
    added = [p for name, p in model.named_parameters() if ".hyper." in name]
    trial.added[recipe] = sum(p.numel() for p in added)
    hosts = [
        name.removesuffix(".hyper") for name, _ in model.named_modules() if name.endswith(".hyper")
    ]
    trial.targets = [
        (name, sum(module.weight.shape))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and ".hyper." not in name
        and name.rpartition(".")[0] in hosts
    ]
    if not trial.targets:
        raise ValueError(
            f"{trial.args.model}: no linear layers in its attention for LoRA; allowed: Llama, GPT-NeoX, ..."
        )


def ranks(trial: Trial, recipe: str) -> dict[str, int]:
    """LoRA's rank at every target, so that with what the recipe adds there are as many parameters as in the control,
    to half a rank of one layer. The last layers give first: the others start as in the control.
    """
    sizes, rank = dict(trial.targets), {name: trial.args.rank for name, _ in trial.targets}
    over = trial.added.get(recipe, 0)
    while over > 0:
        name = max(reversed(rank), key=lambda name: rank[name])
        if over < sizes[name] / 2:
            break
        if rank[name] == 1:
            raise ValueError(
                f"--mechanisms {recipe} adds {trial.added[recipe]:,} parameters, more than LoRA of rank "
                f"{trial.args.rank} has to give up; allowed: a larger --rank"
            )
        rank[name] -= 1
        over -= sizes[name]
    return rank


def trainable(trial: Trial, recipe: str, seed: int) -> Any:
    """The model of a run, before its first step."""
    model, rank = base_model(trial, recipe), ranks(trial, recipe)
    own = {name: r for name, r in rank.items() if r != trial.args.rank}
    options = {
        "r": trial.args.rank,
        "lora_alpha": SCALE * trial.args.rank,
        "target_modules": [name for name, _ in trial.targets],
        "rank_pattern": own,
        "alpha_pattern": {name: SCALE * r for name, r in own.items()},
    }
    torch.manual_seed(seed)
    with errors_as(f"--mechanisms {recipe}: cannot be trained with LoRA"):
        if recipe == NONE:
            return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
        return get_peft_model(model, ha.lora_config(model, task_type="CAUSAL_LM", **options))


def groups(trial: Trial, model: Any, recipe: str) -> list[dict]:
    """What is trained, with its learning rates."""
    if recipe != NONE:
        return ha.parameter_groups(model, trial.args.rate, trial.args.added_rate)
    return [{"params": [p for p in model.parameters() if p.requires_grad], "lr": trial.args.rate}]


def train(
    trial: Trial, recipe: str, seed: int, steps: int, on_step: Callable[[], None]
) -> dict[str, Any]:
    """One run: trained for `steps`, then read; what came of it, with the seconds of each part."""
    start = time.perf_counter()
    model = trainable(trial, recipe, seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(groups(trial, model, recipe), betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, steps))
    draw, loaded, marks = random.Random(seed), time.perf_counter(), [time.perf_counter()]
    model.train()
    for _ in range(steps):
        loss = loss_of(model, trial, draw)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        marks.append(time.perf_counter())
        on_step()
    read = perplexity(model, trial.held_out, trial.length, prefix=trial.prefix)
    if not math.isfinite(read.loss):
        raise ValueError(
            f"{recipe}, seed {seed}: training diverged; use a smaller --rate or --added-rate"
        )
    seconds = {
        "load": loaded - start,
        "step": min(b - a for a, b in zip(marks, marks[1:])),
        "read": time.perf_counter() - marks[-1],
        "all": time.perf_counter() - start,
    }
    return {"loss": read.loss, "parameters": sum(p.numel() for p in parameters), "seconds": seconds}


def loss_of(model: Any, trial: Trial, draw: random.Random) -> Tensor:
    """The mean loss of a window that is drawn, in nats a token."""
    start = draw.randrange(len(trial.train) - trial.length + 1)
    ids = torch.cat(
        [torch.tensor(trial.prefix, dtype=torch.long), trial.train[start : start + trial.length]]
    )
    ids = ids[None].to(next(model.parameters()).device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), ids[0, 1:])


def share_of_rate(step: int, steps: int) -> float:
    """The learning rate of a step as a share of the highest."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
