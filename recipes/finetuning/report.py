"""The results of a run: one JSON file, with all that is needed to doubt them."""

from __future__ import annotations

import json
import os
import platform
import re
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

import hf_hyperattn
from hf_hyperattn.utils.files import write_atomically

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "evaluate",
    "safetensors",
    "numpy",
)
#: What a person wants to know of both measurements, and how it is called.
MEASURED = {
    "perplexity": "held-out perplexity",
    "next_token_accuracy": "next-token accuracy",
    "accuracy": "held-out accuracy",
}
#: A point of a curve, which JSON with indents would stretch over four lines.
PAIR = re.compile(r"\[\s+([-+.\deE]+),\s+([-+.\deE]+|null)\s+\]")


def versions() -> dict[str, str]:
    """Of Python, this package and those it stands on."""
    found = {"python": platform.python_version(), "hf-hyperattn": hf_hyperattn.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict:
    """What it ran on, without names."""
    cuda = torch.cuda.is_available()
    return {
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if cuda else None,
        "load_at_start": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }


def circumstances() -> dict:
    """When, where and with what a run is done; asked for at its start."""
    return {"date": date.today().isoformat(), "machine": machine(), "versions": versions()}


def write(path: Path, results: dict) -> None:
    """Write the results whole or not at all; numbers that JSON does not have become null."""
    text = json.dumps(finite(results), indent=1, allow_nan=False)
    write_atomically(path, PAIR.sub(r"[\1, \2]", text) + "\n")


def finite(value):
    """The same with null for nan and infinity."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and value - value != 0 else value


def summary(results: dict) -> str:
    """What a person wants to know at the end."""
    before, after, seconds = results["before"], results["after"], results["seconds"]
    parameters, gates = results["parameters"], results["gates"]
    lines = [
        *(
            f"{label:21}{before[name]:.4f} -> {after[name]:.4f}"
            for name, label in MEASURED.items()
            if name in after
        ),
        f"trained              {parameters['trained']:,} of {parameters['all']:,} parameters "
        f"({parameters['added']:,} added by the patch)",
    ]
    if gates:
        lines.append(f"gates                {gates['lowest']:+.4f} to {gates['highest']:+.4f}")
    lines.append(
        f"time                 {seconds['train']:.0f} s of training, {seconds['total']:.0f} s in all"
    )
    return "\n".join(lines)
