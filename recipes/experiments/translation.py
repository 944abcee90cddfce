"""German to English from scratch on aligned help texts: which score, and how narrow may queries and keys be?

After Coneheads (arXiv 2306.00392), which reports on IWSLT'14 a BLEU score one higher for umbral cone attention than for
dot product, and the dot product's score at width 16 instead of 128.

The plan, by what was measured before (0.05 s of one core for a step of 32 pairs): 18 rows in order of what they are
worth, each with three runs of 200 steps for its learning rate and three of 1,000 steps, two and a half passes over the
pairs, with 500 greedy translations; the first six rows take 0.35 hours.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from . import fitting
from .fitting import best_of, fit, size_of
from .help_texts import Pair, pairs, pairs_in, parts
from .store import Experiment
from .translation_model import BEGIN, END, PAD, SPECIAL, Translator

CURVE = ("dot product", "umbral cone, psi", "Euclidean distance")
ONCE = ("normalised dot product", "hyperbolic distance", "umbral cone, xi", "penumbral cone, psi")
SETTINGS = {
    # Scores with the width of a head's queries and keys, whose values have width / heads; the first are worth most.
    "rows": [
        *([kind, 32] for kind in CURVE),
        *(
            [kind, width]
            for width in (8, 16, 4)
            for kind in ("umbral cone, psi", "dot product", "Euclidean distance")
        ),
        *([kind, 32] for kind in ONCE),
        ["hyperbolic distance", 8],
    ],
    "seeds": [0, 1, 2],
    # The cone with xi was the best of all rows at those seeds, which chance may have made: these decide.
    "again": {
        "rows": [["umbral cone, xi", 32], *([kind, 32] for kind in CURVE)],
        "seeds": [3, 4, 5, 6, 7, 8],
    },
    "data": None,
    "words": [4, 16],
    "vocabulary": 2000,
    "longest": 48,
    "sizes": {"search": 400, "test": 1000},
    "split": 14,
    "width": 64,
    "heads": 2,
    "layers": 2,
    "dropout": 0.1,
    "smoothing": 0.1,
    "steps": 1000,
    "batch": 32,
    "weight_decay": 0.01,
    # A learning rate for every row, by the loss on pairs that are not used again, after a fifth of the steps.
    "search": {"seed": 100, "steps": 200, "rates": [1e-3, 2e-3, 4e-3]},
    "translated": 500,
}
#: The paper's sizes, for a GPU: `python recipes/experiments translation --full --data FOLDER`, where the folder has the
#: text files train, search and test, each .de and .en, such as IWSLT'14; without --data the help texts are translated.
FULL = {
    "rows": [[kind, 4 * width] for kind, width in SETTINGS["rows"]],
    "again": {"rows": [], "seeds": []},
    "words": [1, 100],
    "vocabulary": 10000,
    "longest": 256,
    "width": 512,
    "heads": 4,
    "layers": 6,
    "steps": 50000,
    "batch": 128,
    "search": {"seed": 100, "steps": 5000, "rates": [2.5e-4, 5e-4, 1e-3]},
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Row by row: the search for its learning rate, then every seed; in the end some rows again."""
    search, again = settings["search"], settings["again"]
    for kind, width in settings["rows"]:
        for rate in search["rates"]:
            do = functools.partial(
                train, settings, kind, width, search["seed"], rate, search["steps"]
            )
            yield key_of_search(kind, width, rate), do
        for seed in settings["seeds"]:
            yield (
                key_of(kind, width, seed),
                functools.partial(train_at_best, settings, found, kind, width, seed),
            )
    for seed in again["seeds"]:
        for kind, width in again["rows"]:
            yield (
                key_of(kind, width, seed),
                functools.partial(train_at_best, settings, found, kind, width, seed),
            )


def row_of(kind: str, width: int) -> str:
    """The name of a row."""
    return f"{kind}, width {width}"


def key_of(kind: str, width: int, seed: int) -> str:
    """The name of a run."""
    return fitting.key_of(row_of(kind, width), seed)


def key_of_search(kind: str, width: int, rate: float) -> str:
    """The name of a run of the search for a learning rate."""
    return fitting.key_of_search(row_of(kind, width), rate)


def best_rate(settings: dict, found: dict, kind: str, width: int) -> float:
    """The learning rate with the least loss in the search."""
    return best_of(settings["search"]["rates"], found, row_of(kind, width), "held_out")


def train_at_best(settings: dict, found: dict, kind: str, width: int, seed: int) -> dict:
    """One run with the learning rate that the search found, its translations read."""
    rate = best_rate(settings, found, kind, width)
    return train(settings, kind, width, seed, rate, settings["steps"], read=True)


