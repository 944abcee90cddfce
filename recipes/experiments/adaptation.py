"""SmolLM2 adapted to the source of Python's library: LoRA alone, and LoRA with each mechanism in the last third of the
layers, at equal numbers of trainable parameters (to 1.1 %) and equal tokens.

A mechanism's run of a seed starts from the same LoRA matrices and reads the same rows as that of LoRA alone, so that
their difference tells what the mechanism adds; where it has parameters to speak of, LoRA's rank is lower instead.

What the layers below those say of a window is the same in every run of a seed, and is computed once.

The plan: 30 runs of the search, 40 steps and 16 windows each; 30 runs of 150 steps and 36 windows. All modules but
those two that are read make 0.95 million tokens, of which a run draws 77,000.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hf_hyperattn as ha
from hf_hyperattn.registry import get_mechanism

from .fitting import best_of, fit, key_of, key_of_search
from .head_pruning import pretrained, tokenizer
from .recovered import own_scores
from .store import Experiment

ALONE = "LoRA alone"
SETTINGS = {
    "model": "SmolLM2-135M-Instruct",
    # What is patched into the layers, its settings, and LoRA's rank.
    "rows": {
        ALONE: {"mechanism": None, "rank": 8},
        "cone": {"mechanism": "cone", "rank": 8},
        "hyperbolic": {"mechanism": "hyperbolic", "rank": 8},
        "hype": {"mechanism": "hype", "rank": 8},
        "head_fusion": {"mechanism": "head_fusion", "options": {"size": 6}, "rank": 7},
        "talking_heads": {"mechanism": "talking_heads", "rank": 8},
        "mkl": {"mechanism": "mkl", "rank": 8},
        # Controls of cone and hyperbolic: another score beside the model's own, without their geometry.
        "distance": {"mechanism": "only_distance", "rank": 8},
        "cosine": {"mechanism": "only_cosine", "rank": 8},
        # And hyperbolic's score alone: values are averaged as ever, and not by the Einstein midpoint.
        "hyperbolic, mean": {
            "mechanism": "hyperbolic",
            "options": {"aggregation": "mean"},
            "rank": 8,
        },
    },
    "first_layer": 20,
    "seeds": [0, 1, 2],
    "window": 512,
    "steps": 150,
    "weight_decay": 0.0,
    "held_out_windows": {"search": 16, "test": 36},
    # LoRA's rate by LoRA alone; then that of what a mechanism adds, as many trials for each row.
    "search": {
        "seed": 100,
        "steps": 40,
        "rates": [3e-4, 1e-3, 3e-3],
        "added_rates": [1e-3, 1e-2, 3e-2],
    },
}
#: The sizes for a GPU; `python recipes/experiments adaptation --full`.
FULL = {"steps": 5000, "window": 2048, "held_out_windows": {"search": 8, "test": 8}}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """First the search for learning rates, LoRA alone leading, then every seed of every row."""
    search = settings["search"]
    for rate in search["rates"]:
        yield key_of_search(ALONE, rate), functools.partial(searched, settings, found, ALONE, rate)
    for name in list(settings["rows"])[1:]:
        for rate in search["added_rates"]:
            yield (
                key_of_search(name, rate),
                functools.partial(searched, settings, found, name, rate),
            )
    yield "stock", functools.partial(read_stock, settings)
    for seed in settings["seeds"]:
        for name in settings["rows"]:
            yield key_of(name, seed), functools.partial(train_at_best, settings, found, name, seed)


def best_rate(settings: dict, found: dict, name: str) -> float:
    """The learning rate with the least loss in the search: LoRA's for LoRA alone, else that of what was added."""
    rates = settings["search"]["rates" if name == ALONE else "added_rates"]
    return best_of(rates, found, name, "held_out")


def searched(settings: dict, found: dict, name: str, rate: float) -> dict:
    """One run of the search, read on modules that are not used again."""
    lora = rate if name == ALONE else best_rate(settings, found, ALONE)
    search = settings["search"]
    return train(settings, name, search["seed"], lora, rate, search["steps"], "search")


def train_at_best(settings: dict, found: dict, name: str, seed: int) -> dict:
    """One run with the learning rates that the search found."""
    rates = best_rate(settings, found, ALONE), best_rate(settings, found, name)
    return train(settings, name, seed, *rates, settings["steps"], "test")


def read_stock(settings: dict) -> dict:
    """The loss of the model as it is."""
    return held_out(settings, upper_part(settings, pretrained()).to(device()), "test")


def train(
    settings: dict, name: str, seed: int, rate: float, added: float, steps: int, part: str
) -> dict:
    """One run: LoRA at a rate, what the mechanism adds at its own, and the loss on modules that were held out."""
    model = model_of(settings, name, seed).to(device())
    last = fit_windows(settings, model, seed, rate, added, steps)
    return held_out(settings, model, part) | {
        "loss": round(last, 5),
        "parameters": sum(p.numel() for _, p in trained(model)),
        "added": sum(p.numel() for n, p in trained(model) if ".hyper." in n),
        "rates": {"lora": rate, "added": added},
        "largest_added": {
            n: round(p.detach().abs().max().item(), 4)
            for n, p in trained(model)
            if ".hyper." in n and ".20." in n
        },
    }


