"""Injection, then fine-tuning: SmolLM2 whose layers attend by hierarchical attention with tied keys, fine-tuned with
LoRA on the source of Python's library; and the other way round, fine-tuned with its own attention and then injected.

Both learn from the same windows with as many steps, each at its own best rate. Beside them the injected model without
training, and the fine-tuned one with its own attention, which is what there is to be reached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

import hf_hyperattn as ha
from hf_hyperattn.inject.hsa import HsaHeadRule
from hf_hyperattn.inject.retrieval import examples
from hf_hyperattn.integration.patching.patch import base_model

from .adaptation import best_of, fit_windows, held_out, tokens
from .fitting import key_of, key_of_search
from .head_pruning import pretrained, tokenizer
from .recovered import answers
from .store import Experiment

FIRST, AFTER = "injected, then LoRA", "LoRA, then injected"
SETTINGS = {
    "model": "SmolLM2-135M-Instruct",
    "rule": {"windows": [4, 16], "near": 16, "sinks": 4, "refine_top_k": 2},
    "rows": [FIRST, AFTER],
    "rank": 8,
    "seeds": [0, 1, 2],
    "window": 512,
    "steps": 60,
    "weight_decay": 0.0,
    "patch_rate": 1e-2,
    "held_out_windows": {"search": 8, "test": 12},
    "tasks": ["copying", "needle_keys"],
    "search": {"seed": 100, "steps": 20, "rates": [3e-4, 1e-3, 3e-3]},
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """First the search for learning rates, then the models without training, then every seed and row."""
    search = settings["search"]
    for row in settings["rows"]:
        for rate in search["rates"]:
            yield key_of_search(row, rate), functools.partial(searched, settings, row, rate)
    yield "stock", lambda: read(settings, pretrained())
    yield "injected", lambda: read(settings, injected(settings, pretrained()))
    for seed in settings["seeds"]:
        for row in settings["rows"]:
            yield key_of(row, seed), functools.partial(train_at_best, settings, found, row, seed)


def best_rate(settings: dict, found: dict, row: str) -> float:
    """LoRA's rate with the least loss in the search."""
    return best_of(settings["search"]["rates"], found, row, "held_out")


def searched(settings: dict, row: str, rate: float) -> dict:
    """One run of the search, read on modules that are not used again, by the attention that it is trained with."""
    search = settings["search"]
    return held_out(settings, train(settings, row, search["seed"], rate, search["steps"]), "search")


def train_at_best(settings: dict, found: dict, row: str, seed: int) -> dict:
    """One run with the rate that the search found; what is fine-tuned first is read before its injection, too."""
    rate = best_rate(settings, found, row)
    model, before = train(settings, row, seed, rate, settings["steps"]), None
    if row == AFTER:
        model = model.merge_and_unload()
        before = read(settings, model)
        model = injected(settings, model)
    return read(settings, model) | {"learning_rate": rate, "own_attention": before}


def train(settings: dict, row: str, seed: int, rate: float, steps: int) -> nn.Module:
    """SmolLM2 with LoRA, trained; injected before that or not."""
    from peft import LoraConfig, get_peft_model

    model = pretrained()
    options = {"r": settings["rank"], "lora_alpha": 2 * settings["rank"]}
    options["target_modules"] = [f"{kind}_proj" for kind in "qkvo"]
    config = LoraConfig(task_type="CAUSAL_LM", **options)
    if row == FIRST:
        config = ha.lora_config(injected(settings, model), **options)
    torch.manual_seed(seed)
    model = get_peft_model(model, config)
    fit_windows(settings, model, seed, rate, settings["patch_rate"], steps)
    return model


def injected(settings: dict, model: nn.Module) -> nn.Module:
    """The model with the rule in every head of every layer."""
    config = ha.HsaConfig(**rule_of(settings), tying="key", tuned_length=settings["window"])
    return ha.patch_model(model, config, mode="replace")


def share(settings: dict) -> float:
    """Of the pairs of ordinary attention in a window, so many are computed."""
    return HsaHeadRule(**rule_of(settings)).share(settings["window"])


def rule_of(settings: dict) -> dict:
    """The rule's numbers."""
    return settings["rule"] | {"windows": tuple(settings["rule"]["windows"])}


def read(settings: dict, model: nn.Module) -> dict:
    """Loss on held-out modules, and how well what stands far back is found again, by task."""
    texts = [tokens("test")[i * settings["window"] :] for i in (1, 3)]
    made = examples(tokenizer(), texts, settings["window"], tasks=settings["tasks"])
    scores: dict[str, list[float]] = {}
    for example, score in zip(made, answers(base_model(model).eval(), made)):
        scores.setdefault(example.task, []).append(score.nats)
    return held_out(settings, model, "test") | {
        task: round(sum(x) / len(x), 5) for task, x in scores.items()
    }


EXPERIMENT = Experiment("injected_lora", SETTINGS, runs, rows=("rows", "seeds"), hours=0.55)
