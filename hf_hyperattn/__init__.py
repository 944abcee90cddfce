"""Hierarchy-aware attention for any pretrained Transformers model. Importing this package registers its names."""

from . import address, functional, geometry
from .config import HyperAttnConfig, MechanismConfig
from .hierarchy import Hierarchy
from .integration import (
    HierarchicalCache,
    HierarchyCollator,
    convert,
    describe,
    freeze_base,
    fresh_patch,
    list_mechanisms,
    lora_config,
    parameter_groups,
    patch_model,
    unpatch_model,
)
from .integration.hat import (
    HatEncoderConfig,
    HatForMaskedLM,
    HatForSequenceClassification,
    HatForTokenClassification,
    HatModel,
)
from .integration.hsa_encoder import HsaEncoder, HsaEncoderConfig, HsaEncoderForSequenceClassification
from .mechanisms.hyperbolic.module import HyperbolicAttention
from .registry import MECHANISMS

__version__ = address.VERSION

__all__ = [
    "HatEncoderConfig",
    "HatForMaskedLM",
    "HatForSequenceClassification",
    "HatForTokenClassification",
    "HatModel",
    "HierarchicalCache",
    "Hierarchy",
    "HierarchyCollator",
    "HsaEncoder",
    "HsaEncoderConfig",
    "HsaEncoderForSequenceClassification",
    "HyperAttnConfig",
    "HyperbolicAttention",
    "MechanismConfig",
    "convert",
    "describe",
    "freeze_base",
    "fresh_patch",
    "functional",
    "geometry",
    "list_mechanisms",
    "lora_config",
    "parameter_groups",
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
