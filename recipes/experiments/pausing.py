"""A pause of whatever experiment runs, between two steps: as long as a file is there, or until a signal; and locks."""

from __future__ import annotations

import time
from pathlib import Path

#: While this file exists, nothing is computed.
PAUSE = Path(__file__).resolve().parents[2] / "outputs" / "pause"


def wait_while_paused(every: float = 2.0) -> None:
    """Return at once, or when the file is gone; asked before every run and every training step.

    Args:
        every: seconds between two looks.
    """
    while PAUSE.exists():
        time.sleep(every)


def pause() -> None:
    """Ask all experiments of this checkout to wait."""
    PAUSE.parent.mkdir(exist_ok=True)
    PAUSE.touch()


def resume() -> None:
    """Let them go on."""
    PAUSE.unlink(missing_ok=True)


def only_one(name: str):
    """A lock of this checkout, held as long as what is returned is kept.

    Args:
        name: of an experiment, or "queue".

    Raises:
        ValueError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return None
    PAUSE.parent.mkdir(exist_ok=True)
    file = (PAUSE.parent / f"{name}.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(f"another process of this checkout runs {name}; allowed: one") from error
    return file