def train(
    settings: dict, kind: str, width: int, seed: int, rate: float, steps: int, read: bool = False
) -> dict:
    """One run: its loss on pairs that were held out, and with `read` BLEU and chrF of its translations of some."""
    data, device = data_of(*data_key(settings)), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    model = Translator(kind, width, data.vocabulary, settings).to(device).train()
    draw = random.Random(seed)
    batches = data.batches("train", settings["batch"], draw)

    def batch_loss() -> Tensor:
        source, target = (ids.to(device) for ids in next(batches))
        logits = model(source, target[:, :-1])
        return F.cross_entropy(
            logits.flatten(0, 1),
            target[:, 1:].flatten(),
            ignore_index=PAD,
            label_smoothing=settings["smoothing"],
        )

    loss = fit(model, batch_loss, steps, rate, settings["weight_decay"])
    model.eval()
    found = {
        "held_out": held_out_loss(model, data, "test" if read else "search", device),
        "loss": loss,
        "parameters": size_of(model),
        "attention_parameters": sum(
            p.numel() for n, p in model.named_parameters() if ".own." in n or ".cross." in n
        ),
        "learning_rate": rate,
    }
    return found | (read_translations(settings, model, data, device) if read else {})


@torch.no_grad()
def held_out_loss(model: Translator, data: Data, part: str, device: str) -> float:
    """Mean loss of a token in nats."""
    total = count = 0.0
    for source, target in data.in_order(part, 100):
        source, target = source.to(device), target.to(device)
        logits = model(source, target[:, :-1])
        total += F.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, reduction="sum"
        ).item()
        count += (target[:, 1:] != PAD).sum().item()
    return total / count


def read_translations(settings: dict, model: Translator, data: Data, device: str) -> dict:
    """BLEU and chrF of greedy translations, with sacrebleu's signatures, and the first of them."""
    from sacrebleu.metrics import BLEU, CHRF

    said, wanted = [], [english for _, english in data.rows["test"][: settings["translated"]]]
    for start in range(0, settings["translated"], 100):
        rows = data.ids["test"][start : min(start + 100, settings["translated"])]
        ids = model.greedy(padded([source for source, _ in rows]).to(device), settings["longest"])
        said += [data.text(row) for row in ids.tolist()]
    found = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        found[name] = round(metric.corpus_score(said, [wanted]).score, 3)
        found[f"{name}_signature"] = str(metric.get_signature())
    return found | {"first": said[:3]}


class Data:
    """Pairs as tokens of one vocabulary of both languages.

    Args:
        rows: pairs by the name of their part; "train" makes the vocabulary.
        vocabulary: number of tokens.
        longest: pairs with more tokens on a side, END included, are left out.
    """

    def __init__(self, rows: dict[str, list[Pair]], vocabulary: int, longest: int):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        self.tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self.tokenizer.train_from_iterator([side for row in rows["train"] for side in row], trainer)
        self.vocabulary = self.tokenizer.get_vocab_size()
        self.rows: dict[str, list[Pair]] = {}
        self.ids: dict[str, list[tuple[list[int], list[int]]]] = {}
        for name, part in rows.items():
            german, english = (self.tokenizer.encode_batch([r[i] for r in part]) for i in (0, 1))
            ids = [
                ([*g.ids, END], [BEGIN, *e.ids, END]) for g, e in zip(german, english, strict=True)
            ]
            kept = [i for i, (g, e) in enumerate(ids) if max(len(g), len(e) - 1) <= longest]
            self.rows[name], self.ids[name] = [part[i] for i in kept], [ids[i] for i in kept]

    def text(self, ids: list[int]) -> str:
        """What the tokens say, up to END."""
        ids = ids[: ids.index(END)] if END in ids else ids
        return self.tokenizer.decode([i for i in ids if i >= SPECIAL]).strip()

    def in_order(self, part: str, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All pairs of a part, in batches of about the same length: sources and targets, padded at the end."""
        order = sorted(self.ids[part], key=lambda row: (len(row[0]), len(row[1])))
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            yield padded([source for source, _ in rows]), padded([target for _, target in rows])

    def batches(self, part: str, size: int, draw: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
        """The same without an end, pass after pass, in an order that is drawn."""
        while True:
            rows = self.ids[part][:]
            draw.shuffle(rows)
            # of about the same length within twenty batches, so that passes differ
            pools = [rows[start : start + 20 * size] for start in range(0, len(rows), 20 * size)]
            found = []
            for pool in pools:
                pool.sort(key=lambda row: (len(row[0]), len(row[1])))
                found += [pool[start : start + size] for start in range(0, len(pool), size)]
            draw.shuffle(found)
            for batch in found:
                yield (
                    padded([source for source, _ in batch]),
                    padded([target for _, target in batch]),
                )


def padded(rows: list[list[int]]) -> Tensor:
    """Rows of tokens, the shorter ones with PAD at the end."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])


def data_key(settings: dict) -> tuple:
    """What `data_of` depends on."""
    names = ("data", "split", "vocabulary", "longest")
    return (
        tuple(settings["words"]),
        tuple(settings["sizes"].items()),
        *(settings[name] for name in names),
    )


@functools.cache
def data_of(
    words: tuple, sizes: tuple, folder: str | None, split: int, vocabulary: int, longest: int
) -> Data:
    """The pairs of a folder, or of the help texts those of so many words, as tokens."""
    names = ("train", *dict(sizes))
    rows = {name: pairs_in(Path(folder), name) for name in names} if folder else None
    return Data(rows or parts(pairs(*words), dict(sizes), split), vocabulary, longest)


EXPERIMENT = Experiment("translation", SETTINGS, runs, rows=("rows", "seeds", "again"), hours=1.7)
