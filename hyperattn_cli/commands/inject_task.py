"""Prepare the model and texts of `hyperattn inject`, and write its result.

All input is checked here before anything slow begins.
"""

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
from hf_hyperattn.integration.loading.checkpoint_files import errors_as, load_config

from ..shared import device_map
from ..shared.inputs import (
    count_threads,
    encode_text,
    prefix_of,
    read_text,
    read_tokenizer,
    window_of,
    write_checkpoint,
)

REPORT = "hyperattn_inject.json"
CHARACTERS = 16  # characters to read per token; texts have about 4
PASSAGES = 8  # passages of `length` tokens in each part of a text, for an encoder
PARTS = 3  # parts of a text: measure, choose, verify


@dataclass
class Task:
    """A model and the texts that its attention is changed on.

    Args:
        config: Config of the model.
        tokenizer: Its tokenizer.
        texts: For each of the `PARTS`, token ids by text name: shape [length], for an encoder
            passages [PASSAGES, length].
        length: Tokens per part, for an encoder per passage.
        is_encoder: Whether the model is a bidirectional encoder, which is loaded without its head.
    """

    config: PreTrainedConfig
    tokenizer: Any
    texts: list[dict[str, Tensor]]
    length: int
    is_encoder: bool


def prepare_task(args: argparse.Namespace) -> Task:
    """Find the model and the texts, and check them.

    Raises:
        ValueError: The model or a text is not usable, or a text is too short.
    """
    # Find unreadable texts before the model is asked for, which may take a download.
    for path in args.text:
        read_text(path, 1)
    config = read_stock_config(args.model)
    tokenizer = read_tokenizer(args.model, args.model)
    is_encoder = not is_causal(args.model, config)
    length = window_of(config, args.length, 128 if is_encoder else 2048)
    # Every part begins with the prefix, so that all parts are read like a whole text.
    prefix = torch.tensor([] if is_encoder else prefix_of(tokenizer), dtype=torch.long)
    piece = length * PASSAGES if is_encoder else length - len(prefix)  # tokens of a text in a part
    texts: list[dict[str, Tensor]] = [{} for _ in range(PARTS)]
    for path in args.text:
        # Read no more than needed: a text may be a large corpus.
        text, name = read_text(path, CHARACTERS * PARTS * piece)
        if name in texts[0]:
            raise ValueError(
                f"--text {path}: a second text called {name}; allowed: texts of different names"
            )
        ids = encode_text(tokenizer, text, PARTS * piece, name)
        if len(ids) < PARTS * piece:
            raise ValueError(
                f"--text {path}: {len(ids)} tokens; allowed: {PARTS * piece} or more ({PARTS} parts of {piece}); use "
                "a longer text or a smaller --length"
            )
        # The parts follow each other in the text, so that no part has seen another one's tokens.
        for part, ids_of_part in zip(texts, torch.tensor(ids).split(piece)):
            if is_encoder:
                part[name] = split_passages(tokenizer, ids_of_part, length)
            else:
                part[name] = torch.cat([prefix, ids_of_part])
    return Task(
        config=config, tokenizer=tokenizer, texts=texts, length=length, is_encoder=is_encoder
    )


def read_stock_config(path: str) -> PreTrainedConfig:
    """Read the config of an unpatched model.

    Raises:
        ValueError: The model is patched, or is not a Transformers model.
    """
    config = load_config(path, path)
    if getattr(config, "hyperattn", None) is not None:
        raise ValueError(f"{path}: patched already; allowed: a model with its own attention")
    return config


def is_causal(path: str, config: PreTrainedConfig) -> bool:
    """Return whether a checkpoint is a causal LM, not a text encoder.

    Raises:
        ValueError: It is neither.
    """
    classes = "".join(config.architectures or ())
    if config.is_encoder_decoder:
        raise ValueError(
            f"{path}: an encoder with a decoder; allowed: causal LMs and text encoders"
        )
    # The class name in config.json decides, since many families have both kinds of models.
    causal = "CausalLM" in classes or "LMHead" in classes
    # Building on the meta device checks the class without allocating weights.
    with errors_as(f"{path}: not a causal LM or text encoder"), torch.device("meta"):
        (AutoModelForCausalLM if causal else AutoModel).from_config(copy.deepcopy(config))
    return causal


