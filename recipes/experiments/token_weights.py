"""Are weights of heads by each token better than one number a head? Language models of bytes from scratch, alike but
for multiple kernel learning: none, global, conditional; and, as a control that knows the token without weighing
kernels, heads' outputs that are weighted by it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
import transformers as hf
from torch import Tensor
from torch.nn import functional as F

import hf_hyperattn as ha
from hf_hyperattn.analysis import perplexity

from .fitting import best_of, fit, key_of, key_of_search
from .length import bytes_of_the_bible
from .store import Experiment

#: What a model of each name is patched with.
GATES: dict[str, ha.MechanismConfig | None] = {
    "no weights": None,
    "one weight a head": ha.MklConfig(),
    "weights by token": ha.MklConfig(kind="conditional"),
    "outputs weighted by token": ha.HeadFusionConfig(),
}
SETTINGS = {
    "kinds": list(GATES),
    "seeds": [0, 1, 2, 3, 4],
    "length": 128,
    "steps": 120,
    "batch": 16,
    "weight_decay": 0.1,
    "width": 64,
    "layers": 2,
    "heads": 4,
    "held_out": 0.05,
    "held_out_bytes": 32768,
    # On the bytes before those that are held out, with a seed of its own.
    "search": {"seed": 100, "rates": [4e-3, 8e-3, 1.6e-2]},
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """First the search for learning rates, then every seed and kind."""
    search = settings["search"]
    for kind in settings["kinds"]:
        for rate in search["rates"]:
            yield (
                key_of_search(kind, rate),
                functools.partial(train, settings, kind, search["seed"], rate, True),
            )
    for seed in settings["seeds"]:
        for kind in settings["kinds"]:
            yield key_of(kind, seed), functools.partial(train_at_best, settings, found, kind, seed)


def best_rate(settings: dict, found: dict, kind: str) -> float:
    """The learning rate with the least loss in the search."""
    return best_of(settings["search"]["rates"], found, kind, "nats")


def train_at_best(settings: dict, found: dict, kind: str, seed: int) -> dict:
    """One run with the learning rate that the search found."""
    return train(settings, kind, seed, best_rate(settings, found, kind), False)


def model_of(settings: dict, kind: str) -> hf.PreTrainedModel:
    """A Llama of bytes, patched."""
    config = hf.LlamaConfig(
        vocab_size=256,
        hidden_size=settings["width"],
        intermediate_size=3 * settings["width"],
        num_hidden_layers=settings["layers"],
        num_attention_heads=settings["heads"],
        num_key_value_heads=settings["heads"],
        max_position_embeddings=settings["length"],
        initializer_range=0.04,
        tie_word_embeddings=True,
        use_cache=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model, gate = hf.LlamaForCausalLM(config), GATES[kind]
    return model if gate is None else ha.patch_model(model, gate)


def train(settings: dict, kind: str, seed: int, rate: float, search: bool) -> dict:
    """One run; the loss in nats a byte on bytes that were not trained on, others in the search than at the end."""
    ids, length, size = bytes_of_the_bible(), settings["length"], settings["held_out_bytes"]
    end = len(ids) - int(settings["held_out"] * len(ids))
    kept = ids[end - size : end] if search else ids[end : end + size]
    torch.manual_seed(seed)
    model, draw = model_of(settings, kind), torch.Generator().manual_seed(seed)

    def batch_loss() -> Tensor:
        at = torch.randint(end - size - length, (settings["batch"], 1), generator=draw)
        rows = ids[at + torch.arange(length)]
        return F.cross_entropy(model(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())

    loss = fit(model, batch_loss, settings["steps"], rate, settings["weight_decay"])
    return {
        "nats": round(math.log(perplexity(model.eval(), kept, length).value), 5),
        "loss": round(loss, 5),
        "parameters": sum(p.numel() for p in model.parameters()),
        "gates": sum(p.numel() for name, p in model.named_parameters() if ".hyper." in name),
        "learning_rate": rate,
    }


EXPERIMENT = Experiment("token_weights", SETTINGS, runs, rows=("kinds", "seeds"), hours=0.1)
