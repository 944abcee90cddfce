"""A recipe: its groups of settings read from YAML; what is wrong is said in one line before work starts."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .groups import Data, Group, Hub, Mechanisms, Model, Peft, Trainer
from .reading import read_yaml, read_yaml_value

GROUPS = {cls.__name__.lower(): cls for cls in (Model, Mechanisms, Peft, Data, Trainer, Hub)}


@dataclass(frozen=True)
class Settings:
    """A whole recipe."""

    model: Model
    mechanisms: Mechanisms
    peft: Peft
    data: Data
    trainer: Trainer
    hub: Hub = field(default_factory=Hub)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON and YAML have them."""
        return plain(asdict(self))


def read_settings(path: str | Path, changes: list[str] = ()) -> Settings:
    """A recipe from its YAML file.

    Args:
        path: the file.
        changes: settings that win over the file's, such as "trainer.steps=10".

    Raises:
        ValueError: the file is no YAML, or a key or value in it is wrong; one line that names it and what is allowed.
    """
    data = read_yaml(path)
    for change in changes:
        key, equals, value = change.partition("=")
        group, dot, name = key.partition(".")
        if not (equals and dot) or group not in GROUPS:
            raise ValueError(f"--set {change}: allowed: GROUP.KEY=VALUE with the groups {', '.join(GROUPS)}")
        data.setdefault(group, {})
        check_mapping(group, data[group])
        data[group][name] = read_yaml_value(value)
    check_known("the recipe", data, GROUPS)
    settings = Settings(**{name: read_group(cls, data.get(name) or {}) for name, cls in GROUPS.items()})
    settings.mechanisms.config  # noqa: B018  a bad mechanism is an error now, not when the model is loaded
    return settings


def read_group(cls: type, data: Any) -> Group:
    """One group from a mapping."""
    owner = cls.__name__.lower()
    check_mapping(owner, data)
    known = {f.name: f for f in fields(cls)}
    check_known(owner, data, known)
    for name, f in known.items():
        if f.default is dataclasses.MISSING and name not in data:
            raise ValueError(f"{owner}.{name} is missing; it is the {f.metadata['help']}")
    return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in data.items()})


def check_mapping(owner: str, data: Any) -> None:
    """Raise for what is no mapping."""
    if not isinstance(data, dict):
        raise ValueError(f"{owner} is {data!r}; allowed: keys and values")


def check_known(owner: str, data: dict, known: dict) -> None:
    """Raise for the first key that is not known."""
    for key in data:
        if key not in known:
            raise ValueError(f"{owner} has no key {key!r} (its value: {data[key]!r}); allowed: {', '.join(known)}")


def plain(value: Any) -> Any:
    """Tuples as lists, all the way down."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, tuple | list) else value


def listing() -> str:
    """Every setting with its default and its help."""
    lines = []
    for group, cls in GROUPS.items():
        lines.append(f"{group}: {cls.__doc__}")
        for f in fields(cls):
            default = "(must be given)" if f.default is dataclasses.MISSING else json.dumps(plain(f.default))
            lines.append(f"  {f.name:<24}{default:<18}{f.metadata['help']}")
    return "\n".join(lines)
