"""The integration with Transformers, PEFT and the Hub: everything that depends on these libraries.

Importing this package registers the names for `attn_implementation=` and installs the hooks.
"""

from . import (
    adapters,  # noqa: F401  wraps a method of PEFT's
    collaborative,  # noqa: F401  registers its conversion
    config_hooks,  # noqa: F401  wraps what configs and continuous batching say of names
    hooks,  # noqa: F401  wraps methods of PreTrainedModel
    saving,  # noqa: F401  wraps saving and loading
)
from .call import set_backend
from .collator import HierarchyCollator
from .conversions import convert
from .describe import describe, list_mechanisms
from .hierarchical_cache import HierarchicalCache
from .hyper_lora import HyperLoraConfig
from .log_gates import LogGates
from .lora import lora_config
from .names import register_names
from .patching import patch_model, unpatch_model
from .record_check import fresh_patch
from .training import freeze_base, parameter_groups
from .wrapping import warn_of_changes

register_names()
# Last: every module above has installed its wrappers by now.
warn_of_changes()

__all__ = [
    "HierarchicalCache",
    "HierarchyCollator",
    "HyperLoraConfig",
    "LogGates",
    "convert",
    "describe",
    "freeze_base",
    "fresh_patch",
    "list_mechanisms",
    "lora_config",
    "parameter_groups",
    "patch_model",
    "set_backend",
    "unpatch_model",
]
