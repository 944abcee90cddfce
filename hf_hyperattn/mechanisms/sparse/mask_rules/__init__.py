"""Rules that no kernel computes. They become masks, and each module is imported when a config names its rule."""
