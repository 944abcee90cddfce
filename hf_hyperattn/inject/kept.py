"""Measurements on disk: one folder per model, text and list of rules, one file per layer.

Files are written completely and then moved into place. An interrupted run therefore loses at most
the layer that was being measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor, nn

from ..integration.loading.checkpoint_files import errors_as
from ..integration.parallel.offloaded import is_offloaded, storage_of
from ..utils.files import read_json, write_atomically
from .rules import CandidateRule

#: Version of the file format. It is part of the fingerprint, so older files are not found.
FORMAT = 3
#: Number of values of each parameter that enter its fingerprint.
PIECES = 512
#: File that exists once all layers are measured.
WHOLE = "whole.json"
#: Fields of a model config that do not change what the model computes.
ELSEWHERE = ("_name_or_path", "transformers_version", "dtype", "use_cache")


def fingerprint(
    model: nn.Module, ids: Tensor, rules: Iterable[CandidateRule], **options: Any
) -> str:
    """Return 32 hexadecimal digits that identify a measurement.

    They change with the model, its config, the text, a rule or an option.

    Args:
        model: The model. The name, the shape and up to `PIECES` values of every parameter count,
            also of offloaded ones.
        ids: Token ids [N].
        rules: Candidate rules. As frozen dataclasses, their `repr` shows all fields.
        options: Further settings of the measurement, as JSON values.
    """
    settings = [FORMAT, options, [repr(rule) for rule in rules]]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(ids.cpu().numpy().tobytes())
    config: Any = getattr(model, "config", None)
    relevant = {}
    if config:
        relevant = {
            name: value for name, value in config.to_dict().items() if name not in ELSEWHERE
        }
    digest.update(json.dumps(relevant, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        values: Any = parameter
        if parameter.device.type == "meta":
            # The values of an offloaded parameter are in its module's storage.
            module = model.get_submodule(name.rpartition(".")[0])
            values = storage_of(module)[1].get(name) if is_offloaded(module) else None
        if values is not None:
            numbers = values.detach().flatten()
            # Evenly spaced values: hashing all of a large model would take longer than measuring.
            some = numbers[:: max(1, len(numbers) // PIECES)]
            digest.update(some.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class MeasurementFolder:
    """The measurements of one text on disk.

    Args:
        folder: Path of the folder. It is created when the first file is written.
    """

    folder: Path

    def layer_path(self, layer: str) -> Path:
        """Return the path of a layer's file."""
        return self.folder / f"{layer}.safetensors"

    def read_layer(self, layer: str) -> dict[str, Tensor] | None:
        """Return the tensors of a layer, or None if it was not measured.

        Raises:
            ValueError: The file is damaged. The message names it.
        """
        path = self.layer_path(layer)
        if not path.is_file():
            return None
        with errors_as(f"{path} is damaged, delete it to measure anew"):
            return load_file(path)

    def write_layer(self, layer: str, tensors: dict[str, Tensor]) -> None:
        """Write the tensors of a layer, completely or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # safetensors writes only contiguous tensors, and measurements may be transposed views.
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        write_atomically(self.layer_path(layer), data)

    def read_summary(self) -> dict[str, Any] | None:
        """Return the layers in model order and the loss of the text, as `write_summary` wrote them.

        Returns None if the measurement is not complete, for example because a file was deleted.
        """
        path = self.folder / WHOLE
        if not path.is_file():
            return None
        summary = read_json(path)
        if summary and all(self.layer_path(layer).is_file() for layer in summary["layers"]):
            return summary
        return None

    def write_summary(self, layers: list[str], loss: float) -> None:
        """Mark the measurement as complete."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / WHOLE, json.dumps({"layers": layers, "loss": loss}))
