"""Random calls of the compiled kernels under sanitizers and between guard pages: `python -m tests.fuzz.run --help`."""
