"""The mechanisms that options may name, known without importing torch.

They come from mechanisms.json. Modules of --import are imported here and add theirs.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: Entries of `hyperattn list` for mechanisms that --import registered, by name.
IMPORTED: dict[str, dict[str, Any]] = {}


@functools.cache
def read_mechanisms() -> dict[str, dict[str, Any]]:
    """Return the entries of `hyperattn list` by mechanism.

    They come from a JSON file, so that no torch is needed; a test compares it with the registry.
    """
    return json.loads(Path(__file__).with_name("mechanisms.json").read_text(encoding="utf-8"))


def list_all_mechanisms() -> dict[str, dict[str, Any]]:
    """Return the entries of the package's mechanisms and of imported ones."""
    return read_mechanisms() | IMPORTED


def patch_names() -> list[str]:
    """Return the values of --mechanism: mechanisms that patch, and attention names."""
    known = list_all_mechanisms()
    names = [name for name, about in known.items() if "patch_model" in about["how"]]
    attention_names = [name for about in known.values() for name in about["names"]]
    # A dict removes duplicates and keeps the order.
    return list(dict.fromkeys([*names, *attention_names]))


def describe_mechanism(mechanism: Any) -> dict[str, Any]:
    """Return the `hyperattn list` entry of an imported mechanism."""
    config = mechanism.config
    line = (config.__doc__ or "").strip().partition("\n")[0].rstrip(".") or "its module says"
    return {
        "group": "own",
        "summary": line,
        "title": line,
        "use_to": line,
        "at_start": ['mode="blend" (default): same output as the original model'],
        "time": "not measured",
        "stage": mechanism.stage,
        "how": ["patch_model"],
        "names": list(mechanism.names),
        "config": config.__name__,
        "defaults": {key: value for key, value in config().to_dict().items() if key != "mechanism"},
        "paper": mechanism.paper,
    }


def import_modules(names: Iterable[str]) -> None:
    """Import modules or .py files, and note the mechanisms that they register.

    A file is imported under its own name: a checkpoint records the module that defined a score.

    Args:
        names: Names of modules (the current folder is searched first) or paths of .py files.

    Raises:
        ValueError: A module is missing, or raises an error during import.
    """
    names = list(names)
    if not names:
        return
    registry: Any = importlib.import_module("hf_hyperattn.registry")
    importlib.import_module("hf_hyperattn")
    for name in names:
        before = set(registry.MECHANISMS)
        module = import_module(name)
        for key, mechanism in registry.MECHANISMS.items():
            # A module that was imported before registers nothing now, but its mechanisms still
            # count.
            if key not in before or mechanism.config.__module__ == module:
                IMPORTED[key] = describe_mechanism(mechanism)


def import_module(name: str) -> str:
    """Import one value of --import and return the name of the module.

    Raises:
        ValueError: The module is missing, raises an error, or another module has its name.
    """
    folder, module = locate_module(name)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        # An import inside the module may fail too; only the module itself is "not there".
        if isinstance(error, ModuleNotFoundError) and module.startswith(f"{error.name}"):
            allowed = "a .py file, or a module that Python finds from this folder"
            raise ValueError(
                f"--import {name}: no module of this name; allowed: {allowed}"
            ) from error
        raise ValueError(f"--import {name} failed: {type(error).__name__}: {error}") from error
    file = getattr(imported, "__file__", None)
    if name.endswith(".py") and (file is None or not os.path.samefile(file, name)):
        raise ValueError(
            f"--import {name}: Python knows another module {module!r} ({file or 'built in'}); rename the file"
        )
    return module


def locate_module(name: str) -> tuple[str, str]:
    """Return the folder to search and the module name for a value of --import.

    Raises:
        ValueError: The file does not exist, or the name is no module name.
    """
    folder, module = os.getcwd(), name
    if name.endswith(".py"):
        path = Path(name).resolve()
        if not path.is_file():
            raise ValueError(
                f"--import {name}: no such file; allowed: a .py file, or a module's name"
            )
        folder, module = str(path.parent), path.stem
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module):
        raise ValueError(
            f"--import {name}: no module's name; allowed: such as my_scores, or my_scores.py"
        )
    return folder, module
