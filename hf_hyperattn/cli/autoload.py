"""`hyperattn autoload`: registers the names in programs that cannot be edited, by a .pth file in site-packages."""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path

from hf_hyperattn_autoload import VARIABLE

from ..files import write_atomically

#: What Python runs when it starts. Where the package is gone there is one line on stderr: what is raised here would
#: show up in every program of the environment.
CODE = f"""\
try:
    import hf_hyperattn_autoload
    hf_hyperattn_autoload.register()
except Exception as error:
    if sys.stderr and not hasattr(sys, "_hf_hyperattn_absent"):  # some Pythons run this twice
        sys._hf_hyperattn_absent = True
        print("{VARIABLE}=1, but hf_hyperattn is not available:", error, file=sys.stderr)
"""
LINE = f"import os, sys; exec({CODE!r}) if os.environ.get({VARIABLE!r}) == '1' else None\n"


def path() -> Path:
    """The file, whether it is there or not."""
    return Path(sysconfig.get_path("purelib")) / "hf_hyperattn_autoload.pth"


def run(args: argparse.Namespace) -> None:
    """Write, remove, or say; raises OSError where site-packages cannot be written."""
    file = path()
    if args.action == "on":
        write_atomically(file, LINE)  # Python may start meanwhile
    elif args.action == "off":
        file.unlink(missing_ok=True)
    state = {"on": os.path.lexists(file), "file": str(file), VARIABLE: os.environ.get(VARIABLE)}
    text = (
        f"autoload is {'on' if state['on'] else 'off'}: {file}\n"
        f"{VARIABLE} is {state[VARIABLE] or 'not set'}; the names are registered where it is 1 and autoload on"
    )
    print(json.dumps(state, indent=2) if args.json else text)
