"""What an object that is being published says about itself; read by name, without importing its classes."""

import contextlib
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from .directory import hub_id_or_none

#: In the names of parameters that a PEFT adapter has copies of.
BASE = re.compile(r"\b(original_module|base_layer)\.")
PACKAGES = ("hf-hyperattn", "transformers", "torch", "peft")


def installed() -> dict[str, str]:
    """Versions of the packages that wrote what is published, as far as they are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def gate_range(model) -> tuple[float, float] | None:
    """Smallest and largest blend gate of a patched model; None where there is none, or an offloaded one."""
    gates = [
        parameter.detach()
        for name, parameter in model.named_parameters()
        if name.endswith("gate") and "hyper" in name.split(".") and not BASE.search(name)
    ]
    if not gates or any(gate.device.type == "meta" for gate in gates):
        return None
    return min(gate.min().item() for gate in gates), max(gate.max().item() for gate in gates)


def patched_facts(published: Any) -> dict | None:
    """Facts for the card of a patched model, a PEFT model around one or a ``HyperAttnConfig``; else None."""
    if hasattr(published, "mechanisms") and hasattr(published, "to_dict"):
        return {"config": published.to_dict(), "versions": installed()}
    config = getattr(published, "config", None)
    spec = (
        config.get("hyperattn")
        if isinstance(config, Mapping)
        else getattr(config, "hyperattn", None)
    )
    if not isinstance(spec, Mapping) or spec.get("hosts") is None:
        return None  # without hosts it only holds parameters of a mechanism used by name
    adapters = getattr(published, "peft_config", None) or {}
    names = [getattr(adapter, "base_model_name_or_path", None) for adapter in adapters.values()]
    names.append(getattr(config, "_name_or_path", None))
    base = next((name for name in names if hub_id_or_none(name)), None)
    return {
        "config": spec,
        "base_model": base,
        "versions": installed(),
        "gates": gate_range(published),
    }
