"""Reading the ``hyperattn`` entry of a config.json, data from anywhere, into what a card shows."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_MECHANISMS, MOST_GROUPS, MOST_OWN = 16, 24, 64
UNLIMITED = 2**31  # what configs write for "no limit"


@dataclass(frozen=True)
class Spec:
    """Mode, mechanisms as (name, settings as text), hosts as text groups, their number, heads as text.

    `own`: what modules have in place of those settings, as (modules, mechanism, settings as text).
    `imports`: modules that define scores from outside the package, as (module, mechanism).
    """

    mode: str
    mechanisms: tuple[tuple[str, str], ...]
    hosts: tuple[str, ...]
    host_count: int | None
    heads: str
    own: tuple[tuple[str, str, str], ...] = ()
    imports: tuple[tuple[str, str], ...] = ()


def refuse(what: str, value: object, allowed: str) -> ValueError:
    """The one-line error of this module."""
    return ValueError(f"hub_cards: {what} is {str(value)[:80]!r}; allowed: {allowed}")


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    spans: list[list[int]] = []
    ordered = sorted(set(numbers))
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
        groups[(match[1], match[3]) if match else (host, None)].append(
            int(match[2]) if match else 0
        )
    lines = []
    for (before, after), numbers in groups.items():
        if after is None:
            lines.append(before)
        else:
            span = ranges(numbers)
            lines.append(f"{before}{span if span.isdecimal() else f'({span})'}{after}")
    rest = len(lines) - MOST_GROUPS
    return tuple(lines if rest <= 0 else [*lines[:MOST_GROUPS], f"and {rest} more"])


def settings(mechanism: Mapping, brief: bool = False) -> str:
    """The fields of a mechanism config that are set, as ``name=value, ...``; `brief`: numbers by head as a range."""
    shown = {
        key: value for key, value in mechanism.items() if key != "mechanism" and value is not None
    }
    text = span if brief else lambda name, value: f"{name}={json.dumps(value, default=str)}"
    return ", ".join(text(name, value) for name, value in shown.items())


def span(name: str, value: object) -> str:
    """``name=value``, and for a list of three numbers or more, one a head, the least and the largest."""
    read = lambda x: float(x) if x in ("-inf", "inf") else x
    numbers = [read(x) for x in value] if isinstance(value, list) and name != "windows" else []
    if len(numbers) < 3 or not all(type(x) in (int, float) for x in numbers):
        return f"{name}={json.dumps(value, default=str)}"
    ends = ["no limit" if x >= UNLIMITED else f"{x:g}" for x in (min(numbers), max(numbers))]
    return f"{name}={ends[0]}" if ends[0] == ends[1] else f"{name}={ends[0]} to {ends[1]}"


def read_mechanisms(spec: Mapping) -> tuple[tuple[str, str], ...]:
    """(name, settings) of every mechanism; ValueError where the list is missing or malformed."""
    entries = spec.get("mechanisms")
    if (
        not isinstance(entries, Sequence)
        or isinstance(entries, str)
        or not 0 < len(entries) <= MOST_MECHANISMS
    ):
        raise refuse(
            "config['mechanisms']", entries, f"a list of 1 to {MOST_MECHANISMS} mechanism configs"
        )
    for entry in entries:
        if (
            not isinstance(entry, Mapping)
            or not isinstance(entry.get("mechanism"), str)
            or not entry["mechanism"]
        ):
            raise refuse(
                "an entry of config['mechanisms']", entry, "an object with a string 'mechanism'"
            )
    count = Counter(str(entry.get("mechanism")) for _, entry in read_overrides(spec))
    other = {
        name: f"; other settings at {n} of the modules (overrides)" for name, n in count.items()
    }
    return tuple(
        (name, settings(entry) + other.get(name, ""))
        for entry in entries
        for name in [entry["mechanism"]]
    )


def read_overrides(spec: Mapping) -> list[tuple[str, Mapping]]:
    """(module, mechanism config) of all that modules have of their own; ValueError where that is malformed."""
    overrides = spec.get("overrides") or {}
    own: list[tuple[Any, Any]] = (
        list(overrides.items()) if isinstance(overrides, Mapping) else [(None, None)]
    )
    if not all(
        isinstance(configs, Sequence) and not isinstance(configs, str) for _, configs in own
    ):
        raise refuse(
            "config['overrides']", overrides, "an object with lists of mechanism configs, by module"
        )
    natural = lambda item: [
        (int(x), "") if x.isdecimal() else (-1, x) for x in re.split(r"(\d{1,9})", str(item[0]))
    ]
    return [
        (str(name), entry)
        for name, c in sorted(own, key=natural)
        for entry in c
        if isinstance(entry, Mapping)
    ]


def read_own(spec: Mapping) -> tuple[tuple[str, str, str], ...]:
    """Rows of the table of what modules have of their own; those that have the same share a row."""
    rows = defaultdict(list)
    for module, entry in read_overrides(spec):
        rows[str(entry.get("mechanism")), settings(entry, brief=True)].append(module)
    found = [
        (", ".join(group_hosts(modules)), name, text) for (name, text), modules in rows.items()
    ]
    rest = len(found) - MOST_OWN
    return tuple(found if rest <= 0 else [*found[:MOST_OWN], (f"and {rest} more", "", "")])


def read_imports(spec: Mapping) -> tuple[tuple[str, str], ...]:
    """Modules that must be imported before loading, each with the mechanism that it defines; none that is no name."""
    homes = {
        str(e.get("defined_in")).partition(":")[0]: str(e["mechanism"]) for e in spec["mechanisms"]
    }
    is_module = re.compile(r"[A-Za-z_]\w{0,60}(\.[A-Za-z_]\w{0,60}){0,9}", re.ASCII).fullmatch
    return tuple(
        (home, name)
        for home, name in homes.items()
        if is_module(home) and home not in ("None", "__main__")
    )


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
    mode, heads = str(spec.get("mode", "blend")), read_heads(spec.get("heads"))
    return Spec(
        mode, read_mechanisms(spec), hosts, count, heads, read_own(spec), read_imports(spec)
    )
