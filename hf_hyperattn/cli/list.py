"""`hyperattn list`: mechanisms, from a file of the package; this module imports nothing of it, and so no torch."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from typing import Any

from hyperattn_cli import mechanisms, nearest

#: Lines of one mechanism: label, key.
LINES = (
    ("use it when", "use_when"), ("cost", "cost"), ("exactness", "exactness"), ("changes", "stage"),
    ("brought by", "how"), ("by name", "names"), ("config", "config"), ("paper", "paper"),
)  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Print the table, or one mechanism; raises ValueError for a name that is none."""
    known = mechanisms()
    if args.mechanism is None:
        print(json.dumps(known, indent=2, ensure_ascii=False) if args.json else table(known))
        return
    name = next((n for n, about in known.items() if args.mechanism in (n, *about["names"])), None)
    if name is None:
        raise ValueError(
            f"no mechanism {args.mechanism!r}; allowed: {', '.join(known)}{nearest(args.mechanism, known)}"
        )
    print(json.dumps({name: known[name]}, indent=2, ensure_ascii=False) if args.json else one(name, known[name]))


def table(known: dict[str, dict[str, Any]]) -> str:
    """Name, cost and when to use it, one paragraph a mechanism."""
    width = max(map(len, known)) + 2
    parts = [
        folded(name.ljust(width), f"{about['use_when']}. Cost: {about['cost']}.") for name, about in known.items()
    ]
    return "\n".join([*parts, "", "Settings and defaults of one: hyperattn list NAME"])


def one(name: str, about: dict[str, Any]) -> str:
    """All that is known about one mechanism."""
    values = [(label, about[key]) for label, key in LINES]
    values = [(label, ", ".join(value) if isinstance(value, list) else value) for label, value in values]
    values.append(("settings", ", ".join(f"{k}={json.dumps(v)}" for k, v in about["defaults"].items())))
    return "\n".join([name, *(folded(f"  {label}".ljust(15), value) for label, value in values if value)])


def folded(label: str, text: str) -> str:
    """Text behind a label, its further lines beneath itself."""
    width = max(50, min(119, shutil.get_terminal_size().columns))
    return textwrap.fill(text, width, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False)
