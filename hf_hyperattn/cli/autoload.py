"""Let HF_HYPERATTN_AUTOLOAD=1 register the names in programs that cannot be edited.

`on` writes one file, hf_hyperattn_autoload.pth, into the site-packages of this Python; Python reads it when it starts.
With HF_HYPERATTN_AUTOLOAD=1 the names are then registered as soon as Transformers is loaded, without an import of this
package; otherwise nothing happens. `off` removes the file, `status` says what holds now.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

from hf_hyperattn_autoload import VARIABLE

HELP = "register the names in programs that cannot be edited: on, off, status"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `hyperattn autoload`."""
    parser.add_argument("action", choices=("on", "off", "status"), help="what to do (default: status)", nargs="?",
                        default="status")  # fmt: skip


def path() -> Path:
    """The file, whether it is there or not."""
    return Path(sysconfig.get_path("purelib")) / "hf_hyperattn_autoload.pth"


def run(args: argparse.Namespace) -> None:
    """Write, remove, or say; raises OSError where site-packages cannot be written."""
    file = path()
    if args.action == "on":
        new = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            new.write_text(LINE, encoding="ascii")
            os.replace(new, file)  # whole or not at all: Python may start meanwhile
        finally:
            new.unlink(missing_ok=True)
    elif args.action == "off":
        file.unlink(missing_ok=True)
    print(f"autoload is {'on' if os.path.lexists(file) else 'off'}: {file}")
    print(
        f"{VARIABLE} is {os.environ.get(VARIABLE) or 'not set'}; the names are registered where it is 1 and autoload on"
    )
