"""HAT made from MiniLM on long reviews, against the same model cut off at 512 tokens, and with full attention.

All start from one classifier of short reviews and are trained on long ones. Full attention beyond 512 tokens
repeats the table of positions, as Longformer does to start. HAT's segments without its cross-segment attention tell
what that attention adds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from hf_hyperattn import HatConfig, convert
from hf_hyperattn.analysis.cost import PeakMemory

from .fitting import fit, size_of
from .hsa_texts import minilm_folder, reviews
from .store import Experiment

#: What a run is about is one of `models`: cut off at so many tokens, or full attention, or the fields of `HatConfig`.
SETTINGS = {
    "models": {
        "cut off at 512": {"length": 512},
        "full attention": {"length": 2048},
        "segments alone": {"length": 2048, "hat": {"segment_length": 128, "layout": "S S S S S S"}},
        "HAT": {"length": 2048, "hat": {"segment_length": 128, "layout": "I1"}},
        "HAT, gated": {
            "length": 2048,
            "hat": {"segment_length": 128, "layout": "I1", "gated": True},
        },
    },
    "last": ["HAT, gated"],
    "seeds": [0, 1, 2],
    "short": {"most": 160, "train": 1024, "batch": 16, "learning_rate": 1e-4},
    "long": {
        "least": 700,
        "most": 2048,
        "train": 80,
        "test": 150,
        "batch": 4,
        "learning_rate": 5e-5,
        "attention_dropout": 0.0,
    },
    "weight_decay": 0.01,
    "split": 11,
    "cost": {"tokens": [2048], "batch": 1, "rounds": 3},
}
#: A review as token ids, and its label.
Row = tuple[list[int], int]


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The runs of the experiment: for each its name and what computes it."""
    for name in settings["models"]:
        for tokens in settings["cost"]["tokens"]:
            yield f"cost, {name}, {tokens}", functools.partial(cost, settings, name, tokens)
    for last in (False, True):
        for seed in settings["seeds"]:
            for name in settings["models"]:
                if (name in settings["last"]) is last:
                    yield f"{name}, seed {seed}", functools.partial(train, settings, name, seed)


