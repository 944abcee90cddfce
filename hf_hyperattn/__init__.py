"""Hierarchy-aware attention for any pretrained Transformers model. Importing this package registers its names."""

from . import functional
from .config import HyperAttnConfig, MechanismConfig
from .integration import describe, list_mechanisms, patch_model, unpatch_model
from .registry import MECHANISMS

__version__ = "0.1.0"

__all__ = [
    "HyperAttnConfig",
    "MechanismConfig",
    "describe",
    "functional",
    "list_mechanisms",
    "patch_model",
    "unpatch_model",
]


def __getattr__(name: str):
    for mechanism in MECHANISMS.values():
        if mechanism.config.__name__ == name:
            return mechanism.config
    raise AttributeError(f"hf_hyperattn has no {name!r}; it has: {', '.join(__dir__())}")


def __dir__():
    return sorted({*__all__, *(m.config.__name__ for m in MECHANISMS.values())})
