"""Reads the text that a model is measured on."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

#: Below this many tokens a perplexity says nothing.
MIN_TOKENS = 32


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


def encode(tokenizer, text: str, tokens: int, name: str) -> list[int]:
    """The first `tokens` token ids of a text, without special tokens; too short a text is refused."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
    if len(ids) < MIN_TOKENS:
        raise ValueError(f"the text {name} has {len(ids)} tokens; allowed: {MIN_TOKENS} or more")
    return ids


def prefix_of(tokenizer) -> list[int]:
    """What the tokenizer puts before every text (a BOS token, or nothing)."""
    alone = tokenizer("")["input_ids"]
    return list(alone) if alone == [tokenizer.bos_token_id] else []