def split_passages(tokenizer: Any, ids: Tensor, length: int) -> Tensor:
    """Split token ids into passages with the tokenizer's special tokens.

    Args:
        tokenizer: Its CLS and SEP tokens enclose every passage, if it has them.
        ids: Token ids, shape [PASSAGES * length].
        length: Tokens per passage, special tokens included.

    Returns:
        Token ids, shape [PASSAGES, length]. The last ids of each row give way to the special
        tokens.
    """
    first, last = (
        [] if x is None else [x] for x in (tokenizer.cls_token_id, tokenizer.sep_token_id)
    )
    # Special tokens count among the `length` tokens of a passage.
    inner = length - len(first) - len(last)
    return torch.tensor([first + row[:inner].tolist() + last for row in ids.split(length)])


def dtype_of(config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype of the checkpoint, in which the result is written."""
    # A config may have no dtype.
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def write_model(
    args: argparse.Namespace,
    model: Any,
    dtype: torch.dtype,
    tokenizer: Any,
    report: dict[str, Any],
    results: list[dict[str, Any]] | None = None,
) -> None:
    """Write the result folder atomically; without --output, write nothing.

    Args:
        args: The command line; `args.report` is set to `report`.
        model: The patched model.
        dtype: dtype of the saved weights.
        tokenizer: None if the model has no tokenizer.
        report: Measurements, written as JSON.
        results: Measurements for the card; None if there are none.
    """
    args.report = report
    if args.output is None:
        print("\nNothing written: no --output was given.")
        return
    # The card may name a base model on the Hub, but no path on this machine.
    base, save = hub_cards.hub_id_or_none(args.model), partial(device_map.save_model, model, dtype)
    write_checkpoint(
        args.output, save, tokenizer, {REPORT: report}, base_model=base, results=results
    )
    print(f"\nwritten: {Path(args.output)}")


def list_results(args: argparse.Namespace, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measurements for the card, one dict per text and task."""
    cost = report.get("cost", {"name": "pairs", "share": 1.0})
    # Numbers on a card need their setting: length, share and how the rules were chosen.
    chosen_by = CHOSEN_BY.get(cost["name"], "").format(cost["share"])
    if times := report.get("corrections"):
        chosen_by += f", corrected {times} times by what heads lose together"
    notes = report.get("notes")
    if not notes:
        share = f"{report['pairs']:.1%} of the attended pairs"
        notes = f"{report['length']} tokens, {share}{chosen_by}{format_time_note(report)}."
    common = describe_circumstances(args, "torch", "transformers") | {
        "metric": report["metric"],
        "notes": notes,
    }
    rows = [(f"{name}, held-out part", r) for name, r in report["texts"].items()]
    rows += [
        (f"retrieval: answers of {name}", r) for name, r in report.get("retrieval", {}).items()
    ]
    return [
        {**common, "value": r["after"], "base_value": r["before"], "dataset": where}
        for where, r in rows
    ]


def describe_circumstances(args: argparse.Namespace, *programs: str) -> dict[str, Any]:
    """Return the command, machine, versions and date of a measurement."""
    return {
        "command": public_command(args),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, {count_threads()}",
        "versions": {name: version(name) for name in programs},
        "date": datetime.date.today().isoformat(),
    }


#: Note on the cost that the choice of rules minimised, if it is not pairs.
CHOSEN_BY = {
    "bytes": ", chosen by cache bytes ({:.1%} of stock's with HierarchicalCache(model, evict=True))",
    "time": ", chosen by the time of rules (together {:.1%} of stock's attention)",
}


def format_time_note(report: dict[str, Any]) -> str:
    """Return a note on the time of attention, or "" if it was not measured."""
    if "faster" not in report:
        return ""
    share = report["attention_seconds"]["after"] / report["attention_seconds"]["before"]
    return (
        f", attention in {share:.2f} of stock's time{'' if report['faster'] else ' (not faster)'}"
    )


def public_command(args: argparse.Namespace) -> str:
    """Return the command line for publication.

    Paths on this machine are shortened to their last part: they may hold private names.
    """
    options = (getattr(args, name, None) for name in ("output", "out", "device_map"))
    paths = (args.model, *options, *(args.text or ()))
    # Hub ids are public, everything else is a path on this machine.
    local = {path for path in paths if path and not hub_cards.hub_id_or_none(path)}
    words = []
    for word in args.argv:
        option, equals, value = word.partition("=")
        # An option may be written as --output=DIR.
        if option.startswith("-") and value in local:
            word = option + equals + public_name(value)
        words.append(public_name(word) if word in local else word)
    return shlex.join(["hyperattn", *words])


def public_name(path: str) -> str:
    """Return the last part of a path, without the private folders above it."""
    return os.path.basename(os.path.abspath(path))
