"""The name, version and address of this package, for errors, cards and the build.

It uses only the standard library: `hub_cards` runs this file without importing the package.
"""

NAME = "hf-hyperattn"
VERSION = "0.1.0"
#: Address of the repository for `git clone` and pip; empty while there is none.
SOURCE = ""
#: Whether the package index has this package. Until then, no message may suggest to install it from
#: there: anyone could register the name.
RELEASED = False


def install(*more: str) -> str:
    """Return the command that installs this package.

    Args:
        more: Other packages, or options such as "-U".
    """
    if RELEASED or SOURCE:
        return " ".join(["pip install", NAME if RELEASED else f"git+{SOURCE}", *more])
    return " ".join(
        ["pip install", ".", *more, "# in a clone of hf_hyperattn: no package index has it yet"]
    )
