"""Configurations: one frozen dataclass a mechanism, and `HyperAttnConfig`, which holds all that is done to a model.

Fields carry their help, range and the paper's symbol as metadata, and are checked against it: a value out of range is
refused with the field's name, the value and what is allowed. Configurations are plain JSON; reading one runs no code.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from transformers.utils import PushToHubMixin

from .registry import STAGES, get_mechanism

#: Version of the JSON layout; raised when an older reader would misunderstand a newer file.
FORMAT = 1
CONFIG_NAME = "hyperattn_config.json"
MODES = ("blend", "replace")
MAX_HOSTS = 10_000


def option(
    default: Any,
    help: str,
    *,
    symbol: str = "",
    choices: tuple = (),
    above: float | None = None,
    least: float | None = None,
    types: tuple = (),
    optional: bool = False,
) -> Any:
    """A dataclass field with its help, its symbol in the paper, and what it may hold.

    Args:
        choices: allowed values.
        above, least: exclusive and inclusive lower bound of a number; numbers must be finite.
        types: allowed types; taken from the default where not given.
        optional: whether None is allowed.
    """
    types = types or (type(default),)
    metadata = dict(
        help=help,
        symbol=symbol,
        choices=choices,
        above=above,
        least=least,
        types=types,
        optional=optional or default is None,
    )
    return field(default=default, metadata=metadata) if default is not MISSING else field(metadata=metadata)


def check_field(owner: str, name: str, value: Any, rule: dict) -> None:
    """Raise a one-line ValueError if `value` breaks the rule of its field."""

    def refuse(allowed: str):
        raise ValueError(f"{owner}.{name}={value!r} is not allowed; allowed: {allowed}")

    if value is None:
        return None if rule["optional"] else refuse("a value, not None")
    if rule["choices"]:
        known = isinstance(value, str | int | float) and value in rule["choices"]
        return None if known else refuse(", ".join(map(repr, rule["choices"])))
    numeric = float in rule["types"]
    types = (*rule["types"], int) if numeric else rule["types"]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        refuse(" or ".join(t.__name__ for t in rule["types"]))
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            refuse("a finite number")
        if rule["above"] is not None and value <= rule["above"]:
            refuse(f"numbers above {rule['above']:g}")
        if rule["least"] is not None and value < rule["least"]:
            refuse(f"numbers from {rule['least']:g}")


@dataclass(frozen=True)
class MechanismConfig:
    """Base of all mechanism configs. Subclasses set `mechanism`, their name in the registry."""

    mechanism = ""

    def __post_init__(self):
        for f in fields(self):
            if f.metadata:
                check_field(type(self).__name__, f.name, getattr(self, f.name), f.metadata)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the mechanism's name first."""
        return {"mechanism": self.mechanism, **{f.name: _plain(getattr(self, f.name)) for f in fields(self)}}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> MechanismConfig:
        """The inverse of `to_dict`; unknown mechanisms, unknown fields and values out of range are refused."""
        if not isinstance(data, dict) or not isinstance(data.get("mechanism"), str):
            raise ValueError(
                f"a mechanism's config is {_short(data)}; allowed: a dict with the key 'mechanism'"
            )
        cls = get_mechanism(data["mechanism"]).config
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known - {"mechanism"})
        if unknown:
            raise ValueError(
                f"{cls.__name__} has no field {unknown[0]!r}; allowed: {', '.join(sorted(known))}; a newer "
                "hf_hyperattn may know it: pip install -U hf-hyperattn"
            )
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "mechanism"})


