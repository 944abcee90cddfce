"""Is concatenation of heads wasteful? SmolLM2's heads pruned by the weights of head_fusion and by their rivals.

The base is frozen. Weights of heads are trained for a few minutes, of two kinds: those that each token chooses, and one
learned number a head, static fusion; with a penalty on their entropy where a way of the settings has one. Then a share
of all heads is dropped, and the perplexity on held-out text is read. A third way trains nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import random
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import hf_hyperattn as ha
from hf_hyperattn.analysis.heads import dropped_heads, fusion_layers, head_usage, record_heads
from hf_hyperattn.analysis.perplexity import perplexity

from .fitting import fit
from .head_ranks import RANKS, Heads, random_ranks
from .hsa_texts import reviews, verses
from .store import Experiment

BETA_PER_TOKEN, RANDOM_PER_TOKEN = "beta, per token", "random, per token"
FUSION = ["query_map", "kappa", "bias"]
BY_LAYER = ["gradient", "contribution, by layer", "weight norm, by layer", "random"]
SETTINGS = {
    "model": "SmolLM2-135M-Instruct",
    # What is trained (None: nothing), how much of the entropy is added to the loss, and what heads are dropped by.
    "ways": {
        "input-dependent": {
            "trained": FUSION,
            "entropy": 0.0,
            "rankings": ["beta", *BY_LAYER, BETA_PER_TOKEN, RANDOM_PER_TOKEN],
        },
        "static": {"trained": ["bias"], "entropy": 0.0, "rankings": ["beta", "gradient", "random"]},
        "untrained": {"trained": None, "rankings": ["gradient", "random"]},
        # so much of the entropy is subtracted: tokens are kept from choosing few heads
        "input-dependent, entropy x 0.01": {
            "trained": FUSION,
            "entropy": -0.01,
            "rankings": ["beta"],
        },
        "input-dependent, entropy x 0.1": {
            "trained": FUSION,
            "entropy": -0.1,
            "rankings": ["beta"],
        },
    },
    "seeds": [0, 1, 2],
    "steps": 30,
    "window": 256,
    "search": {"seed": 100, "steps": 15, "rates": [3e-3, 1e-2, 3e-2]},
    "shares": [0.1, 0.3],
    "held_out_window": 512,
    "held_out_windows": 1,
    "calibration_tokens": 256,
    "sentence": "The capital of France is Paris, and the capital of Italy is Rome.",
}
KINDS = ("Bible", "Python", "reviews")
#: Tokens at the end of each training text that the search for a rate is read on; nothing is trained on them.
VALIDATION = 1024


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """First the search for learning rates, then every way with every seed: its training, and its rankings."""
    yield "stock", functools.partial(read_stock, settings)
    for way, wanted in settings["ways"].items():
        for rate in settings["search"]["rates"] if wanted["trained"] else ():
            yield key_of_search(way, rate), functools.partial(searched, settings, way, rate)
    for seed in settings["seeds"]:
        for way, wanted in settings["ways"].items():
            yield (
                key_of(way, seed, "trained"),
                functools.partial(trained, settings, found, way, seed),
            )
            for ranking in wanted["rankings"]:
                at_random = ranking == RANDOM_PER_TOKEN
                do = functools.partial(pruned, settings, way, seed, ranking)
                if ranking in (BETA_PER_TOKEN, RANDOM_PER_TOKEN):
                    do = functools.partial(pruned_per_token, settings, way, seed, at_random)
                yield key_of(way, seed, ranking), do


def key_of(way: str, seed: int, what: str) -> str:
    """The name of a run."""
    return f"{way}, seed {seed}; {what}"


def key_of_search(way: str, rate: float) -> str:
    """The name of a run of the search for a learning rate."""
    return f"search, {way}, learning rate {rate:g}"


def best_rate(settings: dict, found: dict, way: str) -> float:
    """The learning rate with the least loss on the ends of the training texts."""
    return min(
        settings["search"]["rates"], key=lambda r: found[key_of_search(way, r)]["validation"]
    )


def read_stock(settings: dict) -> dict:
    """Perplexity of the model as it is."""
    return {"perplexity": perplexities(settings, pretrained())}


def searched(settings: dict, way: str, rate: float) -> dict:
    """The loss on the ends of the training texts after training with a rate, the mean over texts."""
    model = ha.patch_model(pretrained(), ha.HeadFusionConfig())
    loss = train(
        settings, model, way, settings["search"]["seed"], rate, settings["search"]["steps"]
    )
    ends = [tokens(kind, held_out=False)[-VALIDATION:] for kind in KINDS]
    read = [math.log(perplexity(model, end, settings["held_out_window"]).value) for end in ends]
    return {"loss": round(loss, 4), "validation": round(statistics.mean(read), 5)}


def train(settings: dict, model: nn.Module, way: str, seed: int, rate: float, steps: int) -> float:
    """Train what the way trains of a model with head_fusion; the mean loss at the end."""
    wanted, draw = settings["ways"][way], random.Random(seed)
    ha.freeze_base(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            parameter.requires_grad and name.split(".")[-1] in wanted["trained"]
        )
    texts = [tokens(kind, held_out=False)[:-VALIDATION] for kind in KINDS]

    def loss() -> Tensor:
        text, size = texts[draw.randrange(len(texts))], settings["window"]
        start = draw.randrange(len(text) - size)
        ids = text[None, start : start + size]
        with record_heads(model) if wanted["entropy"] else contextlib.nullcontext() as heads:
            value = model(input_ids=ids, labels=ids, use_cache=False).loss
        return value + wanted["entropy"] * heads.entropy() if wanted["entropy"] else value

    return fit(model, loss, steps, rate, decay=0.0)


def trained(settings: dict, found: dict, way: str, seed: int) -> dict:
    """Train the weights of heads and keep them; perplexity, entropy, and what heads a sentence uses."""
    model, how = ha.patch_model(pretrained(), ha.HeadFusionConfig()), {}
    if settings["ways"][way]["trained"]:
        how["learning_rate"] = best_rate(settings, found, way)
        how["loss"] = round(
            train(settings, model, way, seed, how["learning_rate"], settings["steps"]), 4
        )
        how["parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    torch.save(
        {n: p for n, p in model.state_dict().items() if ".hyper." in n},
        weights_file(settings, way, seed),
    )
    usage, ids = calibrated(settings, model, seed), tokenizer()(settings["sentence"])["input_ids"]
    names = [tokenizer().decode([i]) for i in ids]
    return how | {
        "perplexity": perplexities(settings, model),
        "mean": {name: [round(x, 3) for x in mean.tolist()] for name, mean in usage.mean().items()},
        "entropy": {name: round(x, 4) for name, x in usage.entropy().items()},
        "sentence": head_usage(model, input_ids=torch.tensor([ids])).by_token(names).splitlines(),
    }


def pruned(settings: dict, way: str, seed: int, ranking: str) -> dict:
    """Perplexity without the shares of all heads that a ranking puts last."""
    model = fused(settings, way, seed)
    if ranking == "random":
        ranks = random_ranks(Heads(model, None, None), seed)
    else:
        texts = calibration(settings, seed)
        ranks = RANKS[ranking](Heads(model, calibrated(settings, model, seed), texts))
    order = sorted(ranks, key=ranks.get)
    found = {}
    for share in settings["shares"]:
        drop: dict[str, list[int]] = {}
        for name, head in order[: round(share * len(order))]:
            drop.setdefault(name, []).append(head)
        with dropped_heads(model, {name: torch.tensor(heads) for name, heads in drop.items()}):
            found[str(share)] = perplexities(settings, model)
    return {"perplexity": found}


def pruned_per_token(settings: dict, way: str, seed: int, at_random: bool) -> dict:
    """Perplexity where every token drops a share of the heads of each layer: those it weighs least, or any."""
    model, found = fused(settings, way, seed), {}
    draw = torch.Generator().manual_seed(seed)
    for share in settings["shares"]:
        with dropped_heads(model, share):
            for layers in fusion_layers(model).values() if at_random else ():
                layers[0].keep = of_random(layers[0].keep, draw)
            found[str(share)] = perplexities(settings, model)
    return {"perplexity": found}


def of_random(keep: Callable, draw: torch.Generator) -> Callable:
    """The same choice among numbers that know nothing of the token."""
    return lambda beta: keep(torch.rand(beta.shape, generator=draw))


def perplexities(settings: dict, model: nn.Module) -> dict[str, float]:
    """Perplexity of the held-out text of each kind."""
    size, count = settings["held_out_window"], settings["held_out_windows"]
    return {
        kind: round(perplexity(model, tokens(kind, held_out=True)[: size * count], size).value, 3)
        for kind in KINDS
    }


def calibrated(settings: dict, model: nn.Module, seed: int):
    """The weights of heads on the training texts, as a report."""
    return head_usage(model.eval(), input_ids=calibration(settings, seed), use_cache=False)


def calibration(settings: dict, seed: int) -> Tensor:
    """Token ids [3, n], a piece of each training text, another for each seed."""
    size = settings["calibration_tokens"]
    return torch.stack(
        [tokens(kind, held_out=False)[seed * size : (seed + 1) * size] for kind in KINDS]
    )


def pretrained() -> nn.Module:
    """SmolLM2 in float32."""
    from transformers import AutoModelForCausalLM

    from hyperattn_cli.shared.smollm2 import smollm2

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()


@functools.cache
def tokenizer():
    """SmolLM2's."""
    from transformers import AutoTokenizer

    from hyperattn_cli.shared.smollm2 import smollm2

    return AutoTokenizer.from_pretrained(smollm2())


