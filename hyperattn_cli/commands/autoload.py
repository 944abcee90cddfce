"""`hyperattn autoload`: register names in programs that cannot be edited.

It writes or removes a .pth file in site-packages, which Python reads when it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path

from hf_hyperattn.utils.files import write_atomically
from hf_hyperattn_autoload import VARIABLE

#: Code that Python runs when it starts. If the package is gone, it prints one line on stderr: an
#: exception here would show a traceback in every program of the environment.
CODE = f"""\
try:
    import hf_hyperattn_autoload
    hf_hyperattn_autoload.register()
except Exception as error:
    if sys.stderr and not hasattr(sys, "_hf_hyperattn_absent"):  # some Pythons run .pth files twice
        sys._hf_hyperattn_absent = True
        print("{VARIABLE}=1, but hf_hyperattn is not available:", error, file=sys.stderr)
"""
LINE = f"import os, sys; exec({CODE!r}) if os.environ.get({VARIABLE!r}) == '1' else None\n"


def get_path() -> Path:
    """Return the path of the .pth file, whether it exists or not."""
    return Path(sysconfig.get_path("purelib")) / "hf_hyperattn_autoload.pth"


def run(args: argparse.Namespace) -> None:
    """Write, remove or report the file; raise OSError if it is not writable."""
    file = get_path()
    if args.action == "on":
        # Another Python may start and read the file at this moment.
        write_atomically(file, LINE)
    elif args.action == "off":
        file.unlink(missing_ok=True)
    state = {"on": os.path.lexists(file), "file": str(file), VARIABLE: os.environ.get(VARIABLE)}
    text = (
        f"autoload is {'on' if state['on'] else 'off'}: {file}\n"
        f"{VARIABLE} is {state[VARIABLE] or 'not set'}; names are registered if it is 1 and autoload is on"
    )
    print(json.dumps(state, indent=2) if args.json else text)
