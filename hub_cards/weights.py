"""Counting parameters from the headers of safetensors files, without torch and without reading a tensor."""

import json
import math
import struct
from pathlib import Path

LONGEST_HEADER = 100 * 2**20


def read_header(path: Path) -> dict:
    """The JSON header of a safetensors file: 8 bytes of length (little endian), then as many of JSON.

    Raises:
        ValueError: the file is no safetensors file.
    """
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes; allowed: {LONGEST_HEADER}")
            text = file.read(length)
        if len(text) < length:
            raise ValueError(f"its header has {length} bytes, and {len(text)} are there")
        header = json.loads(text)
        check_header(header)
    except (struct.error, ValueError, RecursionError, OSError) as error:
        why = "its header is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"hub_cards: {path} is no safetensors file: {why}") from None
    return header


def check_header(header: object) -> None:
    """Raise ValueError for a header that is no object of tensors, each with its shape."""
    if not isinstance(header, dict):
        raise ValueError(f"its header is a {type(header).__name__}; allowed: an object of tensors")
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        shape = tensor.get("shape") if isinstance(tensor, dict) else None
        if not isinstance(shape, list) or not all(
            type(size) is int and 0 <= size < 2**63 for size in shape
        ):
            raise ValueError(
                f"its header says nothing of the shape of {name[:80]!r}; allowed: a list of counts"
            )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that a load of the directory reads; other weights may lie beside them."""
    adapter = (directory / "adapter_config.json").is_file()
    names = (
        ("adapter_model.safetensors",)
        if adapter
        else ("model.safetensors", "model-*-of-*.safetensors")
    )
    found = (sorted(directory.glob(name)) for name in (*names, "*.safetensors"))
    return next(filter(None, found), [])


def count_parameters(directory) -> tuple[int, int]:
    """(parameters of our own, all parameters) in the weights of a directory; (0, 0) without any.

    Ours are those under a module called ``hyper``, the one child a patched attention module gets.
    """
    added = total = 0
    for path in weight_files(Path(directory)):
        for name, tensor in read_header(path).items():
            if name != "__metadata__":
                count = math.prod(tensor["shape"])
                total += count
                added += count if "hyper" in name.split(".") else 0
    return added, total
