"""The `hyperattn` command. A sub-command is one module of this package, listed in `command.COMMANDS`."""

from .command import main

__all__ = ["main"]