@functools.cache
def encoded(least: int, most: int) -> list[Row]:
    """Reviews of so many tokens, with [CLS] and [SEP], each once."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    rows = [r for r in dict.fromkeys(reviews()) if 3 * least <= len(r[0]) <= 8 * most]
    ids = tokenizer([text for text, _ in rows], verbose=False)["input_ids"]
    return [(i, label) for i, (_, label) in zip(ids, rows, strict=True) if least <= len(i) <= most]


def drawn(rows: list[Row], number: int, seed: str) -> list[Row]:
    """A balanced sample."""
    found = []
    for label in (0, 1):
        found += random.Random(f"{seed} {label}").sample(
            [r for r in rows if r[1] == label], number // 2
        )
    return found


def long_reviews(settings: dict, seed: int) -> tuple[list[Row], list[Row]]:
    """Reviews to train on and reviews to read; those of different seeds have none in common."""
    long = settings["long"]
    every = encoded(long["least"], long["most"])
    both: tuple[list[Row], list[Row]] = ([], [])
    for label in (0, 1):
        mine = [row for row in every if row[1] == label]
        random.Random(f"long {settings['split']} {label}").shuffle(mine)
        share = (long["train"] + long["test"]) // 2
        mine = mine[seed * share : (seed + 1) * share]
        both[0].extend(mine[: long["train"] // 2])
        both[1].extend(mine[long["train"] // 2 :])
    return both


def batches(rows: list[Row], size: int) -> list[list[Row]]:
    """Batches of reviews of about the same length."""
    rows = sorted(rows, key=lambda row: len(row[0]))
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def inputs(rows: list[Row], length: int) -> dict[str, Tensor]:
    """A padded batch of the first so many tokens; [SEP] stays at the end."""
    cut = [ids if len(ids) <= length else [*ids[: length - 1], ids[-1]] for ids, _ in rows]
    longest = max(map(len, cut))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in cut])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in cut])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.tensor([label for _, label in rows]),
    }


def passes(
    model: PreTrainedModel, rows: list[Row], length: int, settings: dict, decay: float, seed: int
) -> float:
    """Train for one pass over the rows, all but the table of words; the mean loss at the end."""
    model.get_input_embeddings().weight.requires_grad_(False)
    order = batches(rows, settings["batch"])
    random.Random(seed).shuffle(order)
    left = iter(order)
    loss = fit(
        model.train(),
        lambda: model(**inputs(next(left), length)).loss,
        len(order),
        settings["learning_rate"],
        decay,
    )
    return round(loss, 4)


def short_classifier(settings: dict, seed: int) -> PreTrainedModel:
    """MiniLM trained on short reviews; it is kept in a temporary folder for the other runs of the seed."""
    short = settings["short"]
    told = json.dumps([short, settings["weight_decay"], seed], sort_keys=True)
    folder = (
        Path(tempfile.gettempdir()) / "hat_imdb" / hashlib.sha256(told.encode()).hexdigest()[:16]
    )
    if not folder.exists():
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(minilm_folder(), num_labels=2)
        rows = drawn(encoded(1, short["most"]), short["train"], f"short {seed}")
        passes(model, rows, short["most"], short, settings["weight_decay"], seed)
        model.save_pretrained(folder)
    dropout = settings["long"]["attention_dropout"]
    return AutoModelForSequenceClassification.from_pretrained(
        folder, attention_probs_dropout_prob=dropout
    )


def with_positions(model: PreTrainedModel, number: int) -> PreTrainedModel:
    """A BERT with a longer table of positions, the rows of the shorter one again and again."""
    embeddings = model.base_model.embeddings
    rows = embeddings.position_embeddings.weight.data
    table = nn.Embedding(number, rows.shape[1])
    table.weight.data.copy_(rows.repeat(-(-number // len(rows)), 1)[:number])
    embeddings.position_embeddings = table
    embeddings.position_ids = torch.arange(number)[None]
    embeddings.token_type_ids = torch.zeros(1, number, dtype=torch.long)
    model.config.max_position_embeddings = number
    return model


def model_of(settings: dict, name: str, seed: int) -> PreTrainedModel:
    """The classifier of short reviews, made fit for long ones."""
    return made_long(settings, name, short_classifier(settings, seed))


def made_long(settings: dict, name: str, model: PreTrainedModel) -> PreTrainedModel:
    """A classifier by MiniLM, as the settings have it under that name."""
    wanted = settings["models"][name]
    if "hat" in wanted:
        return convert(model, HatConfig(max_length=wanted["length"], **wanted["hat"]))
    number = model.config.max_position_embeddings
    return model if wanted["length"] <= number else with_positions(model, wanted["length"])


def train(settings: dict, name: str, seed: int) -> dict:
    """One run: accuracy before any training on long reviews, and after, on the same."""
    rows, test = long_reviews(settings, seed)
    model, length = model_of(settings, name, seed), settings["models"][name]["length"]
    before = judged(model, test, length)
    torch.manual_seed(seed)
    start = time.process_time()
    loss = passes(model, rows, length, settings["long"], settings["weight_decay"], seed)
    middle = time.process_time()
    right = judged(model, test, length)
    return {
        "accuracy": round(sum(right) / len(right), 4),
        "accuracy_before": round(sum(before) / len(before), 4),
        "loss": loss,
        "parameters": size_of(model),
        "train_cpu": round(middle - start, 1),
        "test_cpu": round(time.process_time() - middle, 1),
        "right": "".join(map(str, right)),
    }


@torch.no_grad()
def judged(model: PreTrainedModel, rows: list[Row], length: int) -> list[int]:
    """1 for every review that the model judges rightly, else 0, in the order of their lengths."""
    found = []
    for batch in batches(rows, 8):
        given = inputs(batch, length)
        labels = given.pop("labels")
        found += (model.eval()(**given).logits.argmax(-1) == labels).long().tolist()
    return found


def cost(settings: dict, name: str, tokens: int) -> dict:
    """CPU seconds and memory of a forward pass and of training steps on reviews of so many tokens."""
    count, length = settings["cost"]["batch"], settings["models"][name]["length"]
    draw = random.Random(0)
    rows = [
        ([101, *(draw.randrange(1000, 30000) for _ in range(tokens - 2)), 102], i % 2)
        for i in range(count)
    ]
    given, found = inputs(rows, length), {"batch": count}
    for what, dropout in (("forward", 0.0), ("step", 0.0), ("step with attention dropout", 0.1)):
        model = AutoModelForSequenceClassification.from_pretrained(
            minilm_folder(), num_labels=2, attention_probs_dropout_prob=dropout
        )
        model = made_long(settings, name, model)
        model.get_input_embeddings().weight.requires_grad_(False)
        found[what] = measured(model, given, what, settings["cost"]["rounds"])
    return found


def measured(model: PreTrainedModel, given: dict[str, Tensor], what: str, rounds: int) -> dict:
    """The least CPU seconds of some calls, and the most memory of one."""

    def run():
        if what == "forward":
            with torch.no_grad():
                model.eval()(**given)
        else:
            model.train()(**given).loss.backward()
            model.zero_grad()

    run()
    give_back_memory()
    with PeakMemory(interval=0.001) as memory:
        run()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return {"cpu": round(min(times), 3), "mib": round(memory.added / 2**20)}


def give_back_memory() -> None:
    """Return what the allocator keeps, where it can be told to, so that what the next call takes shows."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        pass


EXPERIMENT = Experiment("hat_imdb", SETTINGS, runs, rows=("models", "seeds"), hours=0.6)