def fused(settings: dict, way: str, seed: int) -> nn.Module:
    """SmolLM2 with the weights of heads that were trained.

    Raises:
        ValueError: their file is gone.
    """
    path = weights_file(settings, way, seed)
    if not path.exists():
        raise ValueError(f"{path} is missing; run: python recipes/experiments head_pruning --fresh")
    model = ha.patch_model(pretrained(), ha.HeadFusionConfig())
    model.load_state_dict(torch.load(path, weights_only=True), strict=False)
    return model


def weights_file(settings: dict, way: str, seed: int):
    """Where the trained weights of heads are kept between runs."""
    from .debian import cache

    folder = cache() / "head_pruning"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{way}-{settings['steps']}-{seed}.pt"


@functools.cache
def tokens(kind: str, held_out: bool) -> Tensor:
    """Token ids of a text, in the order it is read; what is held out is another part of the same source."""
    ids = tokenizer()(text_of(kind, held_out), add_special_tokens=False)["input_ids"]
    return torch.tensor(ids)


def text_of(kind: str, held_out: bool) -> str:
    """Verses, modules of Python's library, or reviews."""
    if kind == "Bible":
        return "\n".join(verses()[25000:25200] if held_out else verses()[8000:9500])
    if kind == "Python":
        import argparse
        import asyncio.base_events
        import dataclasses
        import typing

        modules = (argparse,) if held_out else (asyncio.base_events, dataclasses, typing)
        return "\n".join(inspect.getsource(module) for module in modules)
    found = [text for text, _ in reviews()]
    random.Random("head_pruning").shuffle(found)
    return "\n\n".join(found[-12:] if held_out else found[:150])


EXPERIMENT = Experiment("head_pruning", SETTINGS, runs, rows=("ways", "seeds"), hours=0.35)
