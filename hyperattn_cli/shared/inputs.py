"""Find and check the models, texts and folders that commands work on.

Every function raises a one-line ValueError, before anything slow is done.
"""

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
from hf_hyperattn.integration.loading.checkpoint_files import errors_as, find_folder
from hf_hyperattn.utils.folders import replace_folder

#: Beginnings of the names of tokenizer files.
TOKENIZER = re.compile(
    r"tokenizer|(entity_|target_)?vocab|merges|dict\.txt|spiece|spm|sentencepiece|source\.spm|target\.spm|bpe\.codes|"
    r"prophetnet|tekken|[\w.-]+\.tiktoken"
)
#: Fewer tokens than this give no meaningful perplexity.
MIN_TOKENS = 32


def count_threads() -> str:
    """Return the number of torch's threads, in words."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"


def silence_transformers() -> None:
    """Turn off messages and progress bars of Transformers; the command prints its own."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def read_tokenizer(path: str, label: str) -> Any:
    """Load the tokenizer of a model.

    Args:
        path: Folder or Hub id of the model.
        label: Beginning of the error message.

    Raises:
        ValueError: There is no tokenizer; the message is one line.
    """
    with errors_as(f"{label}: not a model that Transformers can load"):
        # Code from a repository is never run without the user's explicit consent.
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def tokenizer_or_none(path: str) -> Any:
    """Load the tokenizer of a model; return None if the model has no tokenizer files.

    Raises:
        ValueError: The tokenizer cannot be read; the message is one line.
    """
    return read_tokenizer(path, path) if any(map(TOKENIZER.match, list_file_names(path))) else None


def list_file_names(path: str) -> list[str]:
    """List the file names of a model in its folder or on the Hub.

    If the Hub cannot be asked, the names come from its local cache.
    """
    folder = find_folder(path, path)
    if folder is None:
        try:
            return list_repo_files(path)
        # Many errors are possible here, and the local cache is a good answer to all of them.
        except Exception:
            config = try_to_load_from_cache(path, "config.json")
            folder = Path(config).parent if isinstance(config, str) else None
    return [] if folder is None else os.listdir(folder)


def positions_of(config: PreTrainedConfig) -> int | None:
    """Return the largest number of tokens of a model, or None if its config has none."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def window_of(
    config: PreTrainedConfig,
    length: int | None,
    default: int,
    prefix: int = 0,
    option: str = "--length",
) -> int:
    """Return the number of tokens per window.

    Args:
        config: Config of the model, which may limit the number of positions.
        length: Value of the option; None means `default`, or the model's limit if that is smaller.
        default: Default window.
        prefix: Number of tokens in front of every window.
        option: Name of the option, for the message.

    Raises:
        ValueError: `length` and `prefix` exceed the model's limit.
    """
    positions = positions_of(config)
    # Models with relative positions name no limit.
    if positions is None:
        return length or default
    if length and length + prefix > positions:
        raise ValueError(
            f"{option} {length} exceeds what the model reads; allowed: up to {positions - prefix}"
        )
    # Without --length, shrink the default to a small model's limit instead of failing.
    return length or min(default, positions - prefix)


def check_folder(option: str, path: str) -> None:
    """Raise ValueError if a path is a file, or cannot become a folder."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ValueError(f"{option} {path}: a file; allowed: a folder, or a name for a new one")
    check_place(option, path)


def check_place(option: str, path: str) -> None:
    """Raise ValueError if the parent of a path is not a folder."""
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
    """Write a folder in place of an existing one, completely or not at all.

    Args:
        target: The folder.
        save: Writes the model or adapter into the folder that it receives.
        tokenizer: None if the model has no tokenizer.
        reports: Data to write as JSON, by file name.
        facts: Facts for the card, see `hub_cards.write_card`.
    """
    with replace_folder(Path(target), keep_others=False) as stage:
        save(stage)
        if tokenizer is not None:
            tokenizer.save_pretrained(stage)
        for name, report in (reports or {}).items():
            (stage / name).write_text(json.dumps(report, indent=1) + "\n")
        # A failing card must not lose the weights, so this function only warns.
        hub_cards.try_to_write_card(stage, shown=target, **facts)


def default_text() -> tuple[str, str]:
    """Return a text that every Python has, the source of `argparse`, and its name."""
    file = argparse.__file__ or ""
    if not file.endswith(".py"):
        raise ValueError(
            "this Python has no source of argparse; give a text of your own with --text FILE"
        )
    name = f"argparse.py of Python {platform.python_version()}"
    return Path(file).read_text(encoding="utf-8"), name


def read_text(path: str, limit: int) -> tuple[str, str]:
    """Return the first `limit` characters of a UTF-8 text file, and its name.

    Raises:
        ValueError: The file is not text, is a folder, or cannot be read; the message is one line.
    """
    try:
        # utf-8-sig drops the byte order mark that Windows editors write.
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
    # Binary files can be valid UTF-8 by accident; no text contains a zero byte.
    if "\0" in text:
        raise ValueError(
            f"--text {path}: binary (it holds a zero byte); allowed: a text file in UTF-8"
        )
    return text, Path(path).name


def encode_text(tokenizer: Any, text: str, tokens: int, name: str) -> list[int]:
    """Return the first token ids of a text, without special tokens.

    Args:
        tokenizer: The model's tokenizer.
        text: The text.
        tokens: Largest number of ids.
        name: Name of the text, for the message.

    Raises:
        ValueError: The text has fewer than `MIN_TOKENS` tokens.
    """
    # The callers add the prefix themselves, to every window.
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
    if len(ids) < MIN_TOKENS:
        raise ValueError(f"the text {name} has {len(ids)} tokens; allowed: {MIN_TOKENS} or more")
    return ids


def prefix_of(tokenizer: Any) -> list[int]:
    """Return the token ids that the tokenizer puts before every text: BOS, or none."""
    ids = tokenizer("")["input_ids"]
    # Other special tokens, such as an EOS, do not belong in front of a text.
    return list(ids) if ids == [tokenizer.bos_token_id] else []
