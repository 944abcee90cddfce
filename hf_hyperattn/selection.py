"""Some out of many, by number, range, name or function: how `layers` and `heads` are selected."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .fields import refuse, short

Choice = None | str | int | Iterable[int] | Callable[[Any], bool]

#: Entries of any list in a config.
MOST = 10_000
FRACTIONS = {"half": 2, "third": 3, "quarter": 4}
NAMED = re.compile(
    r"(?:(first|last)-(half|third|quarter|[1-9]\d{0,5})|every-([1-9]\d{0,5})(?:st|nd|rd|th)|all)"
)
ALLOWED = (
    "numbers from 0 (negative ones count from the end) as a list or range, 'all', 'first-half', 'last-third', "
    "'last-4', 'every-2nd', or a function"
)


def checked(name: str, choice: Any) -> Any:
    """The selection in plain form: None, a name, a tuple of numbers, or a function.

    Raises:
        ValueError: it is none of these; the message has the name of the argument and what is allowed.
    """
    if choice is None or callable(choice):
        return choice
    if isinstance(choice, str):
        if len(choice) < 40 and NAMED.fullmatch(choice):
            return choice
        refuse(name, choice, ALLOWED)
    try:
        many = [choice] if isinstance(choice, int) else choice
        if len(many) > MOST:
            raise ValueError(f"{name} has {len(many)} numbers; allowed: at most {MOST}")
        numbers = tuple(operator.index(n) for n in many if not isinstance(n, bool))
    except TypeError:
        numbers = None
    if numbers is None or len(numbers) < len(many):
        refuse(name, choice, ALLOWED)
    return numbers


def numbers(there: list[int], choice: str | tuple[int, ...]) -> list[int]:
    """The numbers that a checked selection means, `there` being those there are, in order; some may be missing."""
    if not isinstance(choice, str):
        return [there[n] if n < 0 and -n <= len(there) else n for n in choice]
    match = NAMED.fullmatch(choice)
    end, size, step = match.groups() if match else (None, None, None)
    if step is not None:
        return there[int(step) - 1 :: int(step)]
    if end is None:
        return there
    count = math.ceil(len(there) / FRACTIONS[size]) if size in FRACTIONS else int(size or 0)
    return there[:count] if end == "first" else there[max(0, len(there) - count) :]


def head_numbers(heads: Any, count: int, host: str) -> tuple[int, ...] | None:
    """The heads out of `count` that a checked selection means, in order; None for all.

    Raises:
        ValueError: the host has no such head, or none is selected.
    """
    if heads is None:
        return None
    there = list(range(count))
    selected = [n for n in there if heads(n)] if callable(heads) else numbers(there, heads)
    missing = [n for n in selected if n not in there]
    if missing or not selected:
        what = f"names head {short(missing[0])}" if missing else "names no head"
        shown = "a function" if callable(heads) else short(heads)
        raise ValueError(
            f"heads={shown} {what}; {host} has {count}; allowed: 0 to {count - 1}, or {ALLOWED}"
        )
    return tuple(sorted(set(selected)))


def select_layers(hosts: Sequence[tuple[str, Any]], layers: Any) -> list[bool]:
    """For each (stack, `Host`), whether `layers` means it. Numbers and names count within each stack of the model.

    Raises:
        ValueError: `layers` is of no allowed form, or names a layer that no stack has.
    """
    layers = checked("layers", layers)
    if layers is None:
        return [True] * len(hosts)
    if callable(layers):
        return [bool(layers(host)) for _, host in hosts]
    stacks: dict[str, list[int]] = {}
    for stack, host in sorted(hosts, key=lambda pair: pair[1].layer_index):
        if host.layer_index not in stacks.setdefault(stack, []):
            stacks[stack].append(host.layer_index)
    for layer in () if isinstance(layers, str) else layers:
        if all(
            number not in there for there in stacks.values() for number in numbers(there, (layer,))
        ):
            present = [n for there in stacks.values() for n in there]
            raise ValueError(
                f"layers names layer {short(layer)}, which the model does not have; allowed: {min(present)} to "
                f"{max(present)}, or {ALLOWED}"
            )
    selected = {stack: set(numbers(there, layers)) for stack, there in stacks.items()}
    return [host.layer_index in selected[stack] for stack, host in hosts]
