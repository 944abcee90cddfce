"""The models and texts that commands work on, found and checked before anything slow is done."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import list_repo_files, try_to_load_from_cache
from transformers import AutoTokenizer, PreTrainedConfig

import hub_cards

from ..folders import replace_folder
from ..integration.checkpoint_files import errors_as, find_folder

#: How the names of files begin that a tokenizer is read from.
TOKENIZER = re.compile(
    r"tokenizer|(entity_|target_)?vocab|merges|dict\.txt|spiece|spm|sentencepiece|source\.spm|target\.spm|bpe\.codes|"
    r"prophetnet|tekken|[\w.-]+\.tiktoken"
)
#: Below this many tokens a perplexity says nothing.
MIN_TOKENS = 32


def count_threads() -> str:
    """Return the number of torch's threads, in words."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"


def quiet() -> None:
    """No messages or bars of Transformers: errors are one line, progress is ours."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def read_tokenizer(path: str, label: str) -> Any:
    """The tokenizer of a model.

    Raises:
        ValueError: there is none; the message is one line.
    """
    with errors_as(f"{label}: not a model that Transformers can load"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def tokenizer_or_none(path: str) -> Any:
    """The tokenizer of a model; None where it has no file of one, as a model of images.

    Raises:
        ValueError: there is one, and it cannot be read; the message is one line.
    """
    return read_tokenizer(path, path) if any(map(TOKENIZER.match, file_names(path))) else None


def file_names(path: str) -> list[str]:
    """The names of a model's files: in its folder, on the Hub, or, where that cannot be asked, in the Hub's cache."""
    folder = find_folder(path, path)
    if folder is None:
        try:
            return list_repo_files(path)
        except Exception:  # offline, or a Hub that cannot list
            config = try_to_load_from_cache(path, "config.json")
            folder = Path(config).parent if isinstance(config, str) else None
    return [] if folder is None else os.listdir(folder)


def positions_of(config: PreTrainedConfig) -> int | None:
    """Tokens that a model reads at most; None where its config names no number."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def window_of(
    config: PreTrainedConfig,
    length: int | None,
    default: int,
    prefix: int = 0,
    option: str = "--length",
) -> int:
    """Tokens a window: the option's or the default, as far as the model has positions for them and for a prefix."""
    positions = positions_of(config)
    if positions is None:
        return length or default
    if length and length + prefix > positions:
        raise ValueError(
            f"{option} {length} exceeds what the model reads; allowed: up to {positions - prefix}"
        )
    return length or min(default, positions - prefix)


def check_folder(option: str, path: str) -> None:
    """Refuse what is no folder that files can be put into, nor a place for one."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ValueError(f"{option} {path}: a file; allowed: a folder, or a name for a new one")
    check_place(option, path)


def check_place(option: str, path: str) -> None:
    """Refuse a place for a folder where none can be made."""
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(
            f"{option} {path}: {Path(path).absolute().parent} is no folder; allowed: a place in an existing folder"
        )


def write_checkpoint(
    target: str,
    save: Callable[[Path], object],
    tokenizer: Any,
    reports: Mapping[str, Any] | None = None,
    **facts,
) -> None:
    """Write a folder in place of what is there, whole or not at all.

    Args:
        save: writes the model or adapter into the folder that it is given.
        tokenizer: None where the model has none.
        reports: by the name of their file, what is written as JSON.
        facts: for the card, see `hub_cards.write_card`.
    """
    with replace_folder(Path(target), keep_others=False) as stage:
        save(stage)
        if tokenizer is not None:
            tokenizer.save_pretrained(stage)
        for name, report in (reports or {}).items():
            (stage / name).write_text(json.dumps(report, indent=1) + "\n")
        hub_cards.try_to_write_card(stage, shown=target, **facts)


def default_text() -> tuple[str, str]:
    """A text that every Python has, and what to call it: the source of `argparse`."""
    file = argparse.__file__ or ""
    if not file.endswith(".py"):
        raise ValueError(
            "this Python has no source of argparse; give a text of your own with --text FILE"
        )
    return Path(file).read_text(
        encoding="utf-8"
    ), f"argparse.py of Python {platform.python_version()}"


def read_text(path: str, limit: int) -> tuple[str, str]:
    """The first `limit` characters of a UTF-8 text file, and what to call it.

    Raises:
        ValueError: for a file that is not text, is a folder, or cannot be read; the message is one line.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(limit)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--text {path}: not UTF-8 text (byte {error.object[error.start]:#04x} near {error.start}); "
            "allowed: a text file in UTF-8"
        ) from error
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"--text {path}: {reason}; allowed: a readable text file") from error
    if "\0" in text:
        raise ValueError(
            f"--text {path}: binary (it holds a zero byte); allowed: a text file in UTF-8"
        )
    return text, Path(path).name


def encode(tokenizer: Any, text: str, tokens: int, name: str) -> list[int]:
    """The first `tokens` token ids of a text, without special tokens; too short a text is refused."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
    if len(ids) < MIN_TOKENS:
        raise ValueError(f"the text {name} has {len(ids)} tokens; allowed: {MIN_TOKENS} or more")
    return ids


def prefix_of(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text (a BOS token, or nothing)."""
    alone = tokenizer("")["input_ids"]
    return list(alone) if alone == [tokenizer.bos_token_id] else []
