"""A saved model as the class that it was saved as, for looking at it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from .checkpoint_config import is_recorded
from .checkpoint_files import read_config


def load_to_look_at(source: str | os.PathLike) -> PreTrainedModel:
    """The model with its weights where something in it is patched, else without memory for them.

    Args:
        source: directory or Hub id.

    Raises:
        ValueError: it is no model that this Transformers knows, or cannot be found or read.
    """
    config = load_config(source, str(source))
    with errors_as(f"{source}: cannot load it"):
        if is_recorded(config):
            return class_of(config).from_pretrained(source, dtype="auto")
        with torch.device("meta"):
            return class_of(config)._from_config(config)


def load_config(source: str | os.PathLike, label: str) -> PreTrainedConfig:
    """The config of a model of Transformers' own code, on the disk checked before anything is made of it.

    Args:
        source: folder or Hub id.
        label: what errors call it.

    Raises:
        ValueError: there is none, it is damaged, or it is one that this Transformers does not know.
    """
    folder = find_folder(source, label)
    with errors_as(f"{label}: not a model that Transformers can load"):
        if folder is not None:
            read_config(folder)
        return AutoConfig.from_pretrained(folder or source, trust_remote_code=False)


def find_folder(source: str | os.PathLike, label: str) -> Path | None:
    """The folder of a saved model; None for an id on the Hub.

    Raises:
        ValueError: it can be neither.
    """
    folder, allowed = Path(source).expanduser(), "allowed: the folder of a saved model or a Hub id"
    if not folder.is_dir() and is_path(source):
        raise ValueError(f"{label}: {'a file' if folder.exists() else 'no such folder'}; {allowed}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{label}: a folder without config.json, not a model; {allowed}")
    return folder if folder.is_dir() else None


@contextmanager
def errors_as(message: str) -> Iterator[None]:
    """Whatever a damaged checkpoint makes of the code of Transformers comes out as one ValueError, after `message`."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        raise ValueError(f"{message}: {kind}{error}") from error


def is_path(source: str | os.PathLike) -> bool:
    """Whether a name can only mean something on the disk, and no id on the Hub."""
    return Path(source).exists() or str(source).startswith((".", "/", "~")) or str(source).count("/") > 1


def class_of(config: Any) -> Any:
    """The class that the config names, or the bare model of its type."""
    cls = getattr(transformers, (config.architectures or [""])[0], None)
    if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
        return cls
    if type(config) not in AutoModel._model_mapping:
        raise ValueError(f"model type {config.model_type!r} has no model class in this Transformers")
    cls = AutoModel._model_mapping[type(config)]
    return cls[0] if isinstance(cls, list | tuple) else cls
