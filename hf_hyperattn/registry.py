"""Mechanisms by name. A room registers itself in the last line of its `__init__`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .address import install
from .fields import short

#: What a mechanism may change, in the order in which the changes are applied.
STAGES = ("score", "bias", "mixing", "structure", "aggregation", "fusion")


@dataclass(frozen=True)
class Mechanism:
    """One published way to change attention.

    Args:
        name: its key in configs, such as "cone".
        stage: one of `STAGES`.
        paper: title and arXiv number.
        config: its `MechanismConfig` class.
        layer: `layer(config, host)` builds the module with its parameters for one host, see `mechanisms.base`.
        functions: its faces in `hf_hyperattn.functional`, by name.
        names: what `attn_implementation=` accepts for it, each with the config meant.
        cross_attention: whether queries and keys may come from different sequences.
        reads_hierarchy: for the stage "structure": whether it reads the `hierarchy=` that a model is called with.
    """

    name: str
    stage: str
    paper: str
    config: type
    layer: Callable
    functions: dict[str, Callable] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    cross_attention: bool = True
    reads_hierarchy: bool = True

    @property
    def takes_hierarchy(self) -> bool:
        """Whether models with this mechanism take `hierarchy=`."""
        return self.stage == "structure" and self.reads_hierarchy


MECHANISMS: dict[str, Mechanism] = {}
LISTENERS: list[Callable[[Mechanism], None]] = []


def register(mechanism: Mechanism) -> Mechanism:
    """Make a mechanism known. A second one of the same name, or an unknown stage, is refused."""
    if mechanism.stage not in STAGES:
        raise ValueError(
            f"mechanism {mechanism.name!r} has stage={mechanism.stage!r}; allowed: {', '.join(STAGES)}"
        )
    if mechanism.name in MECHANISMS:
        raise ValueError(f"mechanism {mechanism.name!r} is registered already; choose another name")
    MECHANISMS[mechanism.name] = mechanism
    for listener in LISTENERS:
        listener(mechanism)
    return mechanism


def named_configs() -> dict[str, Any]:
    """What `attn_implementation=` accepts, each name with the config meant."""
    return {name: config for m in MECHANISMS.values() for name, config in m.names.items()}


def on_register(listener: Callable[[Mechanism], None]) -> None:
    """Call a function with every mechanism: with those there are, and with each that is registered later."""
    for mechanism in MECHANISMS.values():
        listener(mechanism)
    LISTENERS.append(listener)


def get_mechanism(name: str, defined_in: object = None) -> Mechanism:
    """The mechanism of that name, or an error that lists the names there are, or says what defined it when saved."""
    if name not in MECHANISMS:
        if isinstance(defined_in, str):
            module = defined_in.partition(":")[0]
            code = (
                "run the script that" if module == "__main__" else f"import {short(module)}, which"
            )
            raise ValueError(
                f"score {short(name)} is not registered; first {code} defined it ({short(defined_in)}) when this was "
                "saved: code is never imported for you"
            )
        raise ValueError(
            f"mechanism {short(name)} is unknown; allowed: {', '.join(sorted(MECHANISMS))}; for others, import the "
            f"package that registers them first; a newer hf_hyperattn may know it: {install('-U')}"
        )
    return MECHANISMS[name]


def lookup(module: str, names: Callable[[Mechanism], dict]) -> Callable[[str], object]:
    """The `__getattr__` of a module that also has, under their `names`, parts of mechanisms from other packages."""

    def __getattr__(name: str):
        parts = {
            n: part for mechanism in MECHANISMS.values() for n, part in names(mechanism).items()
        }
        if name not in parts:
            public = sorted({*sys.modules[module].__all__, *parts})
            raise AttributeError(f"{module} has no {name!r}; it has: {', '.join(public)}")
        return parts[name]

    return __getattr__
