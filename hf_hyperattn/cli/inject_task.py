"""What `hyperattn inject` works on, found and checked before anything slow is done; and what it writes."""

from __future__ import annotations

import argparse
import copy
import datetime
import os
import platform
import shlex
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig

import hub_cards

from ..integration.checkpoint_files import errors_as, load_config
from . import device_map
from .inputs import (
    count_threads,
    encode,
    prefix_of,
    read_text,
    read_tokenizer,
    window_of,
    write_checkpoint,
)

REPORT = "hyperattn_inject.json"
CHARACTERS = 16  # of a text are read for a token; texts have about 4
PASSAGES = 8  # of `length` tokens in each part of a text for an encoder
PARTS = 3  # to measure on, to choose on, to verify on


@dataclass
class Task:
    """A model and the texts that its attention is changed on.

    Args:
        texts: for each of the `PARTS`, by name: token ids [length], for an encoder passages [PASSAGES, length].
        is_encoder: whether the model reads both ways, which is then loaded without its head.
    """

    config: PreTrainedConfig
    tokenizer: Any
    texts: list[dict[str, Tensor]]
    length: int
    is_encoder: bool


def prepare(args: argparse.Namespace) -> Task:
    """Find model and texts and check them."""
    for path in args.text:
        read_text(path, 1)
    config = read_stock_config(args.model)
    tokenizer = read_tokenizer(args.model, args.model)
    is_encoder = not is_causal(args.model, config)
    length = window_of(config, args.length, 128 if is_encoder else 2048)
    prefix = torch.tensor(
        [] if is_encoder else prefix_of(tokenizer), dtype=torch.long
    )  # of every part
    piece = length * PASSAGES if is_encoder else length - len(prefix)  # tokens of a text in a part
    texts: list[dict[str, Tensor]] = [{} for _ in range(PARTS)]
    for path in args.text:
        text, name = read_text(path, CHARACTERS * PARTS * piece)
        if name in texts[0]:
            raise ValueError(
                f"--text {path}: a second text called {name}; allowed: texts of different names"
            )
        ids = encode(tokenizer, text, PARTS * piece, name)
        if len(ids) < PARTS * piece:
            raise ValueError(
                f"--text {path}: {len(ids)} tokens; allowed: {PARTS * piece} or more ({PARTS} parts of {piece}); use "
                "a longer text or a smaller --length"
            )
        for part, ids_of_part in zip(texts, torch.tensor(ids).split(piece)):
            whole = (
                passages(tokenizer, ids_of_part, length)
                if is_encoder
                else torch.cat([prefix, ids_of_part])
            )
            part[name] = whole
    return Task(config, tokenizer, texts, length, is_encoder)


def read_stock_config(path: str) -> PreTrainedConfig:
    """The config of a model with its own attention; raises ValueError where it is patched or no model."""
    config = load_config(path, path)
    if getattr(config, "hyperattn", None) is not None:
        raise ValueError(f"{path}: patched already; allowed: a model with its own attention")
    return config


def is_causal(path: str, config: PreTrainedConfig) -> bool:
    """Whether the checkpoint is of a causal LM, not of a text encoder; raises ValueError where it is neither."""
    classes = "".join(config.architectures or ())
    if config.is_encoder_decoder:
        raise ValueError(
            f"{path}: an encoder with a decoder; allowed: causal LMs and text encoders"
        )
    causal = "CausalLM" in classes or "LMHead" in classes
    with errors_as(f"{path}: not a causal LM or text encoder"), torch.device("meta"):
        (AutoModelForCausalLM if causal else AutoModel).from_config(copy.deepcopy(config))
    return causal


def passages(tokenizer: Any, ids: Tensor, length: int) -> Tensor:
    """[PASSAGES, length] of the tokens, between the tokenizer's first and last special token."""
    first, last = (
        [] if x is None else [x] for x in (tokenizer.cls_token_id, tokenizer.sep_token_id)
    )
    inner = length - len(first) - len(last)
    return torch.tensor([first + row[:inner].tolist() + last for row in ids.split(length)])


def dtype_of(config: PreTrainedConfig) -> torch.dtype:
    """Of the checkpoint, in which the new one is written."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def write(
    args: argparse.Namespace,
    model: Any,
    dtype: torch.dtype,
    tokenizer: Any,
    report: dict[str, Any],
    results: list[dict[str, Any]] | None = None,
) -> None:
    """Write the folder, whole or not at all; without --output nothing is written.

    Args:
        tokenizer: None where the model has none.
        results: what the card says was measured.
    """
    args.report = report
    if args.output is None:
        print("\nNothing written: no --output was given.")
        return
    base, save = hub_cards.hub_id_or_none(args.model), partial(device_map.save, model, dtype)
    write_checkpoint(
        args.output, save, tokenizer, {REPORT: report}, base_model=base, results=results
    )
    print(f"\nwritten: {Path(args.output)}")


def results(args: argparse.Namespace, report: dict[str, Any]) -> list[dict[str, Any]]:
    """What the card says was measured."""
    cost = report.get("cost", {"name": "pairs", "share": 1.0})
    chosen_by = CHOSEN_BY.get(cost["name"], "").format(cost["share"])
    if times := report.get("corrections"):
        chosen_by += f", corrected {times} times by what heads lose together"
    common = circumstances(args, "torch", "transformers") | {
        "metric": report["metric"],
        "notes": report.get("notes")
        or f"{report['length']} tokens, {report['pairs']:.1%} of the attended pairs{chosen_by}{time_note(report)}.",
    }
    rows = [(f"{name}, held-out part", r) for name, r in report["texts"].items()]
    rows += [
        (f"retrieval: answers of {name}", r) for name, r in report.get("retrieval", {}).items()
    ]
    return [
        {**common, "value": r["after"], "base_value": r["before"], "dataset": where}
        for where, r in rows
    ]


def circumstances(args: argparse.Namespace, *programs: str) -> dict[str, Any]:
    """How and where something was measured."""
    return {
        "command": public_command(args),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, {count_threads()}",
        "versions": {name: version(name) for name in programs},
        "date": datetime.date.today().isoformat(),
    }


#: By what rules were chosen, and with what share, if not by pairs.
CHOSEN_BY = {
    "bytes": ", chosen by cache bytes ({:.1%} of stock's with HierarchicalCache(model, evict=True))",
    "time": ", chosen by the time of rules (together {:.1%} of stock's attention)",
}


def time_note(report: dict[str, Any]) -> str:
    """The time of attention, where it was measured against stock in the same pass."""
    if "faster" not in report:
        return ""
    share = report["attention_seconds"]["after"] / report["attention_seconds"]["before"]
    return (
        f", attention in {share:.2f} of stock's time{'' if report['faster'] else ' (not faster)'}"
    )


def public_command(args: argparse.Namespace) -> str:
    """The command as it was run; of paths on this machine the last part alone."""
    options = (getattr(args, name, None) for name in ("output", "out", "device_map"))
    paths = (args.model, *options, *(args.text or ()))
    local = {path for path in paths if path and not hub_cards.hub_id_or_none(path)}
    words = []
    for word in args.argv:
        option, equals, value = word.partition("=")
        if option.startswith("-") and value in local:
            word = option + equals + public_name(value)
        words.append(public_name(word) if word in local else word)
    return shlex.join(["hyperattn", *words])


def public_name(path: str) -> str:
    """The last part of a path, which is all of it that is anybody else's business."""
    return os.path.basename(os.path.abspath(path))
