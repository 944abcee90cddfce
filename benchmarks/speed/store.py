"""Result files: rows by key, with the machine they were measured on."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import torch
from common import cpu, environment

from hf_hyperattn.utils.files import write_atomically

FOLDER = Path(__file__).resolve().parents[1] / "results"
#: What must be the same for rows to stand in one file.
SAME = ("chip", "torch", "transformers")


def machine(gpu: bool = True) -> dict:
    """Chip and versions; threads are said row by row. The chip is the GPU where there is one and `gpu`."""
    found = {k: v for k, v in environment().items() if k not in ("threads", "date")}
    return found | {
        "chip": torch.cuda.get_device_name() if gpu and torch.cuda.is_available() else cpu()
    }


def default_path(what: str = "attention", gpu: bool = True) -> Path:
    """One file for each chip."""
    chip = re.sub(r"\W+", "-", machine(gpu)["chip"].lower()).strip("-")
    return FOLDER / f"{what}-{chip}.json"


def commit() -> str:
    """The commit that is measured, with a plus where the engines or mechanisms differ from it; "" outside git."""
    root = FOLDER.parents[1]

    def git(*words):
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(
            git("status", "--porcelain", "hf_hyperattn")
        )
    except OSError:
        return ""


class Store:
    """The rows of one file, written after every row.

    Raises:
        ValueError: the file's rows were measured on another machine or with other versions.
    """

    def __init__(self, path: Path, fresh: bool = False, gpu: bool = True):
        self.path, self.commit = path, commit()
        self.result = {"environment": machine(gpu), "rows": {}}
        if path.exists() and not fresh:
            found = json.loads(path.read_text())
            other = [
                k for k in SAME if found["environment"].get(k) != self.result["environment"][k]
            ]
            if other:
                raise ValueError(
                    f"{path} was measured with another {', '.join(other)}; write elsewhere with --json, or start "
                    "again with --fresh"
                )
            self.result = found

    @property
    def rows(self) -> dict[str, dict]:
        """Results by key."""
        return self.result["rows"]

    def add(self, row: dict) -> None:
        """Keep a row; an earlier one of the same key goes."""
        self.rows[row["key"]] = row | {"commit": self.commit, "date": time.strftime("%Y-%m-%d")}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(self.result, indent=1) + "\n")
