"""Tie attention over any trees.

A reader learns here how `tying="both"` runs in one pass up and one down, and how keys are tied
under any mask.
"""
