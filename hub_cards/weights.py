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
    with open(path, "rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes; allowed: {LONGEST_HEADER}")
            return json.loads(file.read(length))
        except (struct.error, ValueError, RecursionError) as error:
            raise ValueError(f"hub_cards: {path} is no safetensors file: {error}") from None


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that a load of the directory reads; other weights may lie beside them."""
    adapter = (directory / "adapter_config.json").is_file()
    names = ("adapter_model.safetensors",) if adapter else ("model.safetensors", "model-*-of-*.safetensors")
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
