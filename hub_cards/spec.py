"""Reading the ``hyperattn`` entry of a config.json, data from anywhere, into what a card shows."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_MECHANISMS, MOST_GROUPS = 16, 24


@dataclass(frozen=True)
class Spec:
    """Mode, mechanisms as (name, settings as text), hosts as text groups, their number, heads as text."""

    mode: str
    mechanisms: tuple[tuple[str, str], ...]
    hosts: tuple[str, ...]
    host_count: int | None
    heads: str


def refuse(what: str, value: object, allowed: str) -> ValueError:
    """The one-line error of this module."""
    return ValueError(f"hub_cards: {what} is {str(value)[:80]!r}; allowed: {allowed}")


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    spans, ordered = [], sorted(set(numbers))
    for number in ordered:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def group_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Names that differ in their last number only, as one line: ``model.layers.(20-29).self_attn``."""
    groups = defaultdict(list)
    for host in hosts:
        match = re.fullmatch(r"(.*?)(\d{1,6})(\D*)", host, re.S)
        groups[(match[1], match[3]) if match else (host, None)].append(int(match[2]) if match else 0)
    lines = []
    for (before, after), numbers in groups.items():
        if after is None:
            lines.append(before)
        else:
            span = ranges(numbers)
            lines.append(f"{before}{span if span.isdecimal() else f'({span})'}{after}")
    rest = len(lines) - MOST_GROUPS
    return tuple(lines if rest <= 0 else [*lines[:MOST_GROUPS], f"and {rest} more"])


def settings(mechanism: Mapping) -> str:
    """The fields of a mechanism config that are set, as ``name=value, ...``."""
    shown = {key: value for key, value in mechanism.items() if key != "mechanism" and value is not None}
    return ", ".join(f"{key}={json.dumps(value, default=str)}" for key, value in shown.items())


def read_mechanisms(spec: Mapping) -> tuple[tuple[str, str], ...]:
    """(name, settings) of every mechanism; ValueError where the list is missing or malformed."""
    entries = spec.get("mechanisms")
    if (
        not isinstance(entries, Sequence)
        or isinstance(entries, str)
        or not 0 < len(entries) <= MOST_MECHANISMS
    ):
        raise refuse("config['mechanisms']", entries, f"a list of 1 to {MOST_MECHANISMS} mechanism configs")
    for entry in entries:
        if (
            not isinstance(entry, Mapping)
            or not isinstance(entry.get("mechanism"), str)
            or not entry["mechanism"]
        ):
            raise refuse("an entry of config['mechanisms']", entry, "an object with a string 'mechanism'")
    differ = read_overrides(spec)
    return tuple(
        (name, settings(entry) + differ.get(name, "")) for entry in entries for name in [entry["mechanism"]]
    )


def read_overrides(spec: Mapping) -> dict[str, str]:
    """By mechanism, in how many modules it has other settings, as text; ValueError where that is malformed."""
    overrides = spec.get("overrides") or {}
    own = list(overrides.values()) if isinstance(overrides, Mapping) else [None]
    if not all(isinstance(configs, Sequence) and not isinstance(configs, str) for configs in own):
        raise refuse("config['overrides']", overrides, "an object with lists of mechanism configs, by module")
    named = Counter(str(entry.get("mechanism")) for c in own for entry in c if isinstance(entry, Mapping))
    return {name: f"; other settings at {n} of the modules (overrides)" for name, n in named.items()}


def read_heads(heads: object) -> str:
    """Which heads: "all" for None, else the numbers, or whatever form was configured."""
    if heads is None:
        return "all"
    if isinstance(heads, Sequence) and heads and all(type(head) is int for head in heads):
        return ranges(heads)
    return heads if isinstance(heads, str) else json.dumps(heads, default=str)


def read_hosts(spec: Mapping) -> tuple[tuple[str, ...], int | None]:
    """The patched modules in groups, and their number; before patching the ``layers`` wish and None."""
    hosts = spec.get("hosts")
    if hosts is None:
        layers = spec.get("layers")
        return ("all layers" if layers is None else f"layers: {read_heads(layers)}",), None
    if (
        not isinstance(hosts, Sequence)
        or isinstance(hosts, str)
        or not all(isinstance(h, str) for h in hosts)
    ):
        raise refuse("config['hosts']", hosts, "a list of module names")
    return group_hosts(hosts), len(hosts)


def read_spec(config: Mapping) -> Spec:
    """The ``hyperattn`` dict itself, or a config.json dict that holds it, as a ``Spec``.

    Raises ValueError where it is neither, or malformed.
    """
    if not isinstance(config, Mapping):
        raise refuse("config", config, "the 'hyperattn' dict of a patched model's config.json")
    spec = config.get("hyperattn", config)
    if not isinstance(spec, Mapping):
        raise refuse("config['hyperattn']", spec, "an object with 'mechanisms'")
    hosts, count = read_hosts(spec)
    return Spec(
        str(spec.get("mode", "blend")), read_mechanisms(spec), hosts, count, read_heads(spec.get("heads"))
    )
