"""Tie attention over any trees.

This module shows how `tying="both"` runs in one pass up and one down, and how keys are tied
under any mask.
"""
