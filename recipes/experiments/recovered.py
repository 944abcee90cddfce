"""How much of a pretrained model comes back when k of SmolLM2's 30 layers attend by another score, and each of them is
then distilled for a short time from the layer that it replaces?

Every replaced layer learns by itself to give what the untouched layer gives of the same input (as the first stage of
LoLCATs, arXiv 2410.10254), so that a layer is trained once for every k; the rest of the model stays as it is. Rows that
could explain a recovery away: scores without a cone, the layer's own score with queries and keys drawn anew, and none.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import hf_hyperattn as ha
from hf_hyperattn.analysis.perplexity import perplexity
from hf_hyperattn.inject.gradients import head_of
from hf_hyperattn.inject.retrieval import Example, Score, copying, mixture, score
from hf_hyperattn.registry import get_mechanism

from .fitting import best_of, fit, key_of, key_of_search
from .head_pruning import KINDS, pretrained, tokenizer, tokens
from .store import Experiment

REDRAWN, NONE = "dot product, redrawn", "no score"
#: The first factor of the cosine: log2(L² - L), of windows of 256.
LARGEST = math.log2(256 * 255)
SETTINGS = {
    "model": "SmolLM2-135M-Instruct",
    # What is patched in, its settings, and what is done to the projections of queries and keys at first.
    "rows": {
        "umbral cone, xi": {"mechanism": "cone"},
        "umbral cone, psi": {"mechanism": "cone", "options": {"mapping": "psi"}},
        "Euclidean distance": {"mechanism": "only_distance"},
        "normalised dot product": {"mechanism": "only_cosine"},
        REDRAWN: {"mechanism": None, "start": "redrawn"},
        NONE: {"mechanism": None, "start": "zero"},
    },
    # Evenly spread; those of a smaller k are among those of a larger one.
    "layers": {"1": [13], "3": [4, 13, 22], "10": list(range(1, 30, 3))},
    "seeds": [0, 1, 2],
    "window": 256,
    "windows": {"train": 96, "search": 12},
    "steps": 150,
    "score_rate": 1e-2,
    "search": {"seed": 100, "steps": 50, "rates": [1e-3, 3e-3, 1e-2], "k": "3"},
    "held_out_window": 512,
    "copied_window": 256,
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """First the search for learning rates, then the model as it is and before training, then every seed and row."""
    search = settings["search"]
    for row in settings["rows"]:
        for rate in search["rates"]:
            yield key_of_search(row, rate), functools.partial(searched, settings, row, rate)
    yield "stock", lambda: read(settings, pretrained())
    for row in settings["rows"]:
        yield key_before(row), functools.partial(untrained, settings, row)
    for seed in settings["seeds"]:
        for row in settings["rows"]:
            yield key_of(row, seed), functools.partial(train_at_best, settings, found, row, seed)


def key_before(row: str) -> str:
    """The name of the run that reads a row before its training."""
    return f"{row}, before"


def best_rate(settings: dict, found: dict, row: str) -> float:
    """The learning rate with the least error in the search."""
    return best_of(settings["search"]["rates"], found, row, "error")


def searched(settings: dict, row: str, rate: float) -> dict:
    """One run of the search: a short training, and the error on windows that nothing is trained on."""
    search = settings["search"]
    layers = settings["layers"][search["k"]]
    attentions = train(settings, row, layers, search["seed"], rate, search["steps"])
    errors = []
    with torch.no_grad():
        for layer, (attention, _) in attentions.items():
            errors += [
                error(attention, *taught(settings, layer, "search", i)).item()
                for i in range(settings["windows"]["search"])
            ]
    return {"error": round(statistics.mean(errors), 5)}


def untrained(settings: dict, row: str) -> dict:
    """A row before its training, for every k; what is drawn is drawn as for the first seed."""
    return {
        k: read(settings, model_of(settings, row, layers, settings["seeds"][0]))
        for k, layers in settings["layers"].items()
    }


def train_at_best(settings: dict, found: dict, row: str, seed: int) -> dict:
    """Train all layers with the rate of the search, and read the model with those of every k."""
    rate, every = best_rate(settings, found, row), sorted(set().union(*settings["layers"].values()))
    attentions, read_at = train(settings, row, every, seed, rate, settings["steps"]), {}
    for k, layers in settings["layers"].items():
        model = model_of(settings, row, layers, seed)
        for layer in layers:
            attention_of(model, layer).load_state_dict(attentions[layer][0].state_dict())
        read_at[k] = read(settings, model)
    return read_at | {
        "learning_rate": rate,
        "errors": {str(n): last for n, (_, last) in attentions.items()},
    }


def train(
    settings: dict, row: str, layers: list[int], seed: int, rate: float, steps: int
) -> dict[int, tuple[nn.Module, float]]:
    """The attention of every layer, trained alone to give what the untouched one gives of the same input, and the mean
    error at the end.
    """
    model, found = model_of(settings, row, layers, seed), {}
    for layer in layers:
        attention = attention_of(model, layer)
        for name, parameter in attention.named_parameters():
            zero = settings["rows"][row].get("start") == "zero" and name[:2] in ("q_", "k_")
            parameter.requires_grad_(not zero)
        found[layer] = attention, round(fit_layer(settings, attention, layer, seed, rate, steps), 5)
    return found


def fit_layer(
    settings: dict, attention: nn.Module, layer: int, seed: int, rate: float, steps: int
) -> float:
    """Train the attention of one layer; the mean error at the end."""
    learned, draw = (
        [(n, p) for n, p in attention.named_parameters() if p.requires_grad],
        random.Random(f"{seed} {layer}"),
    )
    groups = [
        {"params": [p for name, p in learned if not name.startswith("hyper.")], "lr": rate},
        {
            "params": [p for name, p in learned if name.startswith("hyper.")],
            "lr": settings["score_rate"],
        },
    ]

    def loss() -> Tensor:
        return error(
            attention,
            *taught(settings, layer, "train", draw.randrange(settings["windows"]["train"])),
        )

    groups = [group | {"weight_decay": 0.0} for group in groups if group["params"]]
    return fit(attention, loss, steps, rate, 0.0, groups)


def error(attention: nn.Module, given: Tensor, wanted: Tensor, places: tuple) -> Tensor:
    """The squared error of what attention gives, as a share of the squares of what is wanted."""
    made = attention(hidden_states=given, position_embeddings=places, attention_mask=None)[0]
    return (made - wanted).square().sum() / wanted.square().sum()


def model_of(settings: dict, row: str, layers: list[int], seed: int) -> nn.Module:
    """SmolLM2 whose layers attend by the row's score alone, before any training."""
    own_scores()
    wanted, model = settings["rows"][row], pretrained()
    for layer in layers if "start" in wanted else ():
        attention, draw = (
            attention_of(model, layer),
            torch.Generator().manual_seed(1000 * seed + layer),
        )
        for weight in (attention.q_proj.weight.data, attention.k_proj.weight.data):
            spread = weight.std() if wanted["start"] == "redrawn" else 0.0
            weight.copy_(spread * torch.randn(weight.shape, generator=draw))
    if wanted["mechanism"]:
        config = get_mechanism(wanted["mechanism"]).config(**wanted.get("options", {}))
        ha.patch_model(model, config, layers=layers, mode="replace")
    return model


