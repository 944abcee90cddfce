"""The registry of mechanisms by name.

Every package in `mechanisms` registers itself in the last line of its `__init__`; other packages
can do the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..address import install
from ..utils.text import short

#: Parts of attention that a mechanism can change, in the order in which the changes are applied.
STAGES = ("score", "bias", "mixing", "structure", "aggregation", "fusion")


@dataclass(frozen=True)
class Mechanism:
    """One published way to change attention.

    Args:
        name: Key in configs, such as "cone".
        stage: One of `STAGES`.
        paper: Title and arXiv number.
        config: Its `MechanismConfig` class.
        layer: `layer(config, host)` builds the module with the parameters of one attention layer,
            see `mechanisms.base`.
        functions: Functions to expose in `hf_hyperattn.functional`, by name.
        names: Values of `attn_implementation=` that select the mechanism, each with its config.
        cross_attention: Whether queries and keys may come from different sequences.
        reads_hierarchy: For the stage "structure": whether it reads the `hierarchy=` argument of
            the model.
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


#: All registered mechanisms by name.
MECHANISMS: dict[str, Mechanism] = {}
#: Functions that are called with every mechanism, see `on_register`.
LISTENERS: list[Callable[[Mechanism], None]] = []


def register(mechanism: Mechanism) -> Mechanism:
    """Register a mechanism and return it.

    Raises:
        ValueError: The stage is unknown, or the name is registered already.
    """
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
    """Return the values of `attn_implementation=`, each with its config."""
    return {name: config for m in MECHANISMS.values() for name, config in m.names.items()}


def on_register(listener: Callable[[Mechanism], None]) -> None:
    """Call a function with every mechanism, now and in the future.

    Args:
        listener: Called at once with all registered mechanisms, and later with each new one.
    """
    for mechanism in MECHANISMS.values():
        listener(mechanism)
    LISTENERS.append(listener)


def get_mechanism(name: str, defined_in: object = None) -> Mechanism:
    """Return a mechanism by name.

    Args:
        name: The name.
        defined_in: Module that defined the score when the config was saved, "module:name"; for the
            message only.

    Raises:
        ValueError: The name is unknown. The message lists the known names, or says what to import.
    """
    if name not in MECHANISMS:
        if isinstance(defined_in, str):
            # A checkpoint may come from a stranger, so its module is named but never imported here.
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
    """Make a module `__getattr__` that finds parts of mechanisms of other packages.

    Args:
        module: Name of the module.
        names: Returns the parts of a mechanism that belong into the module, by name.
    """

    def __getattr__(name: str):
        parts = {
            n: part for mechanism in MECHANISMS.values() for n, part in names(mechanism).items()
        }
        if name not in parts:
            public = sorted({*sys.modules[module].__all__, *parts})
            raise AttributeError(f"{module} has no {name!r}; it has: {', '.join(public)}")
        return parts[name]

    return __getattr__
