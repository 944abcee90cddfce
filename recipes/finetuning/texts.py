"""Text through `datasets`: documents, parted into those trained on and those held out, and cut into rows of tokens."""

from __future__ import annotations

import argparse
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from hf_hyperattn.analysis import next_token_logits
from hyperattn_cli.shared.inputs import prefix_of

from . import metrics
from .groups import Data

#: Characters read for each token that is wanted; text of any kind has fewer than that a token.
CHARACTERS = 8
#: One document in this many is held out where the data set has no split for it.
HELD_OUT = 10
#: Held-out tokens on which the patched model is compared with the original before anything is learned.
COMPARED = 256
#: Documents that a data set on the Hub is read to at most.
MOST_DOCUMENTS = 200_000


@dataclass(frozen=True)
class Text:
    """Rows of tokens to train on, the held-out tokens, and what is said of both in the results.

    Args:
        rows: columns input_ids and labels, each of `length` tokens.
        held_out: token ids.
        prefix: ids that every row starts with, such as BOS.
        facts: where the text is from, documents, tokens, and a checksum of the ids.
        length: tokens a row, the prefix included.
        processor: the tokenizer.
    """

    rows: datasets.Dataset
    held_out: list[int]
    prefix: list[int]
    facts: dict
    length: int
    processor: Any
    collate = classes = None  # rows are of one length, and no classes

    def held_out_rows(self) -> datasets.Dataset:
        """The held-out text as rows for losses during training."""
        return cut(self.held_out, self.length, self.prefix)

    def compared(self, model) -> torch.Tensor:
        """Logits [L, V] for the start of the held-out text, by which a model and what is loaded again are compared."""
        return next_token_logits(model, self.prefix + self.held_out[:COMPARED])

    def measure(self, model) -> dict[str, float]:
        """Perplexity, and how often the likeliest next token is the right one."""
        return metrics.measure(model, self.held_out, self.length, self.prefix)


