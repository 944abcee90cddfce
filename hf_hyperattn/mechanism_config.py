"""The base of mechanism configs: frozen dataclasses whose fields are made by `option`, checked, and plain JSON."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .address import install
from .fields import KnownFields, check_field, short
from .registry import get_mechanism

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
        return {"mechanism": self.mechanism, **{f.name: plain(getattr(self, f.name)) for f in fields(self)}}

    @property
    def stages(self) -> tuple[str, ...]:
        """What of attention it changes, out of `registry.STAGES`: its mechanism's stage, and as configured, others."""
        return (get_mechanism(self.mechanism).stage,)

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
        broken = next((reason for name, reason in other.needs.items() if name in self.breaks), None)
        return self.refuses.get(other.mechanism, broken)

    @property
    def refuses(self) -> dict[str, str]:
        """Mechanisms that it has no meaning together with, by name, each with the reason."""
        return {}

    def for_model(self, config: object) -> MechanismConfig:
        """This config with what it leaves to the model's config filled in; as it is where it leaves nothing."""
        return self

    @staticmethod
    def from_dict(data: dict[str, Any]) -> MechanismConfig:
        """The inverse of `to_dict`; unknown mechanisms, unknown fields and values out of range are refused."""
        if not isinstance(data, dict) or not isinstance(data.get("mechanism"), str):
            raise ValueError(
                f"a mechanism's config is {short(data)}; allowed: a dict with the key 'mechanism'"
            )
        cls = get_mechanism(data["mechanism"]).config
        known = {f.name for f in fields(cls)}
        unknown = sorted(map(str, set(data) - known - {"mechanism"}))
        if unknown:
            raise ValueError(
                f"{cls.__name__} has no field {short(unknown[0])}; allowed: {', '.join(sorted(known))}; a newer "
                f"hf_hyperattn may know it: {install('-U')}"
            )
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "mechanism"})


def plain(value: Any) -> Any:
    """A value as JSON has it: lists for tuples and ranges."""
    return list(value) if isinstance(value, tuple | range) else value
