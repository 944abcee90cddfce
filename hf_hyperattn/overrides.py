"""`HyperAttnConfig.overrides`: mechanism configs of single hosts, in place of those that hold for all.

A mapping from a host's qualified name to the configs that differ there. Each takes the place of the config of the same
mechanism; what a host is not given stays as it is everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .fields import short
from .mechanism_config import MechanismConfig

Overrides = dict[str, tuple[MechanismConfig, ...]]
OWNER = "HyperAttnConfig.overrides"
#: Hosts with configs of their own.
MOST = 10_000


def checked_overrides(
    value: Mapping[str, Iterable[MechanismConfig]] | None,
    mechanisms: Sequence[MechanismConfig],
    hosts: Sequence[str] | None,
) -> Overrides | None:
    """The overrides in plain form, None where there are none.

    Raises:
        ValueError: they are no mapping of names to configs, name a host that is not patched, or hold a mechanism that
            is not in use or is there twice.
    """
    if value is None or (isinstance(value, Mapping) and not value):
        return None
    if not isinstance(value, Mapping) or len(value) > MOST or not all(isinstance(h, str) for h in value):
        raise ValueError(
            f"{OWNER}={short(value)} is not allowed; allowed: names of at most {MOST} hosts, each with a list of "
            "mechanism configs, such as {'model.layers.3.self_attn': [ConeConfig()]}"
        )
    unknown = next((h for h in value if hosts is not None and h not in set(hosts)), None)
    if unknown is not None:
        raise ValueError(f"{OWNER} names {short(unknown)}, which is not in hosts; allowed: names in hosts")
    return {
        host: _of_host(host, configs, [m.mechanism for m in mechanisms]) for host, configs in value.items()
    }


def _of_host(host: str, configs: Any, known: list[str]) -> tuple[MechanismConfig, ...]:
    """The configs of one host, in the order of the mechanisms in use."""
    where = f"{OWNER}[{short(host)}]"
    if not isinstance(configs, list | tuple) or not all(isinstance(c, MechanismConfig) for c in configs):
        raise ValueError(f"{where} is {short(configs)}; allowed: a list of mechanism configs")
    names = [c.mechanism for c in configs]
    strange = next((n for n in names if n not in known), None)
    if strange is not None:
        raise ValueError(
            f"{where} holds {strange}, which is not among the mechanisms; allowed: {', '.join(known) or 'none'}"
        )
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{where} holds {short(names)}; allowed: at least one mechanism, every one once")
    return tuple(sorted(configs, key=lambda c: known.index(c.mechanism)))


def read_overrides(data: Any) -> Any:
    """Overrides out of JSON: the configs read, the shape checked where it is needed to read them.

    Raises:
        ValueError: a host has no list of mechanism configs.
    """
    if not isinstance(data, dict) or len(data) > MOST:
        raise ValueError(
            f"hyperattn config has overrides={short(data)}; allowed: a dict of at most {MOST} hosts"
        )
    for host, configs in data.items():
        if not isinstance(configs, list) or len(configs) > MOST:
            raise ValueError(
                f"hyperattn config has overrides[{short(host)}]={short(configs)}; allowed: a list of mechanism configs"
            )
    return {host: [MechanismConfig.from_dict(m) for m in configs] for host, configs in data.items()}


def write_overrides(overrides: Mapping[str, Sequence[MechanismConfig]]) -> dict[str, list[dict]]:
    """The inverse of `read_overrides`."""
    return {host: [m.to_dict() for m in configs] for host, configs in overrides.items()}


def mechanisms_of(
    mechanisms: Sequence[MechanismConfig], own: Sequence[MechanismConfig]
) -> tuple[MechanismConfig, ...]:
    """The mechanisms at a host that has configs of its own, in the same order."""
    instead = {m.mechanism: m for m in own}
    return tuple(instead.get(m.mechanism, m) for m in mechanisms)
