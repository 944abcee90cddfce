"""What the sub-commands of `hyperattn` do, one a module; their options stand in the module `hyperattn_cli`."""

from hyperattn_cli import build_parser, main

__all__ = ["build_parser", "main"]
