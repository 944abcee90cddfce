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
COMMANDS = ("autoload", "demo", "describe", "export", "inject", "recover")


#: Characters of an error, and the largest count that an option may name.
LONGEST, MOST = 1000, 10**9


class Parser(argparse.ArgumentParser):
    """argparse, with errors of a single line."""

    def error(self, message: str):
        message = " ".join(message.split())
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
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`hyperattn ... | head`); nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.traceback:
            raise
        print(f"hyperattn {args.command}: error: {one_line(error)}", file=sys.stderr)
        return 2


def check_count(option: str, value: int, least: int) -> None:
    """Raise ValueError where the value of a numeric option is below `least`, or larger than anything can be."""
    if not least <= value <= MOST:
        bound = f"{least} or more" if value < least else f"up to {MOST:,}"
        raise ValueError(f"--{option} {value} is not allowed; allowed: {bound}")


def one_line(error: BaseException) -> str:
    """What an exception says, as one printable line; with its type where that is none of those for bad input."""
    text, kind = str(error), type(error).__name__
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    if not text or not isinstance(error, (ValueError, OSError)):
        text = f"{kind}: {text}; --traceback shows where" if text else f"{kind}; --traceback shows where"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _version() -> str:
    try:
        return version("hf-hyperattn")
    except PackageNotFoundError:
        return "(not installed)"