@dataclass(frozen=True)
class HyperAttnConfig(PushToHubMixin):
    """All that is done to a model: which mechanisms, where, and how they enter.

    Args:
        mechanisms: mechanism configs, at most one per stage.
        layers: which layers, see `hf_hyperattn.patch_model`; None means all. Not kept in JSON once `hosts` is known.
        heads: indices of the query heads that are changed; None means all.
        mode: "blend" starts as the identity (S + g·S_mechanism with g = 0), "replace" is the published operator.
        include_cross_attention: whether cross-attention is patched too.
        hosts: qualified names of the patched modules; filled in by `patch_model`.
    """

    mechanisms: tuple[MechanismConfig, ...] = ()
    layers: Any = None
    heads: tuple[int, ...] | None = None
    mode: str = "blend"
    include_cross_attention: bool = False
    hosts: tuple[str, ...] | None = None

    def __post_init__(self):
        for name in ("mechanisms", "heads", "hosts"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else tuple(value))
        if self.mode not in MODES:
            raise ValueError(
                f"HyperAttnConfig.mode={self.mode!r} is not allowed; allowed: {', '.join(map(repr, MODES))}"
            )
        self._check_mechanisms()
        if self.heads is not None and not (self.heads and all(_index(h) for h in self.heads)):
            raise ValueError(
                f"HyperAttnConfig.heads={_short(self.heads)} is not allowed; allowed: head indices from 0"
            )
        if self.hosts is not None and not all(isinstance(h, str) for h in self.hosts):
            raise ValueError(
                f"HyperAttnConfig.hosts={_short(self.hosts)} is not allowed; allowed: module names"
            )

    def _check_mechanisms(self):
        taken: dict[str, str] = {}
        for config in self.mechanisms:
            if not isinstance(config, MechanismConfig):
                raise ValueError(
                    f"HyperAttnConfig.mechanisms holds {_short(config)}; allowed: mechanism configs such as "
                    "ConeConfig()"
                )
            stage = get_mechanism(config.mechanism).stage
            if stage in taken:
                raise ValueError(
                    f"{taken[stage]} and {config.mechanism} both change the {stage} of attention; allowed: "
                    "one mechanism a stage, leave one out"
                )
            taken[stage] = config.mechanism
        order = sorted(self.mechanisms, key=lambda c: STAGES.index(get_mechanism(c.mechanism).stage))
        object.__setattr__(self, "mechanisms", tuple(order))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. `layers` is kept only where it is a name or list; a callable needs `hosts` instead."""
        if callable(self.layers) and self.hosts is None:
            raise ValueError(
                "HyperAttnConfig.layers is a function, which JSON cannot hold; allowed: a list, a range, a "
                "name, or the config of a patched model, which lists its hosts"
            )
        return {
            "format": FORMAT,
            "mechanisms": [m.to_dict() for m in self.mechanisms],
            "layers": None if self.hosts is not None else _plain(self.layers),
            "heads": _plain(self.heads),
            "mode": self.mode,
            "include_cross_attention": self.include_cross_attention,
            "hosts": _plain(self.hosts),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HyperAttnConfig:
        """The inverse of `to_dict`. Data from strangers is safe: wrong types, unknown keys and sizes are refused."""
        if not isinstance(data, dict) or not isinstance(data.get("format"), int):
            raise ValueError(f"hyperattn config is {_short(data)}; allowed: a dict with an integer 'format'")
        if not 1 <= data["format"] <= FORMAT:
            raise ValueError(
                f"hyperattn config has format {data['format']}, this hf_hyperattn reads 1 to {FORMAT}; pip "
                "install -U hf-hyperattn"
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(map(str, set(data) - known - {"format"}))
        if unknown:
            raise ValueError(
                f"hyperattn config has the unknown key {unknown[0]!r}; allowed: {', '.join(sorted(known))}"
            )
        for name, kinds in (("mechanisms", list), ("heads", list), ("hosts", list)):
            value = data.get(name)
            if value is not None and (not isinstance(value, kinds) or len(value) > MAX_HOSTS):
                raise ValueError(
                    f"hyperattn config has {name}={_short(value)}; allowed: a list of at most {MAX_HOSTS}"
                )
        values = {k: v for k, v in data.items() if k != "format"}
        values["mechanisms"] = [MechanismConfig.from_dict(m) for m in data.get("mechanisms") or []]
        return cls(**values)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs) -> None:
        """Write `hyperattn_config.json` into a directory (made where missing), whole or not at all.

        Args:
            push_to_hub: also upload it; `repo_id`, `private`, `token`, ... are those of `push_to_hub`.
        """
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / CONFIG_NAME, json.dumps(self.to_dict(), indent=2) + "\n")
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", directory.name), **kwargs)

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike, **kwargs) -> HyperAttnConfig:
        """Read it from a directory, a file or a Hub id; `revision`, `token`, ... go to `hf_hub_download`."""
        path = Path(source)
        if path.is_dir():
            path = path / CONFIG_NAME
        elif not path.is_file():
            path = Path(hf_hub_download(str(source), CONFIG_NAME, **kwargs))
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"cannot read {path}: {error}; allowed: a JSON file written by save_pretrained"
            ) from error
        return cls.from_dict(data)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a crash leaves either the old file or the new one, never half of one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | range) else value


def _index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
