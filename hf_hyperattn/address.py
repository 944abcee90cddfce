"""What this package is called, its version, and where it is to be had: errors, cards and the build read it here.

Standard library alone: `hub_cards` runs this file without importing the package.
"""

NAME = "hf-hyperattn"
VERSION = "0.1.0"
#: The address of the repository, for `git clone` and pip; empty while there is none.
SOURCE = ""
#: Whether the package index holds it. While it does not, nobody is sent there: the name could be taken by anybody.
RELEASED = False


def install(*more: str) -> str:
    """Return the command that installs this package, and `more`: other packages, or options such as "-U"."""
    if RELEASED or SOURCE:
        return " ".join(["pip install", NAME if RELEASED else f"git+{SOURCE}", *more])
    return " ".join(
        ["pip install", ".", *more, "# in a clone of hf_hyperattn: no package index has it yet"]
    )
