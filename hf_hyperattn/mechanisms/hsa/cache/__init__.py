"""Decoding with key tying: a cache that keeps the means of windows, and what is read of it."""
