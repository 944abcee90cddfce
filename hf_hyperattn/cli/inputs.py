"""The models and texts that commands work on, found and checked before anything slow is done."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, PreTrainedConfig

from ..integration.checkpoint_files import errors_as

#: Below this many tokens a perplexity says nothing.
MIN_TOKENS = 32


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


def window_of(config: PreTrainedConfig, length: int | None, default: int, prefix: int = 0) -> int:
    """Tokens a window: --length or the default, as far as the model has positions for them and for a prefix."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return length or default
    if length and length + prefix > positions:
        raise ValueError(f"--length {length} exceeds what the model reads; allowed: up to {positions - prefix}")
    return length or min(default, positions - prefix)


def default_text() -> tuple[str, str]:
    """A text that every Python has, and what to call it: the source of `argparse`."""
    file = argparse.__file__ or ""
    if not file.endswith(".py"):
        raise ValueError("this Python has no source of argparse; give a text of your own with --text FILE")
    return Path(file).read_text(encoding="utf-8"), f"argparse.py of Python {platform.python_version()}"


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
        raise ValueError(f"--text {path}: binary (it holds a zero byte); allowed: a text file in UTF-8")
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
