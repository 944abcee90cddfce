"""Collaborative heads of a lower rank: a conversion that replaces query and key projections.

Importing this package registers the conversion with `hf_hyperattn.convert`.
"""

from . import conversion  # noqa: F401  registers it
