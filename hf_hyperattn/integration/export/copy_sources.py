"""Copy modules of this package as flat files, the form in which Transformers loads remote code.

Transformers copies a modelling file, and finds the files that it imports (`from .name import`) by a
regular expression, all in one folder. So `hf_hyperattn.engines.score` becomes
`hyperattn_engines_score.py`, and every relative import is rewritten. The only other change is the
names of operators: an operator is registered for the whole process, and two exported checkpoints
must not use each other's.
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
#: The name of an operator in a source file: "hf_hyperattn::name".
OPERATOR = re.compile(rf'"{PACKAGE}::(\w+)"')
#: The replacement. Its namespace is a hash of the copied module's name, which differs between
#: repositories.
OWN_OPERATOR = (
    f'"{PACKAGE}_" + __import__("hashlib").sha256(__name__.encode()).hexdigest()[:12] + "::\\1"'
)


def flat_name(module: str) -> str:
    """Return the flat name: `hf_hyperattn.engines.score` -> `hyperattn_engines_score`."""
    return "_".join([PREFIX, *module.split(".")[1:]])


def flat_copies(roots: Iterable[str], header: str) -> dict[str, str]:
    """Return flat copies of modules, and of all modules of the package that they import.

    Args:
        roots: Full module names.
        header: Comment lines at the start of every file. `{path}` becomes the path of the original.

    Returns:
        The text of each file, by file name.

    Raises:
        ValueError: A module has no source file.
    """
    files: dict[str, str] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        file = f"{flat_name(module)}.py"
        if file in files:
            continue
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ValueError(f"{module} has no source that could be copied")
        is_package = spec.submodule_search_locations is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        text, imported = flatten_source(source, module, is_package)
        path = "/".join(module.split(".")) + ("/__init__.py" if is_package else ".py")
        files[file] = header.format(path=path) + text
        waiting += imported
    return dict(sorted(files.items()))


def flatten_source(source: str, module: str, is_package: bool) -> tuple[str, list[str]]:
    """Return a module's source with flat imports, and the modules that it imports."""
    lines = source.splitlines()
    imported: list[str] = []
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom) and n.level]
    # From the last import to the first, so that line numbers above stay valid.
    for node in sorted(nodes, key=lambda n: n.lineno, reverse=True):
        # One leading dot is the package of the module. Every further dot is one level up.
        above = module.split(".") if is_package else module.split(".")[:-1]
        package = ".".join([*above[: len(above) - node.level + 1], *filter(None, [node.module])])
        written = list(_rewrite_import(package, node.names, imported))
        lines[node.lineno - 1 : node.end_lineno] = [
            " " * node.col_offset + line for line in written
        ]
    return OPERATOR.sub(OWN_OPERATOR, "\n".join(lines) + "\n"), imported


def _rewrite_import(package: str, names: list[ast.alias], imported: list[str]) -> Iterator[str]:
    """Yield the lines that replace one relative import, and add its modules to `imported`."""
    plain = []
    for alias in names:
        if is_module(package, alias.name):
            imported.append(f"{package}.{alias.name}")
            known = alias.asname or alias.name
            # Transformers' regular expression needs `from .name import`, which cannot import the
            # module itself. So the module's name is imported, and the module looked up by it.
            yield f"from .{flat_name(imported[-1])} import __name__ as _{known}"
            yield f'{known} = __import__("sys").modules[_{known}]'
        else:
            plain.append(alias.name if alias.asname is None else f"{alias.name} as {alias.asname}")
    if plain:
        imported.append(package)
        yield f"from .{flat_name(package)} import {', '.join(plain)}"


def is_module(package: str, name: str) -> bool:
    """Return whether a name imported from a package is a module.

    A function may have the same name as the module that defines it. The attribute of the package
    then decides.
    """
    try:
        there = importlib.util.find_spec(f"{package}.{name}") is not None
    except ModuleNotFoundError:
        return False
    return there and isinstance(getattr(sys.modules[package], name, sys), ModuleType)
