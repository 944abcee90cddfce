"""Which layers are patched. Numbers and names such as "last-third" count within each stack of the model."""

from __future__ import annotations

from ..choice import ALLOWED, Choice, checked, numbers
from ..fields import short
from ..mechanisms.base import Host


def select(hosts: list[tuple[str, object, Host]], layers: Choice) -> list[bool]:
    """For each (stack, module, host), whether `layers` means it; a function of a `Host` is asked for each.

    Raises:
        ValueError: `layers` is of no allowed form, or names a layer that no stack has.
    """
    layers = checked("layers", layers)
    if layers is None:
        return [True] * len(hosts)
    if callable(layers):
        return [bool(layers(host)) for _, _, host in hosts]
    stacks: dict[str, list[int]] = {}
    for stack, _, host in hosts:
        stacks.setdefault(stack, []).append(host.layer_index)
    there = {stack: sorted(set(found)) for stack, found in stacks.items()}
    if not isinstance(layers, str):
        _check_present(layers, list(there.values()))
    chosen = {stack: set(numbers(found, layers)) for stack, found in there.items()}
    return [host.layer_index in chosen[stack] for stack, _, host in hosts]


def _check_present(layers: tuple[int, ...], stacks: list[list[int]]) -> None:
    for layer in layers:
        if all(number not in there for there in stacks for number in numbers(there, (layer,))):
            present = [n for there in stacks for n in there]
            raise ValueError(
                f"layers names layer {short(layer)}, which the model does not have; allowed: {min(present)} to "
                f"{max(present)}, or {ALLOWED}"
            )
