"""Train one run of `hyperattn compare`: LoRA, with or without a mechanism.

A mechanism's parameters are subtracted from LoRA's ranks, so that all runs train equally many
parameters.
"""

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
from hf_hyperattn.analysis import perplexity
from hf_hyperattn.integration.loading.checkpoint_files import errors_as

from ..shared.models import load_model, patch_recipe

NONE = "none"  # the control: LoRA alone
#: Share of the steps in which learning rates rise; then they fall as a half cosine.
WARM_UP = 0.1
SCALE = 2.0  # LoRA's alpha over its rank


@dataclass
class Trial:
    """The data that all runs share.

    Args:
        args: The command line, with a device such as "cpu".
        train: Token ids to train on, shape [N].
        held_out: Token ids to evaluate on, shape [N]: whole windows of `length`.
        prefix: Token ids in front of every window.
        length: Tokens per window.
        targets: Linear layers that get LoRA, with the parameters of one rank; the same for all
            recipes.
        added: Number of parameters that each recipe adds.
    """

    args: argparse.Namespace
    train: Tensor
    held_out: Tensor
    prefix: list[int]
    length: int
    targets: list[tuple[str, int]] = field(default_factory=list)
    added: dict[str, int] = field(default_factory=dict)


def load_base_model(trial: Trial, recipe: str) -> Any:
    """Load the model and patch a recipe into the layers to train."""
    model = load_model(trial.args)
    return model if recipe == NONE else patch_recipe(model, recipe, "blend", trial.args.layers)


def survey_recipe(trial: Trial, recipe: str) -> None:
    """Note in `trial` the parameters that a recipe adds, and the targets of LoRA.

    Raises:
        ValueError: The recipe cannot be patched in, or no attention layer has linear layers.
    """
    model = load_base_model(trial, recipe)
    added = [p for name, p in model.named_parameters() if ".hyper." in name]
    trial.added[recipe] = sum(p.numel() for p in added)
    # Attention layers with a patch are the layers to train.
    hosts = [
        name.removesuffix(".hyper") for name, _ in model.named_modules() if name.endswith(".hyper")
    ]
    # A LoRA rank of a linear layer adds in_features + out_features parameters.
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


def choose_ranks(trial: Trial, recipe: str) -> dict[str, int]:
    """Choose LoRA's ranks so that all runs have equally many parameters.

    The match is exact to half a rank of one layer. The last layers give up ranks first: the first
    layers then start as in the control.

    Raises:
        ValueError: The recipe adds more parameters than LoRA can give up.
    """
    sizes = dict(trial.targets)
    rank = {name: trial.args.rank for name, _ in trial.targets}
    over = trial.added.get(recipe, 0)
    while over > 0:
        # `max` returns the first of equals, so reversing prefers the last layer.
        name = max(reversed(rank), key=lambda name: rank[name])
        # One rank less would be farther from the target than the present rank.
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


def build_trainable(trial: Trial, recipe: str, seed: int) -> Any:
    """Build the model of a run, before its first step."""
    model = load_base_model(trial, recipe)
    rank = choose_ranks(trial, recipe)
    # Alpha follows the rank, so that LoRA keeps its scale (alpha / rank) in every layer.
    own = {name: r for name, r in rank.items() if r != trial.args.rank}
    options = {
        "r": trial.args.rank,
        "lora_alpha": SCALE * trial.args.rank,
        "target_modules": [name for name, _ in trial.targets],
        "rank_pattern": own,
        "alpha_pattern": {name: SCALE * r for name, r in own.items()},
    }
    # The seed fixes LoRA's random matrices, which every recipe of a seed shares.
    torch.manual_seed(seed)
    with errors_as(f"--mechanisms {recipe}: cannot be trained with LoRA"):
        if recipe == NONE:
            return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
        return get_peft_model(model, ha.lora_config(model, task_type="CAUSAL_LM", **options))


def make_groups(trial: Trial, model: Any, recipe: str) -> list[dict]:
    """Return the optimizer's parameter groups with their learning rates."""
    if recipe != NONE:
        return ha.parameter_groups(model, trial.args.rate, trial.args.added_rate)
    return [{"params": [p for p in model.parameters() if p.requires_grad], "lr": trial.args.rate}]


def train_run(
    trial: Trial, recipe: str, seed: int, steps: int, on_step: Callable[[], None]
) -> dict[str, Any]:
    """Train one run for `steps` steps, then measure its loss on the held-out text.

    Args:
        trial: The shared data.
        recipe: Names of mechanisms joined by "+", or `NONE`.
        seed: Seed of LoRA's matrices and of the windows.
        steps: Number of steps.
        on_step: Called after every step.

    Returns:
        A dict with the loss, the number of parameters, and the seconds of each phase.

    Raises:
        ValueError: Training diverged.
    """
    start = time.perf_counter()
    model = build_trainable(trial, recipe, seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        make_groups(trial, model, recipe), betas=(0.9, 0.95), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, steps))
    # The seed also draws the windows: runs of a seed read the same tokens, which pairs them.
    draw = random.Random(seed)
    loaded = time.perf_counter()
    marks = [loaded]
    model.train()
    for _ in range(steps):
        loss = compute_loss(model, trial, draw)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        marks.append(time.perf_counter())
        on_step()
    read = perplexity(model, trial.held_out, trial.length, prefix=trial.prefix)
    # A diverged run would make the paired test meaningless.
    if not math.isfinite(read.loss):
        raise ValueError(
            f"{recipe}, seed {seed}: training diverged; use a smaller --rate or --added-rate"
        )
    seconds = {
        "load": loaded - start,
        # The shortest step is the least disturbed by other processes.
        "step": min(b - a for a, b in zip(marks, marks[1:])),
        "read": time.perf_counter() - marks[-1],
        "all": time.perf_counter() - start,
    }
    return {"loss": read.loss, "parameters": sum(p.numel() for p in parameters), "seconds": seconds}


def compute_loss(model: Any, trial: Trial, draw: random.Random) -> Tensor:
    """Compute the mean loss of a random window, in nats per token."""
    start = draw.randrange(len(trial.train) - trial.length + 1)
    ids = torch.cat(
        [torch.tensor(trial.prefix, dtype=torch.long), trial.train[start : start + trial.length]]
    )
    ids = ids[None].to(next(model.parameters()).device)
    # Logit i predicts token i + 1, so the last one has no target.
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), ids[0, 1:])


def share_of_rate(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of the highest rate."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
