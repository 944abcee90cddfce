"""The tested versions of torch, Transformers and PEFT. Only this file states them.

`constraints-lowest.txt` pins the oldest ones, `constraints.txt` the newest ones that CI runs. A
test compares them.
"""

from __future__ import annotations

import functools
import logging
from importlib.metadata import version

from packaging.version import Version

logger = logging.getLogger("hf_hyperattn")

#: The oldest and the newest version that the tests ran with. Raise the newest once `make
#: test-newest` passes with it.
TESTED = {
    "torch": ("2.11.0", "2.14.1"),
    "transformers": ("5.17.0", "5.24.0"),
    "peft": ("0.21.0", "0.21.2"),
}


def name_tested(*packages: str) -> str:
    """Return the tested versions as text, such as "peft 0.21.0 to 0.21.2"."""
    return ", ".join(f"{package} {' to '.join(TESTED[package])}" for package in packages)


@functools.cache
def warn_of_newer_versions() -> None:
    """Warn once in a process if a package is newer than the newest tested version.

    Called when a model is first patched or first runs by a name, not at import time.
    """
    # Local parts ("+cpu") and pre-releases of a tested version count as that version.
    newer = [
        name
        for name, (_, newest) in TESTED.items()
        if Version(version(name)).release > Version(newest).release
    ]
    if newer:
        logger.warning(
            "hf_hyperattn has not been tested with %s; patched models may compute something else without an error. "
            "Compare with the original model, or install a tested version: %s",
            " and ".join(f"{name} {version(name)}" for name in newer),
            name_tested(*newer),
        )
