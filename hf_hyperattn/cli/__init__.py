"""The sub-commands of `hyperattn`, one per module; options are in `hyperattn_cli`."""

from hyperattn_cli import build_parser, main

__all__ = ["build_parser", "main"]
