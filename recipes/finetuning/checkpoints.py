"""The folder of a run: which recipe it holds, where the run stands, and which checkpoint is whole."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

from transformers import TrainerCallback

from hf_hyperattn.utils.files import write_atomically

from .settings import GROUPS, plain

RECIPE, RESULTS, WHOLE = "recipe.json", "results.json", "whole"
#: Settings that a run may be resumed with otherwise than it was begun: they change no weight.
FREE = {("trainer", n) for n in ("save_every", "held_out_every", "log_every", "merged", "output")}


class MarkWhole(TrainerCallback):
    """Marks a checkpoint once all processes have written all of it; a killed save leaves one without the mark."""

    def __init__(self, accelerator):
        self.accelerator = accelerator

    def on_save(self, args, state, control, **kwargs):
        self.accelerator.wait_for_everyone()
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / WHOLE).touch()


def last_whole(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{WHOLE}")]
    steps = {
        int(match[1]): path
        for path in found
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    return steps[max(steps)] if steps else None


def remove_broken(folder: Path) -> None:
    """Remove what a kill left half-written, so that nobody takes it for whole."""
    for path in (*folder.glob("checkpoint-*"), *folder.glob("*.unfinished")):
        if path.is_dir() and not (path / WHOLE).exists():
            shutil.rmtree(path)


def clear(folder: Path) -> None:
    """Remove what a run writes into its folder, and nothing else."""
    for path in (
        *folder.glob("checkpoint-*"),
        *folder.glob("*.unfinished"),
        folder / "adapter",
        folder / "model",
    ):
        if path.is_dir():
            shutil.rmtree(path)
    for name in (RECIPE, RESULTS):
        (folder / name).unlink(missing_ok=True)


def check_same_recipe(folder: Path, recipe: dict) -> None:
    """Raise if the folder holds a run of another recipe, which must neither be mixed up with this one nor lost."""
    path = folder / RECIPE
    if not path.is_file():
        return
    old = json.loads(path.read_text(encoding="utf-8"))
    for group, values in recipe.items():
        # a setting that there was not when the run was begun had what is its default now
        defaults = (
            {f.name: plain(f.default) for f in fields(GROUPS[group])} if group in GROUPS else {}
        )
        before = defaults | old.get(group, {})
        for key, value in values.items():
            if (group, key) not in FREE and group != "hub" and before.get(key) != value:
                raise ValueError(
                    f"trainer.output={str(folder)!r} holds a run with {group}.{key}={before.get(key)!r}, "
                    f"now it is {value!r}; allowed: the same recipe, another folder, or --fresh, which deletes that run"
                )


def begin(folder: Path, recipe: dict) -> None:
    """Note what the folder is for."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_broken(folder)
    write_atomically(folder / RECIPE, json.dumps(recipe, indent=2) + "\n")