def fit_windows(
    settings: dict, model: nn.Module, seed: int, rate: float, added: float, steps: int
) -> float:
    """Train on windows drawn from the modules: LoRA at a rate, what a mechanism adds at its own; the mean
    loss at the end.
    """
    draw, last = random.Random(seed), len(tokens("train")) - settings["window"]

    def loss() -> Tensor:
        return mean_loss(settings, model, "train", draw.randrange(last))

    groups = [
        {"params": [p for n, p in trained(model) if ".hyper." not in n], "lr": rate},
        {"params": [p for n, p in trained(model) if ".hyper." in n], "lr": added},
    ]
    groups = [
        group | {"weight_decay": settings["weight_decay"]} for group in groups if group["params"]
    ]
    return fit(model.train(), loss, steps, rate, settings["weight_decay"], groups)


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What is trained, by name."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def model_of(settings: dict, name: str, seed: int) -> nn.Module:
    """SmolLM2 with LoRA on the attention projections of its last layers, and there the row's mechanism, at identity."""
    from peft import LoraConfig, get_peft_model

    own_scores()
    row, model = settings["rows"][name], pretrained()
    layers = list(range(settings["first_layer"], model.config.num_hidden_layers))
    modules = [f"layers.{i}.self_attn.{kind}_proj" for i in layers for kind in "qkvo"]
    config = {"r": row["rank"], "lora_alpha": 2 * row["rank"], "target_modules": modules}
    if row["mechanism"]:
        config_class = get_mechanism(row["mechanism"]).config
        ha.patch_model(model, config_class(**row.get("options", {})), layers=layers)
    upper_part(settings, model)
    torch.manual_seed(seed)
    if row["mechanism"]:
        return get_peft_model(model, ha.lora_config(model, **config))
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))


def mean_loss(settings: dict, model: nn.Module, part: str, start: int) -> Tensor:
    """Mean loss of a token in nats, in the window that begins at a token of a part."""
    size = settings["window"]
    ids = window(part, start, size)
    if below := settings.get("first_layer"):
        inputs = {"inputs_embeds": states_below(below, part, start, size)}
    else:
        inputs = {"input_ids": ids}
    logits = model(**inputs, use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), ids[0, 1:])


def window(part: str, start: int, size: int) -> Tensor:
    """Token ids [1, N]."""
    return tokens(part)[None, start : start + size].to(device())


class Done(nn.Module):
    """In place of a layer whose part was computed before: states go through as they come."""

    def forward(self, hidden_states: Tensor, **_) -> Tensor:
        return hidden_states


def upper_part(settings: dict, model: nn.Module) -> nn.Module:
    """The model, which is given what its first layers made of the tokens, by `inputs_embeds`."""
    layers = model.model.layers
    for i in range(settings["first_layer"]):
        layers[i] = Done()
    return model


@functools.lru_cache(maxsize=256)  # the windows of a seed, and those that are read
def states_below(layers: int, part: str, start: int, size: int) -> Tensor:
    """What the first layers of SmolLM2 make of a window, [1, N, D]."""
    with torch.no_grad():
        return lower_part(layers)(
            input_ids=window(part, start, size), use_cache=False
        ).last_hidden_state


@functools.cache
def lower_part(layers: int) -> nn.Module:
    """The first layers of SmolLM2, without the norm at the end."""
    lower = pretrained().model
    lower.layers, lower.norm = lower.layers[:layers], nn.Identity()
    return lower.to(device())


@torch.no_grad()
def held_out(settings: dict, model: nn.Module, part: str) -> dict:
    """The mean loss over windows of modules that were held out, and that of each."""
    size = settings["window"]
    starts = range(0, size * settings["held_out_windows"][part], size)
    losses = [mean_loss(settings, model.eval(), part, start).item() for start in starts]
    return {
        "held_out": statistics.mean(losses),
        "perplexity": math.exp(statistics.mean(losses)),
        "windows": [round(x, 5) for x in losses],
    }


@functools.cache
def tokens(part: str) -> Tensor:
    """Token ids of modules of Python's library: of every ten one is read in the "search", one in the "test", and eight
    are trained on; a module has its say up to 1,024 tokens where it is read, so that none speaks for all.
    """
    from zlib import crc32

    from finetuning.texts import library

    wanted = {"search": (1,), "test": (0,), "train": range(2, 10)}[part]
    found = []
    for name, text in zip(*(library()[column] for column in ("name", "text"))):
        if crc32(name.encode()) % 10 in wanted:
            ids = tokenizer()(text, add_special_tokens=False, verbose=False)["input_ids"]
            found += (ids if part == "train" else ids[:1023]) + [tokenizer().eos_token_id]
    return torch.tensor(found)


def device() -> str:
    """A GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


EXPERIMENT = Experiment("adaptation", SETTINGS, runs, rows=("rows", "seeds"), hours=4.5)
