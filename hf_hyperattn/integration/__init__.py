"""The integration with Transformers, PEFT and the Hub: everything that depends on these libraries.

Importing this package registers the names for `attn_implementation=` and installs the hooks.
"""

from .adapters import (
    operations,  # noqa: F401  wraps methods of PEFT's
)
from .adapters.hyper_lora import HyperLoraConfig
from .architectures import (
    collaborative,  # noqa: F401  registers its conversion
)
from .attention.call import set_backend
from .attention.hierarchical_cache import HierarchicalCache
from .loading import (
    config_hooks,  # noqa: F401  wraps what configs say of names
    continuous_batching,  # noqa: F401  wraps what serves several requests in one step
    hooks,  # noqa: F401  wraps methods of PreTrainedModel
    saving,  # noqa: F401  wraps saving and loading
)
from .loading.names import register_names
from .loading.record_check import fresh_patch
from .patching.conversions import convert
from .patching.describe import describe, list_mechanisms
from .patching.patch import patch_model, unpatch_model
from .patching.wrapping import warn_of_changes
from .training.collator import HierarchyCollator
from .training.log_gates import LogGates
from .training.lora import lora_config
from .training.parameters import freeze_base, parameter_groups

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
