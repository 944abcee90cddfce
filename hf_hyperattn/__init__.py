"""Hierarchy-aware attention for any pretrained Transformers model. Importing this package registers its names."""

from typing import TYPE_CHECKING

from . import address, functional, geometry, testing
from .config import HyperAttnConfig, MechanismConfig
from .config.registry import lookup
from .hierarchy import Hierarchy
from .integration import (
    HierarchicalCache,
    HierarchyCollator,
    HyperLoraConfig,
    LogGates,
    convert,
    describe,
    freeze_base,
    fresh_patch,
    list_mechanisms,
    lora_config,
    parameter_groups,
    patch_model,
    set_backend,
    unpatch_model,
)
from .integration.architectures.hat import (
    HatEncoderConfig,
    HatForMaskedLM,
    HatForSequenceClassification,
    HatForTokenClassification,
    HatModel,
)
from .integration.architectures.hsa_encoder import (
    HsaEncoder,
    HsaEncoderConfig,
    HsaEncoderForSequenceClassification,
)
from .mechanisms.collaborative.config import CollaborativeConfig
from .mechanisms.cone.config import ConeConfig
from .mechanisms.hat.config import HatConfig
from .mechanisms.head_fusion.config import HeadFusionConfig
from .mechanisms.hsa.config import HsaConfig
from .mechanisms.hype.config import HypeConfig
from .mechanisms.hyperbolic.config import HyperbolicConfig
from .mechanisms.hyperbolic.module import HyperbolicAttention
from .mechanisms.mkl.config import MklConfig
from .mechanisms.scores import ScoreConfig, score
from .mechanisms.sparse.config import SparseConfig
from .mechanisms.talking_heads.config import TalkingHeadsConfig
from .mechanisms.trilinear.config import TrilinearConfig

__version__ = address.VERSION

__all__ = [
    "CollaborativeConfig",
    "ConeConfig",
    "HatConfig",
    "HatEncoderConfig",
    "HatForMaskedLM",
    "HatForSequenceClassification",
    "HatForTokenClassification",
    "HatModel",
    "HeadFusionConfig",
    "HierarchicalCache",
    "Hierarchy",
    "HierarchyCollator",
    "HsaConfig",
    "HsaEncoder",
    "HsaEncoderConfig",
    "HsaEncoderForSequenceClassification",
    "HypeConfig",
    "HyperAttnConfig",
    "HyperLoraConfig",
    "HyperbolicAttention",
    "HyperbolicConfig",
    "LogGates",
    "MechanismConfig",
    "MklConfig",
    "ScoreConfig",
    "SparseConfig",
    "TalkingHeadsConfig",
    "TrilinearConfig",
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
    "score",
    "set_backend",
    "testing",
    "unpatch_model",
]

if not TYPE_CHECKING:  # a type checker sees the names above, and flags others
    __getattr__ = lookup(__name__, lambda mechanism: {mechanism.config.__name__: mechanism.config})
