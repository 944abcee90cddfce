"""Rules that no kernel computes: they run under masks.

Each module is imported when a config names its rule.
"""
