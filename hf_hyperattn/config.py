"""Configurations: one frozen dataclass a mechanism, and `HyperAttnConfig`, which holds all that is done to a model.

Fields are made by `option` and checked against it: a value out of range is refused with the field's name, the value and
what is allowed. Configurations are plain JSON; reading one runs no code.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from huggingface_hub import hf_hub_download
from transformers.utils import PushToHubMixin

from .address import install
from .fields import KnownFields, check_field, check_known, option, refuse, short
from .files import read_json, write_atomically
from .registry import STAGES, get_mechanism
from .selection import MOST, normalize_choice

__all__ = ["CONFIG_NAME", "FORMAT", "MODES", "HyperAttnConfig", "MechanismConfig", "option"]

#: Version of the JSON layout; raised when an older reader would misunderstand a newer file.
FORMAT = 1
CONFIG_NAME = "hyperattn_config.json"
#: Arguments of an upload and of a download, which `save_pretrained` and `from_pretrained` hand on.
UPLOAD = tuple(
    name for name in inspect.signature(PushToHubMixin.push_to_hub).parameters if name != "self"
)
DOWNLOAD = tuple(
    n for n in inspect.signature(hf_hub_download).parameters if n not in ("repo_id", "filename")
)
Mode = Literal["blend", "replace"]
MODES = get_args(Mode)
#: What mechanisms may count on, where no other takes it away.
PROPERTIES = {
    "linear_in_key": "logits are a product of features of the query with features of the key",
    "pairwise_logits": "there is one logit for a query and a key",
    "logits_by_head": "a head's logits are its own",
    "keys_as_they_are": "keys count as the host has them, each by itself",
    "free_of_rows": "what is added to all logits of a query changes nothing",
    "any_weights": "values are averaged with weights of either sign",
}


@dataclass(frozen=True)
class MechanismConfig(KnownFields):
    """Base of all mechanism configs. Subclasses set `mechanism`, their name in the registry."""

    mechanism = ""

    def __post_init__(self):
        for f in fields(self):
            if f.metadata:
                check_field(type(self).__name__, f.name, getattr(self, f.name), f.metadata)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the mechanism's name first."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"mechanism": self.mechanism, **plain(values)}

    @property
    def stages(self) -> tuple[str, ...]:
        """What of attention it changes, out of `registry.STAGES`: its mechanism's stage, and as configured, others."""
        return (get_mechanism(self.mechanism).stage,)

    @property
    def positional(self) -> bool:
        """Whether it asks where queries and keys stand in their text, beyond which pairs are visible."""
        return not get_mechanism(self.mechanism).cross_attention

    @property
    def breaks(self) -> frozenset[str]:
        """What others may count on that is not there beside it, out of `PROPERTIES`."""
        return frozenset({"linear_in_key"} if "score" in self.stages else ())

    @property
    def needs(self) -> dict[str, str]:
        """What it counts on, out of `PROPERTIES`, each with the reason."""
        return {}

    def clash(self, other: MechanismConfig) -> str | None:
        """Why it has no meaning together with another mechanism; None where it has one."""
        return next((reason for name, reason in other.needs.items() if name in self.breaks), None)

    def unread(self, causal: Collection[bool]) -> str | None:
        """What of it attention of these directions does not read, and what to do; None where all is read."""
        return None

    def for_model(self, config: object) -> MechanismConfig:
        """This config with what it leaves to the model's config filled in; as it is where it leaves nothing."""
        return self

    @classmethod
    def checked_record(cls, data: dict[str, Any]) -> dict[str, Any]:
        """What of a record its fields are made of."""
        return data

    @staticmethod
    def from_dict(data: dict[str, Any]) -> MechanismConfig:
        """The inverse of `to_dict`; unknown mechanisms, unknown fields and values out of range are refused."""
        if not isinstance(data, dict) or not isinstance(data.get("mechanism"), str):
            raise ValueError(
                f"a mechanism's config is {short(data)}; allowed: a dict with the key 'mechanism'"
            )
        cls: Any = get_mechanism(data["mechanism"], data.get("defined_in")).config
        data = cls.checked_record(data)
        known = cls.__dataclass_fields__
        unknown = sorted(map(str, data.keys() - known.keys() - {"mechanism"}))
        if unknown:
            raise ValueError(
                f"{cls.__name__} has no field {short(unknown[0])}; allowed: {', '.join(sorted(known))}; a newer "
                f"hf_hyperattn may know it: {install('-U')}"
            )
        return cls(
            **{
                k: tuple(v) if isinstance(v, list) else v
                for k, v in data.items()
                if k != "mechanism"
            }
        )


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Values as JSON has them: lists for tuples and ranges."""
    return {k: list(v) if isinstance(v, tuple | range) else v for k, v in values.items()}


Overrides = dict[str, tuple[MechanismConfig, ...]]


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
            each takes the place of the config of its stage there. In JSON only where there are some.
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
            object.__setattr__(
                self, name, normalize_choice(f"HyperAttnConfig.{name}", getattr(self, name))
            )
        if self.mode not in MODES:
            self._refuse("mode", ", ".join(map(repr, MODES)))
        if not isinstance(self.include_cross_attention, bool):
            self._refuse("include_cross_attention", "True or False")
        object.__setattr__(self, "mechanisms", checked_mechanisms(self.mechanisms))
        if self.heads == ():
            self._refuse("heads", "at least one head, or None for all")
        if self.hosts is not None and not (
            self.mechanisms and self.hosts and all(isinstance(h, str) for h in self.hosts)
        ):
            self._refuse("hosts", "names of modules, at least one, with at least one mechanism")
        if self.hosts is not None and len(set(self.hosts)) < len(self.hosts):
            self._refuse("hosts", "every name once")
        object.__setattr__(
            self, "overrides", checked_overrides(self.overrides, self.mechanisms, self.hosts)
        )
        for host in self.overrides or ():
            check_stages(self.mechanisms_at(host))

    def mechanisms_at(self, host: str) -> tuple[MechanismConfig, ...]:
        """The mechanism configs of one host, by its qualified name, in the order of their stages."""
        return mechanisms_of(self.mechanisms, (self.overrides or {}).get(host, ()))

    @cached_property
    def for_any_host(self) -> HyperAttnConfig:
        """What of it holds for every host alike: all but layers, hosts and overrides."""
        config = copy.copy(self)
        for name in ("layers", "hosts", "overrides"):
            object.__setattr__(config, name, None)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. `layers` is kept only where it is a name or list; a callable needs `hosts` instead."""
        for name in ("layers", "heads"):
            if callable(getattr(self, name)) and not (name == "layers" and self.hosts is not None):
                raise ValueError(
                    f"HyperAttnConfig.{name} is a function, which JSON cannot hold; allowed: a list, a range, a "
                    "name, or the config of a patched model, which lists what was chosen"
                )
        values = {
            "format": FORMAT,
            "mechanisms": [m.to_dict() for m in self.mechanisms],
            "layers": None if self.hosts is not None else self.layers,
            "heads": self.heads,
            "mode": self.mode,
            "include_cross_attention": self.include_cross_attention,
            "hosts": self.hosts,
        }
        if self.overrides:
            values["overrides"] = {
                host: [m.to_dict() for m in configs] for host, configs in self.overrides.items()
            }
        return plain(values)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HyperAttnConfig:
        """The inverse of `to_dict`. Data from strangers is safe: wrong types, unknown keys and sizes are refused."""
        if not isinstance(data, dict) or type(data.get("format")) is not int:
            raise ValueError(
                f"hyperattn config is {short(data)}; allowed: a dict with an integer 'format'"
            )
        if not 1 <= data["format"] <= FORMAT:
            raise ValueError(
                f"hyperattn config has format {short(data['format'])}, this hf_hyperattn reads 1 to {FORMAT}; install "
                f"a newer one: {install('-U')}"
            )
        known = cls.__dataclass_fields__
        unknown = sorted(map(str, data.keys() - known.keys() - {"format"}))
        if unknown:
            raise ValueError(
                f"hyperattn config has the unknown key {short(unknown[0])}; allowed: {', '.join(sorted(known))}"
            )
        for name in ("mechanisms", "heads", "layers", "hosts"):
            value, kinds = data.get(name), list | str if name in ("heads", "layers") else list
            if value is not None and (not isinstance(value, kinds) or len(value) > MOST):
                raise ValueError(
                    f"hyperattn config has {name}={short(value)}; allowed: a list of at most {MOST}"
                )
        values = {k: v for k, v in data.items() if k != "format"}
        values["mechanisms"] = [MechanismConfig.from_dict(m) for m in data.get("mechanisms") or []]
        overrides = data.get("overrides")
        if (
            isinstance(overrides, dict) and len(overrides) <= MOST
        ):  # what is of another form is refused as it is
            lists = {
                h: c for h, c in overrides.items() if isinstance(c, list) and len(c) <= len(STAGES)
            }
            values["overrides"] = overrides | {
                h: list(map(MechanismConfig.from_dict, c)) for h, c in lists.items()
            }
        return cls(**values)

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs
    ) -> None:
        """Write `hyperattn_config.json` into a directory (made where missing), whole or not at all.

        Args:
            push_to_hub: also upload it; `repo_id`, `private`, `token`, ... are those of `push_to_hub`, for this alone.

        Raises:
            TypeError: an argument that `push_to_hub` does not have.
            ValueError: one of its arguments without push_to_hub=True.
        """
        check_known(
            "HyperAttnConfig.save_pretrained has no argument", kwargs, ("push_to_hub", *UPLOAD)
        )
        given = [name for name, value in kwargs.items() if value is not None]
        idle = next(
            (name for name in given if name != "max_shard_size"), None
        )  # which push_to_hub itself gives
        if idle is not None and not push_to_hub:
            raise ValueError(f"{idle} is for push_to_hub=True; leave it out")
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / CONFIG_NAME, json.dumps(self.to_dict(), indent=2) + "\n")
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", directory.name), **kwargs)

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike, **kwargs) -> HyperAttnConfig:
        """Read it from a directory, a file or a Hub id; `revision`, `token`, ... go to `hf_hub_download`.

        Raises:
            TypeError: an argument that `hf_hub_download` does not have.
            ValueError: no config, or `revision` or `subfolder` of what is no Hub id; both say what is to be read.
        """
        check_known("HyperAttnConfig.from_pretrained has no argument", kwargs, DOWNLOAD)
        path = Path(source)
        idle = next((name for name in ("revision", "subfolder") if kwargs.get(name)), None)
        if idle is not None and path.exists():
            raise ValueError(
                f"{idle} is for a Hub id, and {short(str(source))} is on the disk; leave it out"
            )
        if path.is_dir():
            path = path / CONFIG_NAME
        elif not path.is_file():
            path = Path(hf_hub_download(str(source), CONFIG_NAME, **kwargs))
        return cls.from_dict(read_json(path))


