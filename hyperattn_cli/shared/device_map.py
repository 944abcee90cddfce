"""`--device-map`, `--device` and `--dtype`: load and save models on one device or on several.

Weights may be on GPUs, in CPU memory or on disk, so they are saved without being in one place.
"""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .models import device_of

#: Names of maps that Accelerate computes from the free memory of the devices.
NAMES = ("auto", "balanced", "balanced_low_0", "sequential")
SHARD = "5GB"  # size of a weight file, which is in memory while it is written


def read_device_map(value: str | None) -> str | dict[str, int | str] | None:
    """Read the value of `--device-map`.

    Args:
        value: One of `NAMES`, or a JSON file with an object that maps module names to a GPU number,
            "cpu" or "disk". None means no map.

    Raises:
        ValueError: It is neither; the message is one line.
    """
    if value is None or value in NAMES:
        return value
    allowed = (
        f'allowed: {", ".join(NAMES)}, or a JSON file such as {{"model": "disk", "lm_head": "cpu"}}'
    )
    try:
        places = json.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--device-map {value!r}: {type(error).__name__}; {allowed}") from error
    if not isinstance(places, dict) or not all(
        # `type` instead of `isinstance`: True and False are ints, but no GPU numbers.
        type(place) in (int, str)
        for place in places.values()
    ):
        raise ValueError(f"--device-map {value!r}: not an object of modules and devices; {allowed}")
    return places


def load_model(cls: Any, args: argparse.Namespace) -> Any:
    """Load the model of `args.model` as `device_map`, `device` and `dtype` of the command line say.

    Args:
        cls: Class with `from_pretrained`.
        args: The command line. A `dtype` of None means float32, "auto" that of the checkpoint.
    """
    places = read_device_map(args.device_map)
    options: dict[str, Any] = {}
    if places is not None:
        # Accelerate writes weights here if it cannot read them directly from the checkpoint.
        folder = tempfile.mkdtemp(prefix="hyperattn-")
        # Offloaded weights are read from this folder until the process ends.
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        options = {"device_map": places, "offload_folder": folder}
    model = cls.from_pretrained(args.model, dtype=args.dtype or "float32", **options).eval()
    return model if places is not None else model.to(device_of(args.device))


def save_model(model: Any, dtype: torch.dtype, folder: Path) -> None:
    """Save a model in `dtype`; a spread model is cast file by file.

    A model in 16 bits is saved in its own dtype: another one would not bring rounded digits back.
    """
    if model.dtype != torch.float32:
        dtype = model.dtype
    if getattr(model, "hf_device_map", None) is None:
        model.to(dtype).save_pretrained(folder)
        return
    with warnings.catch_warnings():
        # The warning assumes shards of 50 GB, which `SHARD` avoids.
        warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
        model.save_pretrained(folder, max_shard_size=SHARD)
    if dtype != model.dtype:
        cast_files(folder, dtype)


def cast_files(folder: Path, dtype: torch.dtype) -> None:
    """Cast the floating-point tensors of a checkpoint to `dtype`, file by file."""
    size = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as old:
            metadata = old.metadata()
            tensors = {name: cast_tensor(old.get_tensor(name), dtype) for name in old.keys()}
        size += sum(tensor.nbytes for tensor in tensors.values())
        # Write a new file and rename it: tensors still map the old file.
        save_file(tensors, file.with_suffix(".cast"), metadata)
        file.with_suffix(".cast").replace(file)
    # The index of shards records the total size.
    for index in folder.glob("*.safetensors.index.json"):
        content = json.loads(index.read_text())
        content["metadata"]["total_size"] = size
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    # `from_pretrained` with dtype="auto" reads the dtype here.
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def cast_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy in `dtype`; integers keep their dtype."""
    return tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
