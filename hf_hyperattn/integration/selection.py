"""Which layers are patched: lists, ranges, names such as "last-third", or a function of the host."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from ..mechanisms.base import Host

FRACTIONS = {"half": 2, "third": 3, "quarter": 4}
NAMED = re.compile(r"(?:(first|last)-(half|third|quarter|\d+)|every-(\d+)(?:st|nd|rd|th)|all)")
ALLOWED = (
    "a list or range of layer numbers (negative ones count from the end), 'all', 'first-half', 'last-third', "
    "'last-4', 'every-2nd', or a function of a host"
)


def select(hosts: list[tuple[str, Host]], layers) -> list[bool]:
    """For each (stack, host), whether `layers` means it. Names and negative numbers count within the host's stack.

    Raises:
        ValueError: `layers` is of no allowed form, or names a layer that no stack has.
    """
    if layers is None:
        return [True] * len(hosts)
    if callable(layers):
        return [bool(layers(host)) for _, host in hosts]
    stacks: dict[str, list[int]] = {}
    for stack, host in hosts:
        stacks.setdefault(stack, []).append(host.layer_index)
    chosen = {stack: set(_numbers(sorted(set(numbers)), layers)) for stack, numbers in stacks.items()}
    if not isinstance(layers, str):
        _check_present(layers, stacks)
    return [host.layer_index in chosen[stack] for stack, host in hosts]


def _numbers(there: list[int], layers: str | Iterable[int]) -> list[int]:
    """The layer numbers out of `there` that are meant."""
    if not isinstance(layers, str):
        return [_from_end(n, there) for n in _checked(layers)]
    match = NAMED.fullmatch(layers)
    if match is None:
        raise ValueError(f"layers={layers!r} is not allowed; allowed: {ALLOWED}")
    end, size, step = match.groups()
    if step is not None:
        if int(step) == 0:
            raise ValueError(f"layers={layers!r} is not allowed; allowed: {ALLOWED}")
        return there[int(step) - 1 :: int(step)]
    if end is None:
        return there
    count = math.ceil(len(there) / FRACTIONS[size]) if size in FRACTIONS else int(size)
    return there[:count] if end == "first" else there[len(there) - min(count, len(there)) :]


def _checked(layers) -> list[int]:
    if isinstance(layers, int) and not isinstance(layers, bool):
        return [layers]
    try:
        numbers = list(layers)
    except TypeError:
        numbers = [None]
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise ValueError(f"layers={layers!r} is not allowed; allowed: {ALLOWED}")
    return numbers


def _from_end(number: int, there: list[int]) -> int:
    return there[number] if number < 0 and -number <= len(there) else number


def _check_present(layers, stacks: dict[str, list[int]]) -> None:
    present = {n for there in stacks.values() for n in there}
    missing = [
        n for n in _checked(layers) if all(_from_end(n, sorted(set(t))) not in t for t in stacks.values())
    ]
    if missing:
        raise ValueError(
            f"layers names layer {missing[0]}, which the model does not have; allowed: {min(present)} to "
            f"{max(present)}, or {ALLOWED}"
        )


LayerChoice = None | str | int | Iterable[int] | Callable[[Host], bool]
