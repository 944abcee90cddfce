"""Run one command line: parse it, import the sub-command's module, report errors."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from .mechanisms import IMPORTED, import_modules
from .options import COMMANDS, WITHOUT_MODELS, build_parser
from .parser import MAX_ERROR_LENGTH
from .values import check_counts

#: Sub-commands whose modules import only the standard library, so that they start without torch.
LIGHT = ("completion", "list")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 2 for bad input, or 130 after an interrupt."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its escape code instead of an error.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        build_parser().print_help()
        return 0
    IMPORTED.clear()
    # Import before parsing: the other options may name a mechanism that a module registers.
    try:
        import_modules(find_imports(words))
    except ValueError as error:
        if "--traceback" in words:
            raise
        print(f"hyperattn {words[0]}: error: {format_error(error)}", file=sys.stderr)
        return 2
    args = build_parser().parse_args(words)
    args.argv = words
    try:
        check_counts(args)
        return load_command_module(args.command).run(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader closed the pipe (`hyperattn ... | head`). Python would fail again when it
        # flushes stdout at exit, so send the rest to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.traceback:
            raise
        print(f"hyperattn {args.command}: error: {format_error(error)}", file=sys.stderr)
        return 2


def load_command_module(command: str) -> ModuleType | Any:
    """Load the module whose `run` executes a sub-command."""
    return importlib.import_module(f"hyperattn_cli.commands.{command}")


def find_imports(words: Sequence[str]) -> list[str]:
    """Return the values of --import, without parsing the other options."""
    if words[0] not in COMMANDS or words[0] in WITHOUT_MODELS:
        return []
    after = [value for word, value in zip(words, words[1:]) if word == "--import"]
    return [*after, *(word.partition("=")[2] for word in words if word.startswith("--import="))]


def format_error(error: BaseException) -> str:
    """Return an exception as one printable line."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    # ValueError and OSError report bad input. Any other type is a bug, so name it and the next
    # step.
    if not text or not isinstance(error, (ValueError, OSError)):
        kind = type(error).__name__
        text = f"{kind}: {text}" if text else kind
        text += "; --traceback shows where"
    return text if len(text) <= MAX_ERROR_LENGTH else f"{text[: MAX_ERROR_LENGTH - 3]}..."