def prepare(data: Data, tokenizer, tokens: int, seed: int) -> Text:
    """Read, part, tokenize and cut the text.

    Args:
        tokens: how many the steps of the run read; fewer are read again, in the next epoch.
        seed: of the order of the documents.

    Raises:
        ValueError: the text cannot be read or is too short.
    """
    prefix = prefix_of(tokenizer)
    train, held_out = documents(data, CHARACTERS * (tokens + data.held_out_tokens))
    train = train.shuffle(seed=seed)
    ids, read = tokenize(train, tokenizer, tokens)
    share = max(
        data.length, -(-data.held_out_tokens // len(held_out))
    )  # so that no document speaks for all
    kept, read_held_out = tokenize(held_out, tokenizer, data.held_out_tokens, share)
    if len(kept) < 32 or len(ids) < data.length:
        raise ValueError(
            f"data.name={data.name!r}: {len(ids)} tokens to train on and {len(kept)} held out; allowed: at least "
            f"{data.length} and 32"
        )
    facts = {
        "source": data.source if data.name is None else f"{data.source}: {Path(data.name).name}",
        "train": {"documents": read, "tokens": len(ids), "sha256": checksum(ids)},
        "held_out": {"documents": read_held_out, "tokens": len(kept), "sha256": checksum(kept)},
    }
    return Text(
        cut(ids.tolist(), data.length, prefix), kept.tolist(), prefix, facts, data.length, tokenizer
    )


def documents(data: Data, characters: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The two parts, each with a column `text`."""
    if data.source == "file":
        return split_file(data.name)
    if data.source == "python":
        return part(library(), lambda name, number: zlib.crc32(name.encode()) % HELD_OUT == 0)
    train = from_hub(data, data.split, characters)
    if data.held_out_split:
        return train, from_hub(data, data.held_out_split, characters)
    return part(train, lambda name, number: number % HELD_OUT == HELD_OUT - 1)


def library() -> datasets.Dataset:
    """The modules of Python's standard library, by name."""
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    if len(files) < 2 * HELD_OUT:
        raise ValueError(
            "data.source='python': this Python has no source of its library; use data.source=file"
        )
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return datasets.Dataset.from_dict({"name": [file.stem for file in files], "text": texts})


def part(whole: datasets.Dataset, is_held_out) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Two data sets by a rule of a document's name and number."""
    names = whole["name"]
    held_out = [i for i, name in enumerate(names) if is_held_out(name, i)]
    rest = sorted(set(range(len(names))) - set(held_out))
    if not held_out or not rest:
        raise ValueError(
            f"the data set has {len(names)} documents; allowed: at least {HELD_OUT}, or two splits"
        )
    return whole.select(rest), whole.select(held_out)


def split_file(path: str) -> tuple[datasets.Dataset, datasets.Dataset]:
    """A text file: its last tenth, from the beginning of a line, is held out."""
    try:
        whole = datasets.Dataset.from_text(path, sample_by="document", keep_in_memory=True)
    except Exception as error:
        raise ValueError(
            f"data.name={path!r}: {said(error)}; allowed: a text file in UTF-8"
        ) from error
    text = "\n".join(whole["text"])
    at = text.rfind("\n", 0, len(text) - len(text) // HELD_OUT) + 1
    return tuple(datasets.Dataset.from_dict({"text": [piece]}) for piece in (text[:at], text[at:]))


def from_hub(data: Data, split: str, characters: int) -> datasets.Dataset:
    """The first documents of a data set, on the Hub or in a folder, until there are enough characters."""
    texts, read = [], 0
    for (text,) in stream(data, split, ("column",)):
        texts.append(text)
        read += len(text)
        if read >= characters and len(texts) >= 2 * HELD_OUT:
            break
    return datasets.Dataset.from_dict({"name": [str(i) for i in range(len(texts))], "text": texts})


def rows_from_hub(data: Data, split: str, count: int) -> list[tuple[Any, Any]]:
    """The first rows of a data set, each with its label, in an order that is drawn."""
    rows = list(islice(stream(data, split, ("column", "label")), count))
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]


def stream(data: Data, split: str, fields: tuple[str, ...]) -> Iterator[tuple]:
    """What the rows of a data set have in the columns that these fields of `data` name.

    Raises:
        ValueError: the data set cannot be read, or has no such column.
    """
    try:
        found = datasets.load_dataset(
            data.name, data.subset, split=split, revision=data.revision, streaming=True
        )
        for row in islice(found, MOST_DOCUMENTS):
            yield tuple(row[getattr(data, field)] for field in fields)
    except KeyError as error:
        field = next(field for field in fields if getattr(data, field) not in row)
        raise ValueError(
            f"data.{field}={error} is not in {data.name}; allowed: {', '.join(row)}"
        ) from error
    except Exception as error:
        raise ValueError(f"data.name={data.name!r}, split {split!r}: {said(error)}") from error


def said(error: BaseException) -> str:
    """The innermost reason of an error, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300] or type(error).__name__


def tokenize(
    texts: datasets.Dataset, tokenizer, tokens: int, share: int | None = None
) -> tuple[np.ndarray, int]:
    """The first `tokens` ids of the documents, each ended by EOS where the tokenizer has one, and how many were read.

    Args:
        share: the most ids taken of a document; None for all of it.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    found, count = [], 0
    for text in texts["text"]:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end
        found.append(np.asarray(ids[:share], dtype=np.int64))
        count += len(found[-1])
        if count >= tokens:
            break
    ids = np.concatenate(found)[:tokens] if found else np.zeros(0, dtype=np.int64)
    return ids, len(found)


def cut(ids: list[int], length: int, prefix: list[int]) -> datasets.Dataset:
    """Rows of `length` tokens, the prefix included; what is left over at the end is dropped."""
    own = length - len(prefix)
    rows = [prefix + ids[i : i + own] for i in range(0, len(ids) - own + 1, own)]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})


def checksum(ids: np.ndarray) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of token ids, the same on every machine."""
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:16]
