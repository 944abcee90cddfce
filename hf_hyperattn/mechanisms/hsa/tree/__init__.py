"""Attention tied over trees: `tying="both"` in one pass up and one down, and key tying of any tree under any mask."""
