"""Patch a model in place, record the patch in its configs, describe it and undo it."""
