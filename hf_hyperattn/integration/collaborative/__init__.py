"""Collaborative heads at a lower rank: a conversion of the projections of queries and keys."""

from . import conversion  # noqa: F401  registers it
