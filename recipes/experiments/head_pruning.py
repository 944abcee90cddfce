"""Is concatenation of heads wasteful? SmolLM2 with head_fusion, its heads pruned by their weight beta and otherwise.

The base is frozen; the weights of heads are trained for a few minutes, with a penalty on their entropy where a way of
the settings has one. Then a share of all heads is dropped, and the perplexity on held-out text is read.
"""

from __future__ import annotations

import functools
import inspect
import random
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

SETTINGS = {
    "model": "SmolLM2-135M-Instruct",
    "ways": {"plain": 0.0},
    "steps": 45,
    "window": 256,
    "rate": 0.01,
    "seed": 0,
    "shares": [0.1, 0.2, 0.3, 0.5],
    "rankings": ["beta", "contribution", "weight norm"],
    "random_seeds": [0, 1, 2],
    "held_out_window": 512,
    "held_out_windows": 1,
    "calibration_tokens": 1024,
    "sentence": "The capital of France is Paris, and the capital of Italy is Rome.",
}
KINDS = ("Bible", "Python", "reviews")
PER_TOKEN, RANDOM_PER_TOKEN = "beta, per token", "random, per token"


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The runs of the experiment: for each its name and what computes it."""
    yield "stock", functools.partial(read_stock, settings)
    for way in settings["ways"]:
        yield f"{way}; trained", functools.partial(trained, settings, way)
        yield f"{way}; beta", functools.partial(pruned, settings, way, "beta")
        for seed in settings["random_seeds"]:
            yield f"{way}; random {seed}", functools.partial(pruned, settings, way, seed)
        yield f"{way}; {PER_TOKEN}", functools.partial(pruned_per_token, settings, way)
        for ranking in settings["rankings"][1:]:
            yield f"{way}; {ranking}", functools.partial(pruned, settings, way, ranking)
        yield f"{way}; {RANDOM_PER_TOKEN}", functools.partial(pruned_per_token, settings, way, at_random=True)


def read_stock(settings: dict) -> dict:
    """Perplexity of the model as it is."""
    return {"perplexity": perplexities(settings, pretrained())}


def trained(settings: dict, way: str) -> dict:
    """Train the weights of heads and keep them; perplexity, entropy, and what heads a sentence uses."""
    model = ha.freeze_base(ha.patch_model(pretrained(), ha.HeadFusionConfig()))
    draw = random.Random(settings["seed"])
    texts = [tokens(kind, held_out=False) for kind in KINDS]

    def loss() -> Tensor:
        text, size = texts[draw.randrange(len(texts))], settings["window"]
        start = draw.randrange(len(text) - size)
        ids = text[None, start : start + size]
        with record_heads(model) as heads:
            value = model(input_ids=ids, labels=ids, use_cache=False).loss
        return value + settings["ways"][way] * heads.entropy()

    last = fit(model, loss, settings["steps"], settings["rate"], decay=0.0)
    torch.save({n: p for n, p in model.state_dict().items() if ".hyper." in n}, weights_file(settings, way))
    usage, ids = calibrated(settings, model), tokenizer()(settings["sentence"])["input_ids"]
    names = [tokenizer().decode([i]) for i in ids]
    return {
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "loss": round(last, 4),
        "perplexity": perplexities(settings, model),
        "mean": {name: [round(x, 3) for x in mean.tolist()] for name, mean in usage.mean().items()},
        "entropy": {name: round(x, 4) for name, x in usage.entropy().items()},
        "sentence": head_usage(model, input_ids=torch.tensor([ids])).by_token(names).splitlines(),
    }


def pruned(settings: dict, way: str, ranking: str | int) -> dict:
    """Perplexity without the shares of all heads that a ranking, or a random seed, puts last."""
    model = fused(settings, way)
    if isinstance(ranking, int):
        ranks = random_ranks(Heads(model, None, None), ranking)
    else:
        texts = calibration(settings)
        ranks = RANKS[ranking](Heads(model, calibrated(settings, model), texts))
    order = sorted(ranks, key=ranks.get)
    found = {}
    for share in settings["shares"]:
        drop: dict[str, list[int]] = {}
        for name, head in order[: round(share * len(order))]:
            drop.setdefault(name, []).append(head)
        with dropped_heads(model, {name: torch.tensor(heads) for name, heads in drop.items()}):
            found[str(share)] = perplexities(settings, model)
    return {"perplexity": found}


def pruned_per_token(settings: dict, way: str, at_random: bool = False) -> dict:
    """Perplexity where every token drops a share of the heads of each layer: those it weighs least, or any."""
    model, found = fused(settings, way), {}
    draw = torch.Generator().manual_seed(settings["seed"])
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


def calibrated(settings: dict, model: nn.Module):
    """The weights of heads on the training texts, as a report."""
    return head_usage(model.eval(), input_ids=calibration(settings), use_cache=False)


def calibration(settings: dict) -> Tensor:
    """Token ids [3, n], the beginning of each training text."""
    return torch.stack(
        [tokens(kind, held_out=False)[: settings["calibration_tokens"] // 2] for kind in KINDS]
    )


def pretrained() -> nn.Module:
    """SmolLM2 in float32."""
    from transformers import AutoModelForCausalLM

    from hf_hyperattn.cli.smollm2 import smollm2

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32).eval()


@functools.cache
def tokenizer():
    """SmolLM2's."""
    from transformers import AutoTokenizer

    from hf_hyperattn.cli.smollm2 import smollm2

    return AutoTokenizer.from_pretrained(smollm2())


def fused(settings: dict, way: str) -> nn.Module:
    """SmolLM2 with the weights of heads that were trained.

    Raises:
        ValueError: their file is gone.
    """
    path = weights_file(settings, way)
    if not path.exists():
        raise ValueError(f"{path} is missing; run: python recipes/experiments head_pruning --fresh")
    model = ha.patch_model(pretrained(), ha.HeadFusionConfig())
    model.load_state_dict(torch.load(path, weights_only=True), strict=False)
    return model


def weights_file(settings: dict, way: str):
    """Where the trained weights of heads are kept between runs."""
    from .debian import cache

    folder = cache() / "head_pruning"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{way}-{settings['steps']}-{settings['seed']}.pt"


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


EXPERIMENT = Experiment("head_pruning", SETTINGS, runs)
