"""The argument parser of `hyperattn`: one-line errors that name the allowed input."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

#: Longer error messages are cut: an argument may hold a whole file.
MAX_ERROR_LENGTH = 1000
#: Patterns of argparse's messages, each with the message that replaces it.
REWRITTEN_ERRORS = (
    (
        r"argument (\S+): invalid int value: (.*)",
        r"\1 \2 is no whole number; allowed: digits, such as \1 1024",
    ),
    (r"argument (\S+): invalid float value: (.*)", r"\1 \2 is no number; allowed: such as \1 0.02"),
    (r"argument (\S+): expected one argument", r"\1 needs a value; allowed: \1 VALUE"),
    (r"argument (\S+): expected at least one argument", r"\1 needs a value; allowed: \1 VALUE ..."),
    (
        r"argument (\S+): ignored explicit argument (.*)",
        r"\1 takes no value, and got \2; allowed: \1 by itself",
    ),
    (r"the following arguments are required: (.*)", r"\1 is missing; add it"),
    (r"argument ([^ :]+): (.*)", r"\1: \2"),
)


class Parser(argparse.ArgumentParser):
    """An argparse parser with one-line errors that name the allowed input.

    Unlike argparse, it rejects an option that is given twice.
    """

    words: Sequence[str] = ()
    given: set[argparse.Action] = set()

    def error(self, message: str):
        # argparse wraps some messages; an error is always one line.
        message = " ".join(message.split())
        # A misspelt option is the more likely cause than a missing one, so report it first.
        if message.startswith("the following arguments are required"):
            self._check_options(
                [word for word in self.words if not self._is_option(word.partition("=")[0])]
            )
        for pattern, words in REWRITTEN_ERRORS:
            if re.fullmatch(pattern, message):
                message = re.sub(pattern, words, message)
                break
        # Control characters in an argument must not reach the terminal.
        message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
        if len(message) > MAX_ERROR_LENGTH:
            message = f"{message[: MAX_ERROR_LENGTH - 3]}..."
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args=None, namespace=None):
        """Parse as argparse does, but let the sub-command report unknown arguments."""
        self.words = sys.argv[1:] if args is None else list(args)
        self.given = set()
        known, unknown = super().parse_known_args(args, namespace)
        self._check_options(unknown)
        if unknown:
            self.error(
                f"{unknown[0]!r} is one argument too many; leave it out, or quote what holds spaces"
            )
        return known, unknown

    def _is_option(self, word: str) -> bool:
        return any(option.startswith(word) for option in self._option_string_actions)

    def _check_options(self, unknown: Sequence[str]) -> None:
        """Report the first unknown word that looks like an option."""
        options = (word for word in unknown if word.startswith("-") and len(word) > 1)
        for option in options:
            word = option.partition("=")[0]
            hint = suggest_nearest(word, self._option_string_actions)
            self.error(f"no option {word!r}; leave it out{hint}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Read the values of an option; report an option that is given twice."""
        # argparse would silently keep the last value. Options that append may be repeated.
        may_repeat = not action.option_strings or isinstance(action, argparse._AppendAction)
        if action in self.given and not may_repeat:
            behind = ", with all files behind it" if action.nargs == "+" else ""
            self.error(f"{action.option_strings[-1]} is given twice; allowed: once{behind}")
        self.given.add(action)
        return super()._get_values(action, arg_strings)  # type: ignore[misc]

    def _check_value(self, action: argparse.Action, value: Any):
        if action.choices is not None and value not in action.choices:
            kind = str(action.metavar or action.dest or "value").lower()
            allowed = ", ".join(action.choices)
            hint = suggest_nearest(value, action.choices)
            self.error(f"no {kind} {value!r}; allowed: {allowed}{hint}")


def suggest_nearest(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean ...?" if one of the words is similar, else ""."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
