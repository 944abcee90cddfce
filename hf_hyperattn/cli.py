"""The `hyperattn` command; it lives in the package `hyperattn_cli`."""

import sys

from hyperattn_cli import build_parser, main

__all__ = ["build_parser", "main"]

if __name__ == "__main__":
    sys.exit(main())
