"""All that knows Transformers, PEFT and the Hub. Importing it registers the names and installs the guard."""

from . import guard  # noqa: F401  wraps four methods of PreTrainedModel
from .describe import describe, list_mechanisms
from .names import register_names
from .patching import patch_model, unpatch_model

register_names()

__all__ = ["describe", "list_mechanisms", "patch_model", "unpatch_model"]
