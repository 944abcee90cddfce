"""Check a checkpoint before it is used: its files, its settings, its links, its class.

Downloaded checkpoints are not trusted. Only known file names are read, no link may lead out of the
checkpoint, and every error is a ValueError of one line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from ...utils.files import parts_of, read_json
from ...utils.text import short
from ..patching.checkpoint_config import is_recorded

#: File names that a checkpoint may have: those Transformers reads and writes, without pickles,
#: which can hold code.
KNOWN = re.compile(
    r"""model([.-][\w.-]+)?\.safetensors(\.index\.json)? | adapter_model\.safetensors | adapter_config\.json
    | (config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template)\.json
    | (preprocessor_config|processor_config|video_preprocessor_config|audio_tokenizer_config)\.json
    | (vocab|entity_vocab|vocab-src|vocab-tgt|target_vocab|normalizer|emoji|byte_maps)\.json
    | (word_shape|word_pronunciation)\.json
    | (tokenizer|spiece|spm|spm_char|sentencepiece|sentencepiece\.bpe)\.model | (source|target)\.spm
    | (vocab|merges|dict)\.txt | bpe\.codes | prophetnet\.tokenizer | [\w.-]+\.tiktoken
    | chat_template\.jinja | additional_chat_templates/[\w.-]+\.jinja
    | hyperattn_config\.json | hyperattn_(inject|heal)\.json | \.eval_results/hf_hyperattn\.yaml
    | (README|LICEN[CS]E|NOTICE|COPYING)(\.md|\.txt)?""",
    re.VERBOSE,
)
#: Names of settings files. Their copies lose the keys that name code.
SETTINGS = re.compile(r"(\w*config|special_tokens_map|chat_template)\.json")
#: Keys of configs under which Transformers finds code to run.
CODE = ("auto_map", "custom_generate", "custom_pipelines")
#: Largest totals by name of a setting. Python builds each of these objects one by one, so more
#: would hang the process.
COUNTS = (
    (re.compile(r"(\w+_)?(layers?|depths?|experts|block_sizes)"), 4096),
    (re.compile(r"num_labels"), 2**20),
)


def files_of(directory: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the known files of a checkpoint, and the names of all others.

    Raises:
        ValueError: A known name is no regular file, or a link out of the checkpoint.
    """
    known: dict[str, Path] = {}
    others: list[str] = []
    for path in sorted(directory.iterdir()):
        names = [path.name]
        # Known files may be one folder deep, such as .eval_results/hf_hyperattn.yaml.
        if path.is_dir() and not path.is_symlink():
            inside = [f"{path.name}/{file.name}" for file in sorted(path.iterdir())]
            names = inside if any(map(KNOWN.fullmatch, inside)) else names
        for name in names:
            if KNOWN.fullmatch(name):
                known[name] = regular_file(directory, name)
            else:
                others.append(name)
    return known, others


def regular_file(directory: Path, name: str) -> Path:
    """Return the real path of one file of a checkpoint.

    In a snapshot of the Hub's cache, files are links to blobs of the same repository, which is
    allowed.

    Raises:
        ValueError: The file is missing, no regular file, or a link that leads elsewhere.
    """
    top = directory.resolve()
    places = [top]
    if top.parent.name == "snapshots":
        places.append(top.parents[1] / "blobs")
    try:
        real = (directory / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        # OSError: the file is missing. RuntimeError: its links form a circle.
        raise ValueError(f"cannot read {directory / name}: {error}; allowed: a file") from error
    if not any(real.is_relative_to(place) for place in places):
        raise ValueError(
            f"{directory / name} is a link out of the checkpoint; allowed: the file itself in its place"
        )
    if not real.is_file():
        raise ValueError(f"{directory / name} is no regular file; allowed: a file")
    return real


def read_config(directory: Path) -> dict[str, Any]:
    """Return config.json as a dict with checked types and sizes.

    Transformers assumes some types without a check, and builds any number of layers.

    Raises:
        ValueError: The file cannot be read, or a value is not allowed.
    """
    path = directory / "config.json"
    data = read_json(path)
    # 1. Transformers uses these keys without checking their types.
    for key, kind, allowed in (
        ("model_type", str, "a string"),
        ("architectures", list, "a list of strings"),
        ("auto_map", dict, "an object"),
        ("hyperattn", dict, "an object"),
    ):
        value = data.get(key)
        good = isinstance(value, kind) and (
            kind is not list or all(isinstance(v, str) for v in value)
        )
        if value is not None and not good:
            raise ValueError(f"{path}: {key} is {short(value)}; allowed: {allowed}")
    # 2. Sizes: at any depth, alone or in a list. torch's sizes have 64 bits.
    for key, value in iterate_items(data):
        numbers = [n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int)]
        if any(abs(n) >= 2**63 for n in numbers):
            raise ValueError(f"{path}: {key} is {short(value)}; allowed: numbers of 64 bits")
        for name, most in COUNTS:
            if name.fullmatch(key) and sum(numbers) > most:
                raise ValueError(f"{path}: {key} is {short(value)}; allowed: up to {most:,}")
    return data


