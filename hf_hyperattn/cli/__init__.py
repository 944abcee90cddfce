"""The sub-commands of `hyperattn`, one per module. `hyperattn_cli` defines the options."""

from hyperattn_cli import build_parser, main

__all__ = ["build_parser", "main"]
