"""What a model is trained for: the class that loads it, and the examples of each task beside text generation.

An example is a row with its labels: of a text or an image a class, of a sentence the tokens of its translation. All are
measured alike: the loss of what is held out, and how many labels the model finds likeliest.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from . import models, texts
from .settings import Settings

BATCH = 32
#: The words of a translation model that is trained from scratch: padding, the end, and what its decoder starts with.
SPECIAL = ("<pad>", "</s>", "<s>")
Pairs = list[tuple[Any, Any]]


@dataclass(frozen=True)
class Examples:
    """Rows to train on and rows that are held out, as a Trainer takes them.

    Args:
        rows, held_out: dicts of what the model's `forward` takes, labels included; labels of -100 do not count.
        collate: makes a batch of rows.
        facts: where they are from, how many, and a checksum.
        processor: the tokenizer or image processor to save beside the model; None for none.
        classes: how many a classifier tells apart; None for no classifier.
    """

    rows: list[dict]
    held_out: list[dict]
    collate: Callable[[list[dict]], dict]
    facts: dict
    processor: Any = None
    classes: int | None = None

    def held_out_rows(self) -> list[dict]:
        """As the Trainer reads them."""
        return self.held_out

    def compared(self, model: nn.Module) -> Tensor:
        """Logits of the first rows, by which a model and what is loaded again are compared."""
        return self.logits(model, self.held_out[:4])[0]

    def logits(self, model: nn.Module, rows: list[dict]) -> tuple[Tensor, Tensor]:
        """Logits, the classes last, and labels, on the CPU; without dropout."""
        device, training = next(model.parameters()).device, model.training
        batch = {name: value.to(device) for name, value in self.collate(rows).items()}
        with torch.inference_mode():
            logits = model.eval()(**batch).logits.float().cpu()
        model.train(training)
        return logits, batch["labels"].cpu()

    def measure(self, model: nn.Module) -> dict[str, float]:
        """The loss of a label in nats, accuracy, labels predicted, and seconds."""
        loss, right, predicted, began = 0.0, 0, 0, time.perf_counter()
        for start in range(0, len(self.held_out), BATCH):
            logits, labels = self.logits(model, self.held_out[start : start + BATCH])
            counts = labels != -100
            loss += F.cross_entropy(logits[counts], labels[counts], reduction="sum").item()
            right += int((logits.argmax(-1) == labels)[counts].sum())
            predicted += int(counts.sum())
        seconds = time.perf_counter() - began
        return {
            "loss": loss / predicted,
            "accuracy": right / predicted,
            "predicted": predicted,
            "seconds": seconds,
        }


def prepare(settings: Settings, tokens: int) -> Examples | texts.Text:
    """What the recipe's task trains on.

    Args:
        tokens: how many the steps of the run read, for text generation.

    Raises:
        ValueError: the data cannot be read.
    """
    task = settings.model.task
    if task == "text-generation":
        tokenizer = models.load_processor(hf.AutoTokenizer, settings.model)
        return texts.prepare(settings.data, tokenizer, tokens, settings.trainer.seed)
    train, held_out = pairs_of(settings)
    make = {
        "text-classification": classified,
        "image-classification": seen,
        "translation": translated,
    }[task]
    return make(settings, train, held_out)


def pairs_of(settings: Settings) -> tuple[Pairs, Pairs]:
    """Inputs with their labels: what is trained on, and what is held out."""
    data, seed = settings.data, settings.trainer.seed
    if data.source == "hub":
        rows = texts.rows_from_hub(data, data.split, data.train_rows + data.held_out_rows)
        if data.held_out_split:
            return rows[: data.train_rows], texts.rows_from_hub(
                data, data.held_out_split, data.held_out_rows
            )
        at = max(len(rows) - data.held_out_rows, 9 * len(rows) // 10)
        return rows[:at][: data.train_rows], rows[at:]
    # The data of packages, which the experiments read too.
    if data.source == "reviews":
        from experiments.hsa_texts import labelled

        return labelled(data.train_rows, data.held_out_rows, seed)
    if data.source == "fashion-mnist":
        from experiments.hsa_fashion import fashion

        counts = {"train": data.train_rows, "t10k": data.held_out_rows}
        return tuple(list(zip(*(x[:n] for x in fashion(part)))) for part, n in counts.items())
    from experiments.help_texts import pairs, parts

    found = parts(pairs(4, 16), {"held out": data.held_out_rows}, seed)
    return found["train"][: data.train_rows], found["held out"]


def classified(settings: Settings, train: Pairs, held_out: Pairs) -> Examples:
    """Texts with the number of their class."""
    tokenizer = models.load_processor(hf.AutoTokenizer, settings.model)

    def rows(pairs: Pairs) -> list[dict]:
        ids = tokenizer(
            [text for text, _ in pairs], truncation=True, max_length=settings.data.length
        )["input_ids"]
        return [
            {"input_ids": row, "labels": class_of(label, settings)}
            for row, (_, label) in zip(ids, pairs, strict=True)
        ]

    return examples(
        settings, rows(train), rows(held_out), hf.DataCollatorWithPadding(tokenizer), tokenizer
    )


def seen(settings: Settings, train: Pairs, held_out: Pairs) -> Examples:
    """Images with the number of their class, prepared as the model's own processor says; those of an untrained model
    have numbers from -1 to 1.
    """
    processor = (
        None
        if settings.model.config
        else models.load_processor(hf.AutoImageProcessor, settings.model)
    )

    def pixels(image) -> Tensor:
        if processor is None:
            return image * 2 - 1
        return processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]

    def rows(pairs: Pairs) -> list[dict]:
        return [
            {"pixel_values": pixels(image), "labels": class_of(label, settings)}
            for image, label in pairs
        ]

    return examples(settings, rows(train), rows(held_out), hf.default_data_collator, processor)


def class_of(label: Any, settings: Settings) -> int:
    """The number of a class.

    Raises:
        ValueError: it is none.
    """
    if isinstance(label, str | float) or int(label) < 0:
        raise ValueError(
            f"data.label={settings.data.label!r} holds {label!r}; allowed: numbers of classes, from 0"
        )
    return int(label)


def translated(settings: Settings, train: Pairs, held_out: Pairs) -> Examples:
    """Sentences with the tokens of their translation; an untrained model gets a tokenizer of the training texts."""
    model, length = settings.model, settings.data.length
    if model.config:
        tokenizer = tokenizer_of(
            [side for pair in train for side in pair], model.config["vocab_size"]
        )
    else:
        tokenizer = models.load_processor(hf.AutoTokenizer, model)

    def rows(pairs: Pairs) -> list[dict]:
        source, target = zip(*pairs)
        return [
            {"input_ids": ids, "labels": labels}
            for ids, labels in zip(
                tokenizer(list(source), truncation=True, max_length=length)["input_ids"],
                tokenizer(text_target=list(target), truncation=True, max_length=length)[
                    "input_ids"
                ],
                strict=True,
            )
        ]

    collate = hf.DataCollatorForSeq2Seq(tokenizer, padding=True)
    return examples(settings, rows(train), rows(held_out), collate, tokenizer)


def examples(
    settings: Settings, rows: list[dict], held_out: list[dict], collate: Callable, processor
) -> Examples:
    """Rows with what is said of them in the results."""
    if not rows or not held_out:
        raise ValueError(
            f"data.source={settings.data.source!r} gives {len(rows)} rows to train on, {len(held_out)} held out"
        )
    digest = hashlib.sha256()
    for row in (*rows, *held_out):
        for value in row.values():
            digest.update(torch.as_tensor(value).numpy().tobytes())
    name = settings.data.name
    facts = {
        "source": settings.data.source
        if name is None
        else f"{settings.data.source}: {Path(name).name}",
        "train": {"rows": len(rows)},
        "held_out": {"rows": len(held_out)},
        "sha256": digest.hexdigest()[:16],
    }
    classes = None
    if settings.model.task != "translation":
        for option, part in (("train_rows", rows), ("held_out_rows", held_out)):
            if (
                len({row["labels"] for row in part}) == 1
            ):  # as in the first rows of a data set that is sorted
                raise ValueError(
                    f"data.{option}={getattr(settings.data, option)} gives {len(part)} rows, all of class "
                    f"{part[0]['labels']}; allowed: so many that there are two classes, or a data set in another order"
                )
        classes = 1 + max(row["labels"] for row in (*rows, *held_out))
    return Examples(rows, held_out, collate, facts, processor, classes)


def tokenizer_of(sentences: list[str], size: int) -> hf.PreTrainedTokenizerFast:
    """Byte-pair tokens of the sentences, each of which ends in one for the end."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
    from tokenizers import models as kinds

    pad, end, _ = SPECIAL
    words = Tokenizer(kinds.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        sentences,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(SPECIAL),
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    words.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, 1)]
    )
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, eos_token=end)
