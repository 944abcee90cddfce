"""Key tying over windows: an operator with a compiled kernel for CPUs and tiles of plain torch for any device."""
