"""Counting parameters from the headers of safetensors files, without torch and without reading a tensor."""

import json
import math
import struct
from pathlib import Path

LONGEST_HEADER = 100 * 2**20


def read_header(path: Path) -> dict:
    """The JSON header of a safetensors file: 8 bytes of length (little endian), then as many of JSON."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > LONGEST_HEADER:
            raise ValueError(f"hub_cards: {path} has a header of {length} bytes; allowed: {LONGEST_HEADER}")
        return json.loads(file.read(length))


def count_parameters(directory) -> tuple[int, int]:
    """(parameters of our own, all parameters) in a directory's safetensors files; (0, 0) without any.

    Ours are those under a module called ``hyper``, the one child a patched attention module gets.
    """
    added = total = 0
    for path in sorted(Path(directory).glob("*.safetensors")):
        for name, tensor in read_header(path).items():
            if name != "__metadata__":
                count = math.prod(tensor["shape"])
                total += count
                added += count if "hyper" in name.split(".") else 0
    return added, total
