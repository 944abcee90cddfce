"""Copies of this package's modules as flat files, the form in which Transformers loads code from a repository.

Transformers copies a modelling file and, by a regular expression, the files that it imports as `from .name import`,
all in one folder. So `hf_hyperattn.engines.score` becomes `hyperattn_engines_score.py`, and every relative import is
written anew. Nothing else in a file changes, but for the names of operators: an operator belongs to the whole process,
and two exported checkpoints must not take each other's.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

PACKAGE = __name__.split(".")[0]
PREFIX = "hyperattn"
OPERATOR = re.compile(rf'"{PACKAGE}::(\w+)"')
#: The operator's name with a namespace made of the module's own name, which differs from repository to repository.
OWN_OPERATOR = (
    f'"{PACKAGE}_" + __import__("hashlib").sha256(__name__.encode()).hexdigest()[:12] + "::\\1"'
)


def flat_name(module: str) -> str:
    """`hf_hyperattn.engines.score` -> `hyperattn_engines_score`."""
    return "_".join([PREFIX, *module.split(".")[1:]])


def flat_copies(roots: Iterable[str], header: str) -> dict[str, str]:
    """Flat copies of the modules named and of all modules of the package that they import.

    Args:
        roots: full module names.
        header: comment lines to stand first in every file; `{path}` becomes the path of the original.

    Returns:
        File name -> text.
    """
    files: dict[str, str] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if f"{flat_name(module)}.py" not in files:
            spec = importlib.util.find_spec(module)
            if spec is None or spec.origin is None:
                raise ValueError(f"{module} has no source that could be copied")
            origin, is_package = Path(spec.origin), spec.submodule_search_locations is not None
            text, imported = flatten_source(origin.read_text(encoding="utf-8"), module, is_package)
            path = "/".join(module.split(".")) + ("/__init__.py" if is_package else ".py")
            files[f"{flat_name(module)}.py"] = header.format(path=path) + text
            waiting += imported
    return dict(sorted(files.items()))


def flatten_source(source: str, module: str, is_package: bool) -> tuple[str, list[str]]:
    """A module's source with flat imports, and the modules that it imports."""
    lines, imported = source.splitlines(), list[str]()
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom) and n.level]
    for node in sorted(nodes, key=lambda n: n.lineno, reverse=True):
        above = module.split(".") if is_package else module.split(".")[:-1]
        package = ".".join([*above[: len(above) - node.level + 1], *filter(None, [node.module])])
        written = list(_rewrite_import(package, node.names, imported))
        lines[node.lineno - 1 : node.end_lineno] = [
            " " * node.col_offset + line for line in written
        ]
    return OPERATOR.sub(OWN_OPERATOR, "\n".join(lines) + "\n"), imported


def _rewrite_import(package: str, names: list[ast.alias], imported: list[str]) -> Iterator[str]:
    """The lines that take the place of one relative import."""
    plain = []
    for alias in names:
        if is_module(package, alias.name):
            imported.append(f"{package}.{alias.name}")
            known = alias.asname or alias.name
            yield f"from .{flat_name(imported[-1])} import __name__ as _{known}"
            yield f'{known} = __import__("sys").modules[_{known}]'
        else:
            plain.append(alias.name if alias.asname is None else f"{alias.name} as {alias.asname}")
    if plain:
        imported.append(package)
        yield f"from .{flat_name(package)} import {', '.join(plain)}"


def is_module(package: str, name: str) -> bool:
    """Whether a name that is imported from a package is a module: a function may have the name of the one it is in."""
    try:
        there = importlib.util.find_spec(f"{package}.{name}") is not None
    except ModuleNotFoundError:
        return False
    return there and isinstance(getattr(sys.modules[package], name, sys), ModuleType)
