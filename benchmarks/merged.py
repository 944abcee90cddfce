"""Rows of a result measured in pieces: what a run did not measure again is kept."""

from __future__ import annotations

import json
from pathlib import Path

from common import environment

#: What tells one row from another.
NAMES = ("heads", "kv_heads", "length", "kind", "what")
#: Of the environment, what must be the same for rows to stand in one table.
SAME = ("chip", "threads", "torch")


def merged(path: str | None, rows: list[dict]) -> list[dict]:
    """The rows of the JSON at `path`, if there is one, with `rows` in place of those of the same name; by length.

    Raises:
        SystemExit: the file is of another chip, torch, or number of threads.
    """
    if not path or not Path(path).exists():
        return rows
    before, here = json.loads(Path(path).read_text()), environment()
    other = [name for name in SAME if before["environment"][name] != here[name]]
    if other:
        raise SystemExit(
            f"{path} was measured with another {', '.join(other)}; write to another file"
        )
    name = lambda r: tuple(r.get(n) for n in NAMES)
    mine = {name(r) for r in rows}
    found = [r for r in before["rows"] if name(r) not in mine] + rows
    return sorted(found, key=lambda r: (r.get("heads", 0), r["length"]))
