"""`--device-map`: models whose weights lie on several devices, in memory and on the disk, loaded and written."""

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

#: Maps that Accelerate makes from what the devices hold.
NAMES = ("auto", "balanced", "balanced_low_0", "sequential")
SHARD = "5GB"  # a file of weights, which is held in memory while it is written


def read_device_map(value: str | None) -> str | dict[str, int | str] | None:
    """The map that `--device-map` names.

    Args:
        value: one of `NAMES`, or a JSON file with an object: names of modules to the number of a GPU, "cpu" or "disk".

    Raises:
        ValueError: it is neither; the message is one line.
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
        type(place) in (int, str) for place in places.values()
    ):
        raise ValueError(f"--device-map {value!r}: not an object of modules and devices; {allowed}")
    return places


def load(cls: Any, args: argparse.Namespace) -> Any:
    """The model of `args.model` in float32, spread as `args.device_map` says; `cls` has `from_pretrained`."""
    places = read_device_map(args.device_map)
    options: dict[str, Any] = {}
    if places is not None:
        folder = tempfile.mkdtemp(
            prefix="hyperattn-"
        )  # for weights that the checkpoint holds in another form
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        options = {"device_map": places, "offload_folder": folder}
    return cls.from_pretrained(args.model, dtype=torch.float32, **options).eval()


def save(model: Any, dtype: torch.dtype, folder: Path) -> None:
    """Save a model in `dtype`; one that is spread file by file, as its weights are never in one place."""
    if getattr(model, "hf_device_map", None) is None:
        model.to(dtype).save_pretrained(folder)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Attempting to save a model with offloaded modules"
        )  # it speaks of 50 GB
        model.save_pretrained(folder, max_shard_size=SHARD)
    if dtype != torch.float32:
        cast_files(folder, dtype)


def cast_files(folder: Path, dtype: torch.dtype) -> None:
    """Bring the floating-point tensors of a checkpoint to `dtype`, a file at a time."""
    size = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as old:
            metadata, tensors = (
                old.metadata(),
                {name: cast(old.get_tensor(name), dtype) for name in old.keys()},
            )
        size += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, file.with_suffix(".cast"), metadata)
        file.with_suffix(".cast").replace(file)
    for index in folder.glob("*.safetensors.index.json"):
        content = json.loads(index.read_text())
        content["metadata"]["total_size"] = size
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in `dtype`; whole numbers keep theirs."""
    return tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