def read_record(data: Any) -> HyperAttnConfig:
    """`HyperAttnConfig.from_dict`, done once for every content: a load asks for its record several times."""
    try:
        text = json.dumps(data, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return HyperAttnConfig.from_dict(data)
    return _read_record(text)


@lru_cache(maxsize=64)
def _read_record(text: str) -> HyperAttnConfig:
    return HyperAttnConfig.from_dict(json.loads(text))


def checked_mechanisms(configs: Sequence[Any]) -> tuple[MechanismConfig, ...]:
    """Mechanism configs that can work together, in the order of their stages.

    Raises:
        ValueError: one is no mechanism's config, or `check_stages` refuses them.
    """
    for config in configs:
        if not isinstance(config, MechanismConfig):
            raise ValueError(
                f"HyperAttnConfig.mechanisms holds {short(config)}; allowed: mechanism configs such as ConeConfig()"
            )
    check_stages(configs)
    return tuple(sorted(configs, key=lambda c: STAGES.index(get_mechanism(c.mechanism).stage)))


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


def checked_overrides(
    value: Any, mechanisms: Sequence[MechanismConfig], hosts: Sequence[str] | None
) -> Overrides | None:
    """`HyperAttnConfig.overrides` in plain form, None where there are none.

    Raises:
        ValueError: they are no mapping of names to configs, name a host that is not patched, or hold a mechanism that
            is not in use or is there twice.
    """
    if value is None or (isinstance(value, Mapping) and not value):
        return None
    owner = "HyperAttnConfig.overrides"
    if (
        not isinstance(value, Mapping)
        or len(value) > MOST
        or not all(isinstance(h, str) for h in value)
    ):
        example = "{'model.layers.3.self_attn': [ConeConfig()]}"
        refuse(
            owner,
            value,
            f"names of at most {MOST} hosts, each with a list of mechanism configs, such as {example}",
        )
    patched = value if hosts is None else set(hosts)
    unknown = next((h for h in value if h not in patched), None)
    if unknown is not None:
        raise ValueError(
            f"{owner} names {short(unknown)}, which is not in hosts; allowed: names in hosts"
        )
    known = [m.stages[0] for m in mechanisms]
    for host, configs in value.items():
        where = f"{owner}[{short(host)}]"
        if not isinstance(configs, list | tuple) or not all(
            isinstance(c, MechanismConfig) for c in configs
        ):
            raise ValueError(f"{where} is {short(configs)}; allowed: a list of mechanism configs")
        names = [c.mechanism for c in configs]
        strange = next((c.mechanism for c in configs if c.stages[0] not in known), None)
        if strange is not None:
            allowed = ", ".join(m.mechanism for m in mechanisms)
            allowed = f"{allowed}, and others of their stages" if allowed else "none"
            raise ValueError(
                f"{where} holds {strange}, which is not among the mechanisms; allowed: {allowed}"
            )
        if not names or len({c.stages[0] for c in configs}) < len(names):
            raise ValueError(
                f"{where} holds {short(names)}; allowed: at least one mechanism, every one once, one a stage"
            )
    return {
        host: tuple(sorted(configs, key=lambda c: known.index(c.stages[0])))
        for host, configs in value.items()
    }


def mechanisms_of(
    mechanisms: Sequence[MechanismConfig], overrides: Sequence[MechanismConfig]
) -> tuple[MechanismConfig, ...]:
    """The mechanisms at a host that has `overrides` of its own, each in place of that of its stage."""
    instead = {m.stages[0]: m for m in overrides}
    return tuple(instead.get(m.stages[0], m) for m in mechanisms)
