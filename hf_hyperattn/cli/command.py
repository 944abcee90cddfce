"""The parser of `hyperattn`, and what becomes of errors: one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

#: Modules of this package, one a sub-command. Each has HELP, `add_arguments(parser)` and `run(args) -> int |
#: None`, and imports what is slow inside `run`. The sub-command is the module's name with "-" for "_".
COMMANDS = ("demo", "describe", "export", "inject", "recover")


class Parser(argparse.ArgumentParser):
    """argparse, with errors of a single line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser with every sub-command of `COMMANDS`."""
    parser = Parser(prog="hyperattn", description="Hierarchy-aware attention for Transformers models.")
    parser.add_argument("--version", action="version", version=f"hyperattn {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"{__package__}.{name}")
        command = commands.add_parser(
            name.replace("_", "-"),
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for an error of input, 130 when interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character gets its code, not an error
            stream.reconfigure(errors="backslashreplace")
    args = build_parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`hyperattn ... | head`); nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        if args.traceback:
            raise
        print(f"hyperattn {args.command}: error: {one_line(error)}", file=sys.stderr)
        return 2


def one_line(error: BaseException) -> str:
    """What an exception says, without line breaks; its type where it says nothing."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _version() -> str:
    try:
        return version("hf-hyperattn")
    except PackageNotFoundError:
        return "(not installed)"
