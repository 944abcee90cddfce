"""Configs: of mechanisms and models, their fields, the choice of layers and heads, the registry."""

from .configs import (
    CONFIG_NAME,
    FORMAT,
    MODES,
    HyperAttnConfig,
    MechanismConfig,
    Mode,
    mechanisms_of,
    option,
    read_record,
)

__all__ = [
    "CONFIG_NAME",
    "FORMAT",
    "MODES",
    "HyperAttnConfig",
    "MechanismConfig",
    "Mode",
    "mechanisms_of",
    "option",
    "read_record",
]
