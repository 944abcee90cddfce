"""All that knows Transformers, PEFT and the Hub. Importing it registers the names and installs the guard."""

from . import (
    adapters,  # noqa: F401  wraps a method of PEFT's
    collaborative,  # noqa: F401  registers its conversion
    config_hooks,  # noqa: F401  wraps what configs say of names
    guard,  # noqa: F401  wraps four methods of PreTrainedModel
    saving,  # noqa: F401  wraps a fifth
)
from .collator import HierarchyCollator
from .converting import convert
from .describe import describe, list_mechanisms
from .hierarchical_cache import HierarchicalCache
from .names import register_names
from .patching import patch_model, unpatch_model
from .training import freeze_base, lora_config, parameter_groups

register_names()

__all__ = [
    "HierarchicalCache",
    "HierarchyCollator",
    "convert",
    "describe",
    "freeze_base",
    "list_mechanisms",
    "lora_config",
    "parameter_groups",
    "patch_model",
    "unpatch_model",
]
