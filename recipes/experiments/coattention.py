"""Co-attention of question, context and answer: which noun is a kind of what is asked for, and is described? Four
nouns are offered, two of each of two kinds; the context describes one of each kind in WordNet's words, the question
names one of the kinds. Question and answer alone, or context and answer alone, leave two of the four.

The words are MiniLM's hidden states, computed once. Three-way attention, in which an answer attends to pairs of a word
of the context and one of the question, stands beside pairwise attention with the very same parameters.
"""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .debian import wordnet_nouns
from .fitting import fit, searched_runs, size_of
from .hsa_minilm import encoder
from .store import Experiment
from .wordnet import read_glosses, read_parents

SETTINGS = {
    "kinds": [
        "three-way",
        "pairwise",
        "pairwise, chained",
        "without question",
        "without context",
        "means",
    ],
    "hypernyms": 1500,
    "nouns_of_each": 2,
    # words of a name and of a gloss that are kept
    "tokens": {"name": 6, "gloss": 16},
    "read": {"search": 200, "test": 300},
    "questions": 1000,
    "width": 64,
    "heads": 4,
    "steps": 300,
    "batch": 32,
    "weight_decay": 0.01,
    "search": {"seed": 100, "rates": [1e-3, 3e-3, 1e-2]},
    "seeds": [0, 1, 2, 3, 4],
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """As in `searched_runs`."""
    return searched_runs(settings, found, train)


@dataclass(frozen=True)
class Words:
    """Hidden states of short texts, and which of them are words.

    Args:
        states: [..., length, d], each of mean 0 and variance 1; 0 where there is no word.
        mask: bool [..., length].
    """

    states: Tensor
    mask: Tensor

    def __getitem__(self, index) -> Words:
        return Words(self.states[index], self.mask[index])


@dataclass(frozen=True)
class Nouns:
    """Hypernyms, and some nouns right below each.

    Args:
        above: names of the hypernyms, [kinds, length, d].
        names, glosses: of the nouns, [kinds, nouns of each, length, d].
    """

    above: Words
    names: Words
    glosses: Words


@functools.cache
def nouns_of(count: int, each: int, name: int, gloss: int) -> Nouns:
    """So many hypernyms of WordNet, drawn once, with so many nouns of each."""
    path, draw = wordnet_nouns(), random.Random(0)
    glosses, below = read_glosses(path), defaultdict(list)
    for noun, parent in read_parents(path).items():
        below[parent].append(noun)
    below.pop(None)
    kinds = draw.sample(sorted(kind for kind, nouns in below.items() if len(nouns) >= each), count)
    nouns = [noun for kind in kinds for noun in draw.sample(sorted(below[kind]), each)]
    apart = lambda words: Words(
        *(x.unflatten(0, (count, each)) for x in (words.states, words.mask))
    )
    return Nouns(
        words_of([spelt(kind) for kind in kinds], name),
        apart(words_of([spelt(noun) for noun in nouns], name)),
        apart(words_of([glosses[noun] for noun in nouns], gloss)),
    )


def spelt(synset: str) -> str:
    """The name of a synset as it is written."""
    return synset.rsplit(".", 1)[0].replace("_", " ")


@torch.no_grad()
def words_of(texts: list[str], length: int, batch: int = 50) -> Words:
    """MiniLM's last hidden states of each text by itself, [n, length, d], without the tokens around it."""
    tokenizer, model = encoder()
    states, masks = [], []
    for start in range(0, len(texts), batch):
        inputs = tokenizer(
            texts[start : start + batch],
            padding="max_length",
            truncation=True,
            max_length=length + 2,
            return_tensors="pt",
        )
        states.append(model(**inputs).last_hidden_state[:, 1:-1])
        masks.append(inputs["attention_mask"][:, 2:].bool())  # CLS and SEP are no words
    mask = torch.cat(masks)
    found = torch.cat(states)
    return Words(F.layer_norm(found, found.shape[-1:]) * mask[..., None], mask)


class Coattention(nn.Module):
    """Scores of answers, by what they attend to in context and question.

    Args:
        kind: one of the setting "kinds".
        inner: numbers of a word.
        width: of all heads together.
        heads: number of heads.
    """

    def __init__(self, kind: str, inner: int, width: int, heads: int):
        super().__init__()
        self.kind, self.heads = kind, heads
        self.query, self.key, self.value, self.key2, self.value2 = (
            nn.Linear(inner, width) for _ in range(5)
        )
        self.read = nn.Sequential(nn.Linear(3 * width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, question: Words, context: Words, answers: Words) -> Tensor:
        """Words [B, q, d], [B, c, d] and [B, answers, a, d] to scores [B, answers]."""
        count = answers.mask.shape[1]
        query = self.split(self.query(answers.states.flatten(0, 1)))
        key, value = (self.split(m(context.states)) for m in (self.key, self.value))
        # as a patched host has them: 1 and a product
        key2, value2 = (1 + self.split(m(question.states)) for m in (self.key2, self.value2))
        if self.kind == "without question":
            key2, value2 = torch.ones_like(key2), torch.ones_like(value2)
        if self.kind == "without context":
            key, value = torch.ones_like(key), torch.ones_like(value)
        parts = [
            x.repeat_interleave(count, 0)
            for x in (key, value, key2, value2, context.mask, question.mask)
        ]
        found = attend(self.kind, query, *parts).transpose(1, 2).flatten(2)
        shown = answers.mask.flatten(0, 1)[..., None]
        asked = query.transpose(1, 2).flatten(2)
        asked, found = ((x * shown).sum(1) / shown.sum(1) for x in (asked, found))
        return self.read(torch.cat([asked, found, asked * found], -1)).view(-1, count)

    def split(self, x: Tensor) -> Tensor:
        """[B, n, width] to [B, heads, n, width / heads]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def attend(
    kind: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key2: Tensor,
    value2: Tensor,
    words: Tensor,
    words2: Tensor,
) -> Tensor:
    """Σ_jk P_ijk (v_j ∘ v2_k), [B, H, n, d], of pairs of a word of the context and one of the question. P is

    - three-way: softmax over all pairs of Σ_l q_il k_jl k2_kl;
    - pairwise: the product of softmax over j of q_i·k_j and softmax over k of q_i·k2_k;
    - chained, BiDAF's order: the former times softmax over k of k_j·k2_k;
    - means: the same for all pairs.

    Args:
        query: [B, H, n, d].
        key, value: [B, H, c, d].
        key2, value2: [B, H, q, d].
        words, words2: bool [B, c] and [B, q], True for what takes part.
    """
    scale = query.shape[-1] ** -0.5
    first, second = words[:, None, None, :], words2[:, None, None, :]
    if kind in ("pairwise", "pairwise, chained"):
        weights = softmax(scale * query @ key.mT, first)
        if kind == "pairwise":
            return (weights @ value) * (softmax(scale * query @ key2.mT, second) @ value2)
        return weights @ (value * (softmax(scale * key @ key2.mT, second) @ value2))
    logits = scale * torch.einsum("bhid,bhjd,bhkd->bhijk", query, key, key2)
    if kind == "means":
        logits = logits * 0
    pairs = first[..., None] & second[..., None, :]
    weights = softmax(logits.flatten(-2), pairs.flatten(-2)).view_as(logits)
    return torch.einsum("bhijk,bhjd,bhkd->bhid", weights, value, value2)


def softmax(logits: Tensor, shown: Tensor) -> Tensor:
    """Over the last axis, of what is shown."""
    return logits.masked_fill(~shown, -torch.inf).softmax(-1)


def questions(
    nouns: Nouns, kinds: Tensor, count: int, draw: torch.Generator
) -> tuple[Words, Words, Words, Tensor]:
    """Questions [B, q, d], contexts [B, c, d], answers [B, 4, a, d], and the places of those that are right [B].

    Args:
        nouns: all of them.
        kinds: int64, the hypernyms to draw from.
        count: B.
        draw: random numbers.
    """
    each = nouns.names.mask.shape[1]
    two = torch.rand(count, len(kinds), generator=draw).argsort(1)[
        :, :2
    ]  # the kind that is asked for, and another
    kind = kinds[two][:, :, None].expand(-1, -1, 2).flatten(1)
    # of each kind one noun that is described, and one that is not
    noun = torch.stack(
        [torch.rand(count, each, generator=draw).argsort(1)[:, :2] for _ in range(2)], 1
    ).flatten(1)
    order = torch.rand(count, 4, generator=draw).argsort(1)
    answers = nouns.names[kind.gather(1, order), noun.gather(1, order)]
    swapped = torch.rand(count, 1, generator=draw) < 0.5
    described = torch.where(swapped, torch.tensor([[2, 0]]), torch.tensor([[0, 2]]))
    glosses = nouns.glosses[kind.gather(1, described), noun.gather(1, described)]
    context = Words(glosses.states.flatten(1, 2), glosses.mask.flatten(1, 2))
    return nouns.above[kind[:, 0]], context, answers, (order == 0).int().argmax(1)


def split(settings: dict, seed: int, part: str) -> tuple[Tensor, Tensor]:
    """Hypernyms to train on, and others to be read; what is read for the search is in no other run."""
    fixed = torch.randperm(settings["hypernyms"], generator=torch.Generator().manual_seed(0))
    search, rest = fixed[: settings["read"]["search"]], fixed[settings["read"]["search"] :]
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))]
    test, known = rest[: settings["read"]["test"]], rest[settings["read"]["test"] :]
    return known, search if part == "search" else test


def train(settings: dict, kind: str, seed: int, rate: float, part: str) -> dict:
    """One run: train on questions about some kinds of nouns, and read those about others."""
    nouns = nouns_of(settings["hypernyms"], settings["nouns_of_each"], *settings["tokens"].values())
    known, others = split(settings, seed, part)
    torch.manual_seed(seed)
    model = Coattention(kind, nouns.above.states.shape[-1], settings["width"], settings["heads"])
    draw = torch.Generator().manual_seed(seed)

    def batch_loss() -> Tensor:
        *asked, right = questions(nouns, known, settings["batch"], draw)
        return F.cross_entropy(model(*asked), right)

    loss = fit(model, batch_loss, settings["steps"], rate, settings["weight_decay"])
    return {
        "accuracy": accuracy(model, nouns, others, settings["questions"]),
        "loss": round(loss, 5),
        "parameters": size_of(model),
        "learning_rate": rate,
    }


@torch.no_grad()
def accuracy(model: nn.Module, nouns: Nouns, kinds: Tensor, count: int, batch: int = 100) -> float:
    """The share of questions that are answered rightly, the same questions for every model."""
    draw, right = torch.Generator().manual_seed(12345), 0
    for _ in range(0, count, batch):
        *asked, answers = questions(nouns, kinds, batch, draw)
        right += int((model(*asked).argmax(-1) == answers).sum())
    return right / (batch * -(-count // batch))


EXPERIMENT = Experiment("coattention", SETTINGS, runs, rows=("kinds", "seeds"), hours=0.15)
