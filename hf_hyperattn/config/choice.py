"""The arguments `layers` and `heads`: by number, range, name or function.

`normalize_choice` checks such an argument. `select_layers` and `select_heads` apply it to a model.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..utils.text import short
from .fields import refuse

Choice = None | str | int | Iterable[int] | Callable[[Any], bool]

#: Largest number of entries of a list in a config.
MOST = 10_000
FRACTIONS = {"half": 2, "third": 3, "quarter": 4}
NAMED = re.compile(
    r"(?:(first|last)-(half|third|quarter|[1-9]\d{0,5})|every-([1-9]\d{0,5})(?:st|nd|rd|th)|all)"
)
ALLOWED = (
    "numbers from 0 (negative ones count from the end) as a list or range, 'all', 'first-half', 'last-third', "
    "'last-4', 'every-2nd', or a function"
)


def normalize_choice(name: str, choice: Any) -> Any:
    """Return a selection as None, a name, a tuple of numbers, or a function.

    Args:
        name: Of the argument, for the error.
        choice: The argument.

    Raises:
        ValueError: The selection is none of these.
    """
    if choice is None or callable(choice):
        return choice
    if isinstance(choice, str):
        # A config may come from anywhere: long strings are rejected before the regular expression
        # runs.
        if len(choice) < 40 and NAMED.fullmatch(choice):
            return choice
        refuse(name, choice, ALLOWED)
    try:
        many = [choice] if isinstance(choice, int) else choice
        if len(many) > MOST:
            raise ValueError(f"{name} has {len(many)} numbers; allowed: at most {MOST}")
        # `operator.index` takes integers of numpy and torch, but no floats.
        numbers = tuple(operator.index(n) for n in many if not isinstance(n, bool))
    except TypeError:
        numbers = None
    # Fewer numbers than entries: some were True or False.
    if numbers is None or len(numbers) < len(many):
        refuse(name, choice, ALLOWED)
    return numbers


def resolve_numbers(there: list[int], choice: str | tuple[int, ...]) -> list[int]:
    """Return the numbers that a selection names.

    Args:
        there: The existing numbers, in order.
        choice: From `normalize_choice`, without None and functions.

    Returns:
        The numbers. Explicitly given numbers may not exist.
    """
    if not isinstance(choice, str):
        return [there[n] if n < 0 and -n <= len(there) else n for n in choice]
    match = NAMED.fullmatch(choice)
    end, size, step = match.groups() if match else (None, None, None)
    if step is not None:
        return there[int(step) - 1 :: int(step)]
    if end is None:  # "all"
        return there
    count = math.ceil(len(there) / FRACTIONS[size]) if size in FRACTIONS else int(size or 0)
    return there[:count] if end == "first" else there[max(0, len(there) - count) :]


def select_heads(heads: Any, count: int, host: str) -> tuple[int, ...] | None:
    """Return the selected heads of an attention layer, in order; None for all.

    Args:
        heads: The selection, from `normalize_choice`.
        count: Number of heads of the layer.
        host: Name of the layer, for the error.

    Raises:
        ValueError: The layer has no such head, or none is selected.
    """
    if heads is None:
        return None
    there = list(range(count))
    if callable(heads):
        selected = [n for n in there if heads(n)]
    else:
        selected = resolve_numbers(there, heads)
    missing = [n for n in selected if n not in there]
    if missing or not selected:
        what = f"names head {short(missing[0])}" if missing else "names no head"
        shown = "a function" if callable(heads) else short(heads)
        raise ValueError(
            f"heads={shown} {what}; {host} has {count}; allowed: 0 to {count - 1}, or {ALLOWED}"
        )
    return tuple(sorted(set(selected)))


def select_layers(hosts: Sequence[tuple[str, Any]], layers: Any) -> list[bool]:
    """Return for each attention layer whether `layers` selects it.

    Args:
        hosts: (stack, `Host`) of each attention layer. A stack is the layer's module name without
            its number, so encoder and decoder are two stacks.
        layers: The selection. Numbers and names count within each stack.

    Raises:
        ValueError: `layers` has no allowed form, or names a layer that no stack has.
    """
    layers = normalize_choice("layers", layers)
    if layers is None:
        return [True] * len(hosts)
    if callable(layers):
        return [bool(layers(host)) for _, host in hosts]
    # The layer numbers of each stack, in order, each once.
    stacks: dict[str, list[int]] = {}
    for stack, host in sorted(hosts, key=lambda pair: pair[1].layer_index):
        if host.layer_index not in stacks.setdefault(stack, []):
            stacks[stack].append(host.layer_index)
    # A number must exist in some stack; stacks may differ in length.
    for layer in () if isinstance(layers, str) else layers:
        exists = any(
            number in there
            for there in stacks.values()
            for number in resolve_numbers(there, (layer,))
        )
        if not exists:
            present = [n for there in stacks.values() for n in there]
            raise ValueError(
                f"layers names layer {short(layer)}, which the model does not have; allowed: {min(present)} to "
                f"{max(present)}, or {ALLOWED}"
            )
    selected = {stack: set(resolve_numbers(there, layers)) for stack, there in stacks.items()}
    return [host.layer_index in selected[stack] for stack, host in hosts]
