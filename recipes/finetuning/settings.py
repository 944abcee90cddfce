"""A recipe: its groups of settings read from YAML; what is wrong is said in one line before work starts."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .groups import TASKS, Data, Group, Hub, Mechanisms, Model, Peft, Trainer
from .reading import read_yaml, read_yaml_value

GROUPS = {cls.__name__.lower(): cls for cls in (Model, Mechanisms, Peft, Data, Trainer, Hub)}
#: Settings that are read with one method, source or task alone: group and names.
OF_LORA = (("peft", ("r", "alpha", "dropout", "targets")), ("trainer", ("merged",)))
OF_HUB = (("data", ("subset", "revision", "split", "held_out_split", "column", "label")),)
OF_TEXT, OF_ROWS = (
    (("data", ("held_out_tokens",)),),
    (("data", ("train_rows", "held_out_rows", "label")),),
)


@dataclass(frozen=True)
class Settings:
    """A whole recipe."""

    model: Model
    mechanisms: Mechanisms
    peft: Peft
    data: Data
    trainer: Trainer
    hub: Hub = field(default_factory=Hub)

    def __post_init__(self):
        task, scratch = self.model.task, self.model.config is not None
        if self.data.source not in TASKS[task]:
            raise ValueError(
                f"data.source={self.data.source!r} with model.task={task!r}; allowed: {', '.join(TASKS[task])}"
            )
        if scratch and self.peft.method != "full":
            raise ValueError(
                f"model.config with peft.method={self.peft.method!r} leaves random weights as they are; set "
                "peft.method=full"
            )
        if scratch and task in ("text-generation", "text-classification"):
            raise ValueError(
                f"model.config with model.task={task!r}: it has no tokenizer; set model.name"
            )
        if scratch and task == "image-classification" and self.data.source == "hub":
            raise ValueError(
                "model.config with data.source='hub': it has no image processor; set model.name"
            )
        self.check_read()

    def check_read(self) -> None:
        """Raise for a setting that differs from its default and is not read with the others."""
        task, source, method = self.model.task, self.data.source, self.peft.method
        for where, unread in (
            (f"peft.method={method!r}", () if method == "lora" else OF_LORA),
            (f"data.source={source!r}", () if source == "hub" else OF_HUB),
            (f"model.task={task!r}", OF_ROWS if task == "text-generation" else OF_TEXT),
        ):
            for group, names in unread:
                for f in fields(GROUPS[group]):
                    value = getattr(getattr(self, group), f.name)
                    if f.name in names and value != f.default:
                        raise ValueError(
                            f"{group}.{f.name}={value!r} says nothing with {where}; leave it out"
                        )

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
    data = read_recipe(path)
    for change in changes:
        key, equals, value = change.partition("=")
        group, dot, name = key.partition(".")
        if not (equals and dot) or group not in GROUPS:
            raise ValueError(
                f"--set {change}: allowed: GROUP.KEY=VALUE with the groups {', '.join(GROUPS)}"
            )
        data.setdefault(group, {})
        check_mapping(group, data[group])
        data[group][name] = read_yaml_value(value)
    check_known("the recipe", data, GROUPS)
    trainer = data.setdefault("trainer", {}) or {}
    if isinstance(trainer, dict) and trainer.get("output") is None:
        at = Path(path).resolve().with_suffix("")
        data["trainer"] = trainer | {"output": f"outputs/{at.parent.name}/{at.name}"}
    settings = Settings(
        **{name: read_group(cls, data.get(name) or {}) for name, cls in GROUPS.items()}
    )
    settings.mechanisms.config  # noqa: B018  a bad mechanism is an error now, not when the model is loaded
    return settings


def read_recipe(path: str | Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping in a YAML file; what it says wins, key by key, over the file that it names as its `base`.

    Args:
        seen: files that this one is the base of.
    """
    data = read_yaml(path)
    base = data.pop("base", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ValueError(
            f"base is {base!r}; allowed: the path of a YAML file, from the folder of {path}"
        )
    other = Path(path).parent / base
    if other.resolve() in (seen := (*seen, Path(path).resolve())):
        raise ValueError(
            f"base {base!r} is read from itself; allowed: a file that leads to no circle"
        )
    whole = read_recipe(other, seen)
    for group, values in data.items():
        both = isinstance(values, dict) and isinstance(whole.get(group), dict)
        whole[group] = whole[group] | values if both else values
    return whole


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
            raise ValueError(
                f"{owner} has no key {key!r} (its value: {data[key]!r}); allowed: {', '.join(known)}"
            )


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
            default = (
                "(must be given)"
                if f.default is dataclasses.MISSING
                else json.dumps(plain(f.default))
            )
            lines.append(f"  {f.name:<24}{default:<18}{f.metadata['help']}")
    return "\n".join(lines)