def iterate_items(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key and value of nested objects."""
    waiting = [data]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield from part.items()
        waiting += parts_of(part)


def without_code(data: Any) -> tuple[Any, list[str]]:
    """Return a copy of JSON data without keys that name code, and the removed keys."""
    code: list[str] = []

    def remove_code(part: Any) -> Any:
        if isinstance(part, list):
            return [remove_code(item) for item in part]
        if not isinstance(part, dict):
            return part
        code.extend(key for key in part if key in CODE)
        return {key: remove_code(value) for key, value in part.items() if key not in CODE}

    return remove_code(data), sorted(code)


def check_weights(directory: Path, files: dict[str, Path]) -> None:
    """Check that a checkpoint has weights, and that none are damaged or missing.

    Raises:
        ValueError: There are no weights, a file is damaged, or a file that an index names is
            missing.
    """
    weights = [name for name in files if name.endswith(".safetensors")]
    if not weights:
        raise ValueError(
            f"{directory} holds no weights; allowed: model.safetensors, as save_pretrained writes it"
        )
    for name in weights:
        try:
            # Opening reads the header and compares the size of the file.
            with safe_open(files[name], "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{directory / name} is damaged: {error}; allowed: a whole safetensors file"
            ) from error
    for name in (name for name in files if name.endswith(".index.json")):
        shards = read_json(files[name]).get("weight_map")
        if not isinstance(shards, dict) or not all(
            isinstance(shard, str) for shard in shards.values()
        ):
            raise ValueError(
                f"{directory / name} has weight_map={short(shards)}; allowed: an object of tensors and their files"
            )
        if missing := [shard for shard in shards.values() if shard not in weights]:
            raise ValueError(
                f"{directory / name} names {short(missing[0])}, which is not there; save it again"
            )


def load_to_look_at(source: str | os.PathLike) -> PreTrainedModel:
    """Load a model for inspection: with weights only if it is patched.

    An unpatched model is built on the meta device, without memory for its weights.

    Args:
        source: Directory or Hub id.

    Raises:
        ValueError: This Transformers does not know the model, or it cannot be found or read.
    """
    config = load_config(source, str(source))
    with errors_as(f"{source}: cannot load it"):
        if is_recorded(config):
            return class_of(config).from_pretrained(source, dtype="auto")
        with torch.device("meta"):
            return class_of(config)._from_config(config)


def load_config(source: str | os.PathLike, label: str) -> PreTrainedConfig:
    """Return the config of a model whose code is in Transformers.

    A local config.json is checked before Transformers reads it.

    Args:
        source: Folder or Hub id.
        label: Name of the source in errors.

    Raises:
        ValueError: The config is missing or damaged, or unknown to this Transformers.
    """
    folder = find_folder(source, label)
    with errors_as(f"{label}: not a model that Transformers can load"):
        if folder is not None:
            read_config(folder)
        return AutoConfig.from_pretrained(folder or source, trust_remote_code=False)


def find_folder(source: str | os.PathLike, label: str) -> Path | None:
    """Return the folder of a saved model, or None for a Hub id.

    Raises:
        ValueError: The source is neither.
    """
    folder = Path(source).expanduser()
    allowed = "allowed: the folder of a saved model or a Hub id"
    # A Hub id has the form "name" or "owner/name".
    only_on_disk = str(source).startswith((".", "/", "~")) or str(source).count("/") > 1
    if not folder.is_dir() and (only_on_disk or Path(source).exists()):
        raise ValueError(f"{label}: {'a file' if folder.exists() else 'no such folder'}; {allowed}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{label}: a folder without config.json, not a model; {allowed}")
    return folder if folder.is_dir() else None


@contextmanager
def errors_as(message: str) -> Iterator[None]:
    """Turn every error of a block into a ValueError that starts with a message.

    Damaged checkpoints make Transformers raise errors of all kinds.
    """
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        raise ValueError(f"{message}: {kind}{error}") from error


def class_of(config: Any) -> Any:
    """Return the model class that the config names, or the bare model of its type.

    Raises:
        ValueError: This Transformers has no class for the model type.
    """
    cls = getattr(transformers, (config.architectures or [""])[0], None)
    if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
        return cls
    # The config names no class of Transformers: take the bare model of its type.
    if type(config) not in AutoModel._model_mapping:
        raise ValueError(
            f"model type {config.model_type!r} has no model class in this Transformers"
        )
    cls = AutoModel._model_mapping[type(config)]
    return cls[0] if isinstance(cls, list | tuple) else cls
