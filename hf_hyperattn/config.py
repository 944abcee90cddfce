"""Configurations: one frozen dataclass a mechanism, and `HyperAttnConfig`, which holds all that is done to a model.

Fields are made by `option` and checked against it: a value out of range is refused with the field's name, the value and
what is allowed. Configurations are plain JSON; reading one runs no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from huggingface_hub import hf_hub_download
from transformers.utils import PushToHubMixin

from .address import install
from .choice import checked
from .fields import KnownFields, option, short
from .files import read_json, write_atomically
from .mechanism_config import MechanismConfig, plain
from .overrides import checked_overrides, mechanisms_of, read_overrides, write_overrides
from .registry import STAGES, get_mechanism

__all__ = [
    "CONFIG_NAME",
    "FORMAT",
    "MODES",
    "HyperAttnConfig",
    "MechanismConfig",
    "option",
]

#: Version of the JSON layout; raised when an older reader would misunderstand a newer file.
FORMAT = 1
CONFIG_NAME = "hyperattn_config.json"
Mode = Literal["blend", "replace"]
MODES = get_args(Mode)
#: Entries of any list in a config.
MOST = 10_000


@dataclass(frozen=True)
class HyperAttnConfig(KnownFields, PushToHubMixin):
    """All that is done to a model: which mechanisms, where, and how they enter.

    Args:
        mechanisms: mechanism configs, at most one per stage.
        layers: which layers, see `hf_hyperattn.patch_model`; None means all. Not kept in JSON once `hosts` is known.
        heads: which query heads, given in the same ways; None means all.
        mode: "blend" starts as the identity (S + g·S_mechanism with g = 0), "replace" is the published operator.
        include_cross_attention: whether cross-attention is patched too.
        hosts: qualified names of the patched modules; filled in by `patch_model`.
        overrides: mechanism configs of single hosts, such as `{"model.layers.3.self_attn": [ConeConfig(gamma=2.0)]}`;
            each takes the place of the config of the same mechanism there. In JSON only where there are some.
    """

    mechanisms: Sequence[MechanismConfig] = ()
    layers: Any = None
    heads: Any = None
    mode: Mode = "blend"
    include_cross_attention: bool = False
    hosts: Sequence[str] | None = None
    overrides: Mapping[str, Sequence[MechanismConfig]] | None = field(default=None, hash=False)

    def __post_init__(self):
        for name in ("mechanisms", "hosts"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else tuple(value))
        for name in ("layers", "heads"):
            object.__setattr__(self, name, checked(f"HyperAttnConfig.{name}", getattr(self, name)))
        if self.mode not in MODES:
            self._refuse("mode", ", ".join(map(repr, MODES)))
        if not isinstance(self.include_cross_attention, bool):
            self._refuse("include_cross_attention", "True or False")
        self._check_mechanisms()
        if self.heads == ():
            self._refuse("heads", "at least one head, or None for all")
        if self.hosts is not None and not (
            self.mechanisms and self.hosts and all(isinstance(h, str) for h in self.hosts)
        ):
            self._refuse("hosts", "names of modules, at least one, with at least one mechanism")
        if self.hosts is not None and len(set(self.hosts)) < len(self.hosts):
            self._refuse("hosts", "every name once")
        overrides = checked_overrides(self.overrides, self.mechanisms, self.hosts)
        object.__setattr__(self, "overrides", overrides)
        for host in overrides or ():
            check_stages(self.mechanisms_at(host))

    def _refuse(self, name: str, allowed: str):
        raise ValueError(
            f"HyperAttnConfig.{name}={short(getattr(self, name))} is not allowed; allowed: {allowed}"
        )

    def _check_mechanisms(self):
        for config in self.mechanisms:
            if not isinstance(config, MechanismConfig):
                raise ValueError(
                    f"HyperAttnConfig.mechanisms holds {short(config)}; allowed: mechanism configs such as "
                    "ConeConfig()"
                )
        check_stages(self.mechanisms)
        order = sorted(self.mechanisms, key=lambda c: STAGES.index(get_mechanism(c.mechanism).stage))
        object.__setattr__(self, "mechanisms", tuple(order))

    def mechanisms_at(self, host: str) -> tuple[MechanismConfig, ...]:
        """The mechanism configs of one host, by its qualified name, in the order of their stages."""
        return mechanisms_of(self.mechanisms, (self.overrides or {}).get(host, ()))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. `layers` is kept only where it is a name or list; a callable needs `hosts` instead."""
        for name in ("layers", "heads"):
            if callable(getattr(self, name)) and not (name == "layers" and self.hosts is not None):
                raise ValueError(
                    f"HyperAttnConfig.{name} is a function, which JSON cannot hold; allowed: a list, a range, a "
                    "name, or the config of a patched model, which lists what was chosen"
                )
        return {
            "format": FORMAT,
            "mechanisms": [m.to_dict() for m in self.mechanisms],
            "layers": None if self.hosts is not None else plain(self.layers),
            "heads": plain(self.heads),
            "mode": self.mode,
            "include_cross_attention": self.include_cross_attention,
            "hosts": plain(self.hosts),
        } | ({"overrides": write_overrides(self.overrides)} if self.overrides else {})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HyperAttnConfig:
        """The inverse of `to_dict`. Data from strangers is safe: wrong types, unknown keys and sizes are refused."""
        if not isinstance(data, dict) or type(data.get("format")) is not int:
            raise ValueError(f"hyperattn config is {short(data)}; allowed: a dict with an integer 'format'")
        if not 1 <= data["format"] <= FORMAT:
            raise ValueError(
                f"hyperattn config has format {short(data['format'])}, this hf_hyperattn reads 1 to {FORMAT}; install "
                f"a newer one: {install('-U')}"
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(map(str, set(data) - known - {"format"}))
        if unknown:
            raise ValueError(
                f"hyperattn config has the unknown key {short(unknown[0])}; allowed: {', '.join(sorted(known))}"
            )
        for name, kinds in (
            ("mechanisms", list),
            ("heads", list | str),
            ("layers", list | str),
            ("hosts", list),
        ):
            value = data.get(name)
            if value is not None and (not isinstance(value, kinds) or len(value) > MOST):
                raise ValueError(
                    f"hyperattn config has {name}={short(value)}; allowed: a list of at most {MOST}"
                )
        values = {k: v for k, v in data.items() if k != "format"}
        values["mechanisms"] = [MechanismConfig.from_dict(m) for m in data.get("mechanisms") or []]
        if data.get("overrides") is not None:
            values["overrides"] = read_overrides(data["overrides"])
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
        return cls.from_dict(read_json(path))


def check_stages(mechanisms: Sequence[MechanismConfig]) -> None:
    """Raise where two mechanisms change the same stage of attention, or refuse each other; the message names both."""
    taken: dict[str, str] = {}
    for config in mechanisms:
        for stage in config.stages:
            if stage in taken:
                raise ValueError(
                    f"{taken[stage]} and {config.mechanism} both change the {stage} of attention; allowed: "
                    "one mechanism a stage, leave one out"
                )
            taken[stage] = config.mechanism
    for config in mechanisms:
        for other in mechanisms:
            if other is not config and (reason := config.clash(other)):
                raise ValueError(
                    f"{config.mechanism} and {other.mechanism} have no meaning together: {reason}; allowed: leave "
                    "one out"
                )
