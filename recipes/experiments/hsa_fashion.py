"""Fashion-MNIST, each image with a short text about what it shows; both can be corrupted."""

from __future__ import annotations

import functools
import gzip
import re
from pathlib import Path

import torch
from torch import Tensor

import hf_hyperattn as ha

from .debian import unpacked

PACKAGE = ("dataset-fashion-mnist",)

#: Four sentences in two paragraphs, each with one fact.
TEXT = "It covers the {}. Its sleeves are {}.\n\nIt closes with {}. Wear it in {}."

#: The facts of every class: T-shirt, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle boot.
#: No fact is of one class alone but the hand's, and the first two leave up to three classes apart.
FACTS = (
    ("torso", "short", "nothing", "summer"),
    ("legs", "absent", "buttons", "autumn"),
    ("torso", "long", "nothing", "winter"),
    ("body", "short", "zippers", "summer"),
    ("body", "long", "buttons", "winter"),
    ("feet", "absent", "straps", "summer"),
    ("torso", "long", "buttons", "spring"),
    ("feet", "absent", "laces", "spring"),
    ("hand", "absent", "zippers", "autumn"),
    ("feet", "absent", "zippers", "winter"),
)
WORD = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """Words and punctuation marks, in order."""
    return WORD.findall(text)


#: For every sentence the facts it can have, and all words with the number that stands for each.
CHOICES = [sorted({facts[slot] for facts in FACTS}) for slot in range(4)]
VOCABULARY = {
    word: i
    for i, word in enumerate(sorted({w for facts in FACTS for w in words(TEXT.format(*facts))}))
}
#: Places of the four facts among the words.
SLOTS = [i for i, word in enumerate(words(TEXT.format(*(["FACT"] * 4)))) if word == "FACT"]


def hierarchy() -> ha.Hierarchy:
    """Paragraphs, sentences and words of a description; the same for all, since they differ in single words."""
    text = TEXT.format(*FACTS[0])
    offsets = [match.span() for match in WORD.finditer(text)]
    return ha.Hierarchy.from_text(text, offsets, ("paragraph", "sentence"))


def descriptions(labels: Tensor, wrong: float, draw: torch.Generator) -> Tensor:
    """Numbers of words, int64 [B, 20]: descriptions in which a fact is a random one of its sentence's now and then.

    Args:
        labels: int64 [B].
        wrong: share of facts that are replaced, by one that may be right by chance.
        draw: random numbers.
    """
    table = torch.tensor([[VOCABULARY[w] for w in words(TEXT.format(*facts))] for facts in FACTS])
    ids = table[labels]
    for slot, choices in zip(SLOTS, CHOICES, strict=True):
        numbers = torch.tensor([VOCABULARY[w] for w in choices])
        other = numbers[torch.randint(len(numbers), labels.shape, generator=draw)]
        replaced = torch.rand(labels.shape, generator=draw) < wrong
        ids[:, slot] = torch.where(replaced, other, ids[:, slot])
    return ids


def hidden(
    images: Tensor, share: float, noise: float, draw: torch.Generator, patch: int = 4
) -> Tensor:
    """Images [B, 1, 28, 28] with so many of their patches black, and normal noise on all pixels."""
    side = images.shape[-1] // patch
    seen = (torch.rand(len(images), 1, side, side, generator=draw) >= share).to(images.dtype)
    seen = seen.repeat_interleave(patch, 2).repeat_interleave(patch, 3)
    return images * seen + noise * torch.randn(images.shape, generator=draw)


@functools.cache
def fashion(part: str) -> tuple[Tensor, Tensor]:
    """Images float32 [N, 1, 28, 28], from 0 to 1, and labels int64 [N]; `part` is "train" or "t10k".

    Raises:
        ValueError: the package is neither installed nor can be fetched.
    """
    inside = Path("usr/share/datasets/fashion-mnist")
    installed = Path("/") / inside
    folder = installed if installed.exists() else unpacked(PACKAGE) / inside
    images = read(folder / f"{part}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
    return images.float() / 255, read(folder / f"{part}-labels-idx1-ubyte.gz", 8).long()


def read(path: Path, header: int) -> Tensor:
    """The bytes of an IDX file after its header."""
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read()[header:]), dtype=torch.uint8)