def attention_of(model: nn.Module, layer: int) -> nn.Module:
    """The attention of a layer."""
    return model.model.layers[layer].self_attn


@functools.cache
def own_scores() -> None:
    """Make the two controls known, as scores by name."""

    @ha.score("only_distance")
    def only_distance(squared_distance, temperature=1.0):
        """Minus the Euclidean distance over a temperature, which every head learns."""
        return -torch.sqrt(squared_distance) / temperature

    @ha.score("only_cosine", paper="Query-Key Normalization for Transformers, arXiv 2010.04245")
    def only_cosine(dot, query_norm, key_norm, strength=LARGEST):
        """The cosine of query and key times a number, which every head learns."""
        return strength * dot / (query_norm * key_norm)


def taught(settings: dict, layer: int, part: str, window: int) -> tuple[Tensor, Tensor, tuple]:
    """What the untouched layer's attention is given in a window, what it gives [1, N, e], and the places."""
    every = tuple(sorted(set().union(*settings["layers"].values())))
    kept, places = teacher(every, part, settings["windows"][part], settings["window"])
    return *kept[layer][window], places


@functools.cache
def teacher(
    layers: tuple[int, ...], part: str, count: int, size: int
) -> tuple[dict[int, list], tuple]:
    """Inputs and outputs of the attention of untouched layers in windows of the three texts, in turn."""
    model, kept, places = pretrained(), {layer: [] for layer in layers}, []

    def keep(layer: int) -> Callable:
        def hook(module, args, options, output):
            kept[layer].append((options["hidden_states"].detach(), output[0].detach()))
            places[:] = [options["position_embeddings"]]

        return hook

    for layer in layers:
        attention_of(model, layer).register_forward_hook(keep(layer), with_kwargs=True)
    with torch.no_grad():
        for ids in windows(part, count, size):
            model.model(input_ids=ids[None], use_cache=False)
    return kept, places[0]


def windows(part: str, count: int, size: int) -> list[Tensor]:
    """Windows of the three training texts, in turn: to search rates on, the last ones; to train on, the first ones."""
    found = []
    for i in range(count):
        text, at = tokens(KINDS[i % len(KINDS)], held_out=False), i // len(KINDS)
        start = at * size if part == "train" else len(text) - (at + 1) * size
        found.append(text[start : start + size])
    return found


def read(settings: dict, model: nn.Module) -> dict:
    """Perplexity of held-out text of three kinds, and how well what stands in the context is found again there."""
    size = settings["held_out_window"]
    texts = {kind: tokens(kind, held_out=True) for kind in KINDS}
    found = {kind: perplexity(model, ids[:size], size).value for kind, ids in texts.items()}
    copies = answers(
        model, [copying(ids[size:], settings["copied_window"]) for ids in texts.values()]
    )
    needles = mixture(tokenizer(), texts["reviews"][size:], size)
    return {
        "perplexity": {kind: round(value, 4) for kind, value in found.items()},
        "loss": round(statistics.mean(map(math.log, found.values())), 5),
        "copying": round(statistics.mean(one.nats for one in copies), 5),
        "needles": round(answers(model, [needles])[0].nats, 5) if needles else None,
    }


def answers(model: nn.Module, examples: list[Example]) -> list[Score]:
    """How well the answers of examples are predicted."""
    return [score(model, head_of(model, example.ids), example) for example in examples]


EXPERIMENT = Experiment("recovered", SETTINGS, runs, rows=("rows", "seeds"), hours=0.45)
