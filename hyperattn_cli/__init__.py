"""The `hyperattn` command: parsers here, one module for each sub-command in `commands`.

This package imports only the standard library, so that `--help` needs no torch. A sub-command is
the function `run(args) -> int | None` of its module, which is imported when it is used.
"""

from .mechanisms import list_all_mechanisms, patch_names, read_mechanisms
from .options import COMMANDS, CONVERSIONS, MECHANISMS, WITHOUT_MODELS, build_parser
from .parser import Parser, suggest_nearest
from .run import LIGHT, main

__all__ = [
    "COMMANDS",
    "CONVERSIONS",
    "LIGHT",
    "MECHANISMS",
    "WITHOUT_MODELS",
    "Parser",
    "build_parser",
    "list_all_mechanisms",
    "main",
    "patch_names",
    "read_mechanisms",
    "suggest_nearest",
]
