"""Configs: one frozen dataclass per mechanism, and `HyperAttnConfig` for a model.

Fields are made by `option` and checked against it: a wrong value raises an error with the field,
the value and the allowed values. Configs are plain JSON, and reading one runs no code.
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

from ..address import install
from ..utils.files import read_json, write_atomically
from ..utils.text import short
from .choice import MOST, normalize_choice
from .fields import KnownFields, check_field, check_known, option, refuse
from .registry import STAGES, get_mechanism

__all__ = ["CONFIG_NAME", "FORMAT", "MODES", "HyperAttnConfig", "MechanismConfig", "option"]

#: Version of the JSON layout; increased when an older reader would misunderstand a newer file.
FORMAT = 1
CONFIG_NAME = "hyperattn_config.json"
#: Arguments that `save_pretrained` passes to the upload, and `from_pretrained` to the download.
UPLOAD = tuple(
    name for name in inspect.signature(PushToHubMixin.push_to_hub).parameters if name != "self"
)
DOWNLOAD = tuple(
    n for n in inspect.signature(hf_hub_download).parameters if n not in ("repo_id", "filename")
)
Mode = Literal["blend", "replace"]
MODES = get_args(Mode)
#: Properties of attention that a mechanism may rely on, unless another mechanism removes them.
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
    """Base of all mechanism configs. Subclasses set `mechanism`, their registry name."""

    mechanism = ""

    def __post_init__(self):
        for f in fields(self):
            if f.metadata:
                check_field(type(self).__name__, f.name, getattr(self, f.name), f.metadata)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with the mechanism's name first."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"mechanism": self.mechanism, **to_json_values(values)}

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of attention (from `registry.STAGES`) that this config changes.

        They are the mechanism's stage and, depending on the settings, others.
        """
        return (get_mechanism(self.mechanism).stage,)

    @property
    def reads_earlier_queries(self) -> bool:
        """Whether it reads queries of earlier calls, which are remembered with a cache."""
        return False

    @property
    def depends_on_calls(self) -> bool:
        """Whether its result depends on how a text is cut into calls."""
        return False

    @property
    def breaks(self) -> frozenset[str]:
        """Properties (from `PROPERTIES`) that this mechanism removes for the others."""
        return frozenset({"linear_in_key"} if "score" in self.stages else ())

    @property
    def needs(self) -> dict[str, str]:
        """Properties (from `PROPERTIES`) that this mechanism relies on, with the reasons."""
        return {}

    def clash(self, other: MechanismConfig) -> str | None:
        """Return why this mechanism cannot be combined with another, or None."""
        return next((reason for name, reason in other.needs.items() if name in self.breaks), None)

    def unread(self, causal: Collection[bool]) -> str | None:
        """Return a warning about options that some attention layers ignore, or None.

        Args:
            causal: For each kind of attention layer, whether it is causal.
        """
        return None

    def for_model(self, config: object) -> MechanismConfig:
        """Return a copy with open settings taken from the model's config."""
        return self

    @classmethod
    def checked_record(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Check a saved dict and return the entries that are fields."""
        return data

    @staticmethod
    def from_dict(data: dict[str, Any]) -> MechanismConfig:
        """Make a config from the result of `to_dict`.

        Raises:
            ValueError: The mechanism or a field is unknown, or a value is out of range.
        """
        if not isinstance(data, dict) or not isinstance(data.get("mechanism"), str):
            raise ValueError(
                f"a mechanism's config is {short(data)}; allowed: a dict with the key 'mechanism'"
            )
        # `defined_in` only improves the message: the module is never imported.
        cls: Any = get_mechanism(data["mechanism"], data.get("defined_in")).config
        data = cls.checked_record(data)
        known = cls.__dataclass_fields__
        unknown = sorted(map(str, data.keys() - known.keys() - {"mechanism"}))
        if unknown:
            raise ValueError(
                f"{cls.__name__} has no field {short(unknown[0])}; allowed: {', '.join(sorted(known))}; a newer "
                f"hf_hyperattn may know it: {install('-U')}"
            )
        # JSON has no tuples, and a frozen dataclass must not hold mutable lists.
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        values.pop("mechanism", None)
        return cls(**values)


def to_json_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with lists instead of tuples and ranges."""
    return {k: list(v) if isinstance(v, tuple | range) else v for k, v in values.items()}


#: Mechanism configs by the name of their attention layer.
Overrides = dict[str, tuple[MechanismConfig, ...]]


@dataclass(frozen=True)
class HyperAttnConfig(KnownFields, PushToHubMixin):
    """All patches of a model: which mechanisms, in which layers, and in which mode.

    Args:
        mechanisms: Mechanism configs, at most one per stage.
        layers: Layers to patch, see `hf_hyperattn.patch_model`; None means all. Not saved in JSON
            once `hosts` is known.
        heads: Query heads to patch, given in the same ways; None means all.
        mode: "blend" starts as the identity (S + g·S_mechanism with g = 0), "replace" is the
            published operator.
        include_cross_attention: Whether cross-attention is patched too.
        hosts: Qualified names of the patched attention layers; filled in by `patch_model`.
        overrides: Mechanism configs of single attention layers, such as
            `{"model.layers.3.self_attn": [ConeConfig(gamma=2.0)]}`. Each replaces the config of its
            stage in that layer. In JSON only if there are any.
    """

    mechanisms: Sequence[MechanismConfig] = ()
    layers: Any = None
    heads: Any = None
    mode: Mode = "blend"
    include_cross_attention: bool = False
    hosts: Sequence[str] | None = None
    overrides: Mapping[str, Sequence[MechanismConfig]] | None = field(default=None, hash=False)

    def __post_init__(self):
        # The dataclass is frozen, so normalised values need object.__setattr__.
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
        # An empty choice patches nothing, which is surely a mistake.
        if self.heads == ():
            self._refuse("heads", "at least one head, or None for all")
        if self.hosts is not None:
            are_names = bool(self.hosts) and all(isinstance(name, str) for name in self.hosts)
            if not are_names or not self.mechanisms:
                self._refuse("hosts", "names of modules, at least one, with at least one mechanism")
            if len(set(self.hosts)) < len(self.hosts):
                self._refuse("hosts", "every name once")
        object.__setattr__(
            self, "overrides", checked_overrides(self.overrides, self.mechanisms, self.hosts)
        )
        # Each config may be valid alone and still clash with the others of its layer.
        for host in self.overrides or ():
            check_stages(self.mechanisms_at(host))

    def mechanisms_at(self, host: str) -> tuple[MechanismConfig, ...]:
        """Return the mechanism configs of one attention layer, in stage order."""
        return mechanisms_of(self.mechanisms, (self.overrides or {}).get(host, ()))

    @cached_property
    def for_any_host(self) -> HyperAttnConfig:
        """The part that holds for every attention layer: no layers, hosts or overrides."""
        config = copy.copy(self)
        for name in ("layers", "hosts", "overrides"):
            object.__setattr__(config, name, None)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values.

        `layers` is saved only before `hosts` is known.

        Raises:
            ValueError: `layers` or `heads` is a function, which JSON cannot hold.
        """
        for name in ("layers", "heads"):
            # Once the layers are known by name, the function that chose them is not needed any
            # more.
            if callable(getattr(self, name)) and not (name == "layers" and self.hosts is not None):
                raise ValueError(
                    f"HyperAttnConfig.{name} is a function, which JSON cannot hold; allowed: a list, a range, a "
                    "name, or the config of a patched model, which lists what was chosen"
                )
        values = {
            "format": FORMAT,
            "mechanisms": [m.to_dict() for m in self.mechanisms],
            # Names of layers are exact, so a rule for choosing them is dropped.
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
        return to_json_values(values)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HyperAttnConfig:
        """Make a config from the result of `to_dict`.

        Data from strangers is safe: wrong types, unknown keys and huge lists raise an error.

        Raises:
            ValueError: The data is not a valid config, or needs a newer version of this package.
        """
        if not isinstance(data, dict) or type(data.get("format")) is not int:
            raise ValueError(
                f"hyperattn config is {short(data)}; allowed: a dict with an integer 'format'"
            )
        # A newer format may mean something else by the same keys.
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
        # Check sizes first, so that a hostile file cannot make the checks below slow.
        for name in ("mechanisms", "heads", "layers", "hosts"):
            value = data.get(name)
            kinds = list | str if name in ("heads", "layers") else list
            if value is not None and (not isinstance(value, kinds) or len(value) > MOST):
                raise ValueError(
                    f"hyperattn config has {name}={short(value)}; allowed: a list of at most {MOST}"
                )
        values = {k: v for k, v in data.items() if k != "format"}
        values["mechanisms"] = [MechanismConfig.from_dict(m) for m in data.get("mechanisms") or []]
        overrides = data.get("overrides")
        # Convert only well-formed entries. `checked_overrides` reports the others unchanged.
        if isinstance(overrides, dict) and len(overrides) <= MOST:
            lists = {
                host: configs
                for host, configs in overrides.items()
                if isinstance(configs, list) and len(configs) <= len(STAGES)
            }
            values["overrides"] = overrides | {
                host: list(map(MechanismConfig.from_dict, configs))
                for host, configs in lists.items()
            }
        return cls(**values)

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs
    ) -> None:
        """Write `hyperattn_config.json` into a folder, atomically.

        Args:
            save_directory: The folder; created if necessary.
            push_to_hub: Also upload the config.
            kwargs: Arguments of `push_to_hub`, such as `repo_id`, `private` or `token`.

        Raises:
            TypeError: `push_to_hub` has no such argument.
            ValueError: An argument of the upload is given without push_to_hub=True.
        """
        check_known(
            "HyperAttnConfig.save_pretrained has no argument", kwargs, ("push_to_hub", *UPLOAD)
        )
        given = [name for name, value in kwargs.items() if value is not None]
        # The mixin's push_to_hub calls this method with max_shard_size, so that one is always
        # allowed.
        unused = next((name for name in given if name != "max_shard_size"), None)
        if unused is not None and not push_to_hub:
            raise ValueError(f"{unused} is for push_to_hub=True; leave it out")
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / CONFIG_NAME, json.dumps(self.to_dict(), indent=2) + "\n")
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", directory.name), **kwargs)

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike, **kwargs) -> HyperAttnConfig:
        """Read a config from a folder, a file or the Hub.

        Args:
            source: Folder, file or Hub id.
            kwargs: Arguments of `hf_hub_download`, such as `revision` or `token`.

        Raises:
            TypeError: `hf_hub_download` has no such argument.
            ValueError: There is no valid config, or `revision` or `subfolder` is given for a path
                on disk.
        """
        check_known("HyperAttnConfig.from_pretrained has no argument", kwargs, DOWNLOAD)
        path = Path(source)
        unused = next((name for name in ("revision", "subfolder") if kwargs.get(name)), None)
        if unused is not None and path.exists():
            raise ValueError(
                f"{unused} is for a Hub id, and {short(str(source))} is on the disk; leave it out"
            )
        # A path on disk wins over a Hub id of the same name.
        if path.is_dir():
            path = path / CONFIG_NAME
        elif not path.is_file():
            path = Path(hf_hub_download(str(source), CONFIG_NAME, **kwargs))
        return cls.from_dict(read_json(path))


def read_record(data: Any) -> HyperAttnConfig:
    """Make a config from a dict, with a cache.

    Loading a model reads its record several times, and checking a large one takes a while.
    """
    try:
        text = json.dumps(data, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        # The data is no JSON and has no cache key. `from_dict` raises the proper error.
        return HyperAttnConfig.from_dict(data)
    return _read_record(text)


@lru_cache(maxsize=64)
def _read_record(text: str) -> HyperAttnConfig:
    return HyperAttnConfig.from_dict(json.loads(text))


def checked_mechanisms(configs: Sequence[Any]) -> tuple[MechanismConfig, ...]:
    """Check mechanism configs and sort them by stage.

    Raises:
        ValueError: A value is not a mechanism config, or two of them cannot be combined.
    """
    for config in configs:
        if not isinstance(config, MechanismConfig):
            raise ValueError(
                f"HyperAttnConfig.mechanisms holds {short(config)}; allowed: mechanism configs such as ConeConfig()"
            )
    check_stages(configs)
    return tuple(sorted(configs, key=lambda c: STAGES.index(get_mechanism(c.mechanism).stage)))


def check_stages(mechanisms: Sequence[MechanismConfig]) -> None:
    """Check that mechanisms can be combined.

    Raises:
        ValueError: Two mechanisms change the same stage or clash; the message names both.
    """
    # A stage has room for one mechanism: two scores, for example, exclude each other.
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
            # Clashes are not symmetric: each mechanism knows only its own needs.
            if other is not config and (reason := config.clash(other)):
                raise ValueError(
                    f"{config.mechanism} and {other.mechanism} have no meaning together: {reason}; allowed: leave "
                    "one out"
                )


def checked_overrides(
    value: Any, mechanisms: Sequence[MechanismConfig], hosts: Sequence[str] | None
) -> Overrides | None:
    """Check `HyperAttnConfig.overrides` and return it with tuples, or None if empty.

    Args:
        value: The value to check.
        mechanisms: Mechanism configs of the whole model.
        hosts: Names of the patched attention layers; None before patching.

    Raises:
        ValueError: The value is no mapping of names to configs, names an unpatched layer, or has a
            mechanism twice or of an unused stage.
    """
    if value is None or (isinstance(value, Mapping) and not value):
        return None
    # The value may come from a damaged file, so check its form before anything else.
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
    # Before patching, the layers are unknown and every name is accepted.
    patched = value if hosts is None else set(hosts)
    unknown = next((h for h in value if h not in patched), None)
    if unknown is not None:
        raise ValueError(
            f"{owner} names {short(unknown)}, which is not in hosts; allowed: names in hosts"
        )
    # An override replaces the config of its stage, so that stage must be in use.
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
    """Return the mechanism configs of one attention layer.

    Args:
        mechanisms: Configs of the whole model.
        overrides: Configs of this layer; each replaces the one of its stage.
    """
    # The first stage is the mechanism's own one.
    by_stage = {m.stages[0]: m for m in overrides}
    return tuple(by_stage.get(m.stages[0], m) for m in mechanisms)
