"""The files of a checkpoint, checked before they are used: which are known, what they may hold, where links lead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..fields import short
from ..files import parts_of, read_json

#: What a checkpoint may hold, by the names that Transformers reads and writes. No pickles: they can hold code.
KNOWN = re.compile(
    r"""model([.-][\w.-]+)?\.safetensors(\.index\.json)?
    | (config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template)\.json
    | (preprocessor_config|processor_config|video_preprocessor_config|audio_tokenizer_config)\.json
    | (vocab|entity_vocab|vocab-src|vocab-tgt|target_vocab|normalizer|emoji|byte_maps)\.json
    | (word_shape|word_pronunciation)\.json
    | (tokenizer|spiece|spm|spm_char|sentencepiece|sentencepiece\.bpe)\.model | (source|target)\.spm
    | (vocab|merges|dict)\.txt | bpe\.codes | prophetnet\.tokenizer | [\w.-]+\.tiktoken
    | chat_template\.jinja | additional_chat_templates/[\w.-]+\.jinja
    | hyperattn_config\.json | hyperattn_inject\.json | \.eval_results/hf_hyperattn\.yaml
    | (README|LICEN[CS]E|NOTICE|COPYING)(\.md|\.txt)?""",
    re.VERBOSE,
)
SETTINGS = re.compile(r"(\w*config|special_tokens_map|chat_template)\.json")
#: Keys of configs under which Transformers finds code to run.
CODE = ("auto_map", "custom_generate", "custom_pipelines")
#: Of what a config may ask for how much, all in all: each is made in Python, one by one.
COUNTS = (
    (re.compile(r"(\w+_)?(layers?|depths?|experts|block_sizes)"), 4096),
    (re.compile(r"num_labels"), 2**20),
)


def files_of(directory: Path) -> tuple[dict[str, Path], list[str]]:
    """The known files of a checkpoint, each by its name with the regular file that it is, and the names of all others.

    Raises:
        ValueError: a known name is no regular file, or a link that leads out of the checkpoint.
    """
    known, others = {}, []
    for path in sorted(directory.iterdir()):
        inner = path.is_dir() and not path.is_symlink() and any(map(KNOWN.fullmatch, _names(path, directory)))
        for name in _names(path, directory) if inner else [path.name]:
            if KNOWN.fullmatch(name):
                known[name] = regular_file(directory, name)
            else:
                others.append(name)
    return known, others


def _names(folder: Path, directory: Path) -> list[str]:
    return [path.relative_to(directory).as_posix() for path in sorted(folder.iterdir())]


def regular_file(directory: Path, name: str) -> Path:
    """The real path of one file. In a snapshot of the Hub's cache, files are links to blobs of the same repository.

    Raises:
        ValueError: it is not there, no regular file, or a link that leads elsewhere.
    """
    top = directory.resolve()
    places = [top, *([top.parents[1] / "blobs"] if top.parent.name == "snapshots" else [])]
    try:
        real = (directory / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # missing; links in a circle
        raise ValueError(f"cannot read {directory / name}: {error}; allowed: a file") from error
    if not any(real.is_relative_to(place) for place in places):
        raise ValueError(
            f"{directory / name} is a link out of the checkpoint; allowed: the file itself in its place"
        )
    if not real.is_file():
        raise ValueError(f"{directory / name} is no regular file; allowed: a file")
    return real


def read_config(directory: Path) -> dict[str, Any]:
    """config.json, whose values have the types that Transformers takes for granted, and numbers that can be built.

    Raises:
        ValueError: it cannot be read, or a value is not allowed; one line.
    """
    path = directory / "config.json"
    data = read_json(path)
    for key, value, allowed, good in (
        ("model_type", data.get("model_type"), "a string", lambda v: isinstance(v, str)),
        ("architectures", data.get("architectures"), "a list of strings", _is_list_of_strings),
        ("auto_map", data.get("auto_map"), "an object", lambda v: isinstance(v, dict)),
        ("hyperattn", data.get("hyperattn"), "an object", lambda v: isinstance(v, dict)),
    ):
        if value is not None and not good(value):
            raise ValueError(f"{path}: {key} is {short(value)}; allowed: {allowed}")
    for key, value in _items(data):
        numbers = [n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int)]
        if any(abs(n) >= 2**63 for n in numbers):
            raise ValueError(f"{path}: {key} is {short(value)}; allowed: numbers of 64 bits")
        for name, most in COUNTS:
            if name.fullmatch(key) and sum(numbers) > most:
                raise ValueError(f"{path}: {key} is {short(value)}; allowed: up to {most:,}")
    return data


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _items(data: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value of nested objects."""
    waiting = [data]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield from part.items()
        waiting += parts_of(part)


def without_code(data: Any) -> tuple[Any, list[str]]:
    """A copy of JSON data without the keys that name code, and those keys that were there."""
    if isinstance(data, list):
        parts = [without_code(part) for part in data]
        return [part for part, _ in parts], [key for _, keys in parts for key in keys]
    if not isinstance(data, dict):
        return data, []
    parts = {key: without_code(value) for key, value in data.items() if key not in CODE}
    named = [key for key in data if key in CODE] + [key for _, keys in parts.values() for key in keys]
    return {key: part for key, (part, _) in parts.items()}, sorted(named)


def check_weights(directory: Path, files: dict[str, Path]) -> None:
    """Every weight file is whole, and all that an index names are there.

    Raises:
        ValueError: they are not, or there are none.
    """
    weights = [name for name in files if name.endswith(".safetensors")]
    if not weights:
        raise ValueError(
            f"{directory} holds no weights; allowed: model.safetensors, as save_pretrained writes it"
        )
    for name in weights:
        try:
            with safe_open(files[name], "pt"):
                pass  # reads the header, and compares the size of the file
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{directory / name} is damaged: {error}; allowed: a whole safetensors file"
            ) from error
    for name in (name for name in files if name.endswith(".index.json")):
        shards = read_json(files[name]).get("weight_map")
        shards = shards.values() if isinstance(shards, dict) else ["weight_map"]
        if missing := [shard for shard in shards if shard not in weights]:
            raise ValueError(
                f"{directory / name} names {short(missing[0])}, which is not there; save it again"
            )
