"""Measurements on disk: a folder for each model, text and list of rules, in it a file for each layer.

A file is written beside its place and moved there when it is whole, so that an interrupted measurement loses no more
than the layer that it was at.
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

from ..files import read_json, write_atomically
from ..integration.checkpoint_files import errors_as
from ..integration.offloaded import is_offloaded, storage_of
from .rules import CandidateRule

FORMAT = 3  # of the files
PIECES = 512  # numbers of a parameter that its fingerprint is made of
WHOLE = "whole.json"  # is there once all layers are
#: Of a config, what says nothing of what the model computes.
ELSEWHERE = ("_name_or_path", "transformers_version", "dtype", "use_cache")


def fingerprint(
    model: nn.Module, ids: Tensor, rules: Iterable[CandidateRule], **options: Any
) -> str:
    """32 hexadecimal digits that differ where the model, its config, the text, a rule or an option does.

    Of every parameter the name, the shape and up to `PIECES` numbers count, also where it is offloaded.

    Args:
        ids: token ids [N]. rules: frozen dataclasses. options: of the measurement, plain values.
    """
    digest = hashlib.sha256(
        json.dumps([FORMAT, options, [repr(rule) for rule in rules]], sort_keys=True).encode()
    )
    digest.update(ids.cpu().numpy().tobytes())
    of_model: Any = getattr(model, "config", None)
    config = (
        {name: value for name, value in of_model.to_dict().items() if name not in ELSEWHERE}
        if of_model
        else {}
    )
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        values: Any = parameter
        if parameter.device.type == "meta":
            module = model.get_submodule(name.rpartition(".")[0])
            values = storage_of(module)[1].get(name) if is_offloaded(module) else None
        if values is not None:
            numbers = values.detach().flatten()
            some = numbers[:: max(1, len(numbers) // PIECES)]
            digest.update(some.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Kept:
    """What was measured of one text, on disk.

    Args:
        folder: made where it is not there.
    """

    folder: Path

    def file(self, layer: str) -> Path:
        return self.folder / f"{layer}.safetensors"

    def read(self, layer: str) -> dict[str, Tensor] | None:
        """The tensors of a layer; None where it was not measured. A damaged file is an error that names it."""
        if not self.file(layer).is_file():
            return None
        with errors_as(f"{self.file(layer)} is damaged, delete it to measure anew"):
            return load_file(self.file(layer))

    def write(self, layer: str, tensors: dict[str, Tensor]) -> None:
        """Keep the tensors of a layer, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(
            self.file(layer), save({name: tensor.contiguous() for name, tensor in tensors.items()})
        )

    def whole(self) -> dict[str, Any] | None:
        """What `finish` wrote: the layers in their order, and the loss of the text; None where layers are missing."""
        whole = read_json(self.folder / WHOLE) if (self.folder / WHOLE).is_file() else None
        return (
            whole
            if whole and all(self.file(layer).is_file() for layer in whole["layers"])
            else None
        )

    def finish(self, layers: list[str], loss: float) -> None:
        """Say that all layers are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / WHOLE, json.dumps({"layers": layers, "loss": loss}))
