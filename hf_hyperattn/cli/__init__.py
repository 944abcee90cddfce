"""The `hyperattn` command. A sub-command is one module of this package, listed in `main.COMMANDS`."""

from .main import main

__all__ = ["main"]
