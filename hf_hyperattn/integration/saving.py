"""Saving a patched model: a card beside the weights, and never half a checkpoint in place of a whole one.

Transformers writes straight into the target, so that a save which is killed leaves neither the old checkpoint nor
the new one. For patched models `save_pretrained` writes into a folder inside the target, and only when everything is
there, and on the disk, are the files moved to their places, one rename each. The weights' index, or their one file,
goes first and comes last: a kill between two renames leaves a folder that fails to load, and no mixture of two saves.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel

import hub_cards

from .adapter_saving import before_saving_natively
from .guard import wrap
from .publishing import card_facts
from .records import patched_hosts, recorded_hosts, tree, without_records, write_records

STAGE = ".hyperattn-saving-"
VARIANT = r"(?P<variant>\.\w+)?"
WEIGHTS = re.compile(rf"(?P<of>(adapter_)?model){VARIANT}(?P<shard>-\d+-of-\d+)?\.safetensors")
INDEX = re.compile(rf"(?P<of>(adapter_)?model)\.safetensors\.index{VARIANT}\.json")


@wrap("save_pretrained")
def _save(original, self, save_directory, is_main_process=True, *args, **kwargs):
    patched = next(patched_hosts(self), None) is not None
    if patched:
        write_records(self)  # parts of it may have been patched, or unpatched, by themselves
    before_saving_natively(self, kwargs.get("state_dict", args[0] if args else None))
    if not patched and any(recorded_hosts(part) is not None for part in tree(self.config)):
        with without_records(self):  # it shares its config with a patched model, or with parts that were one
            return original(self, save_directory, is_main_process, *args, **kwargs)
    alone = not is_main_process or kwargs.get("distributed_checkpoint") or os.path.isfile(save_directory)
    if alone or not patched:
        return original(self, save_directory, is_main_process, *args, **kwargs)
    pushed, target = kwargs.pop("push_to_hub", False), Path(save_directory)
    with hub_cards.card_beside(save_directory, self, facts_for=card_facts), staged(target) as stage:
        local = {name: value for name, value in kwargs.items() if name not in HUB_ONLY}
        original(self, stage, is_main_process, *args, **local)
    if pushed:
        _push(original, self, target.resolve().name, *args, **kwargs)


#: Arguments of `save_pretrained` that only a push reads.
HUB_ONLY = ("repo_id", "private", "commit_message", "create_pr", "exist_ok", "revision")


def _push(original, model: PreTrainedModel, name: str, *args, **kwargs) -> None:
    """Upload from a folder of its own: what is pushed is what was saved."""
    kwargs.setdefault("repo_id", name)
    with tempfile.TemporaryDirectory() as folder:
        original(model, folder, True, *args, push_to_hub=True, **kwargs)


@contextmanager
def staged(target: Path):
    """A folder inside `target` whose files replace those of `target` when the block ends without an error."""
    target.mkdir(parents=True, exist_ok=True)
    for left_over in target.glob(f"{STAGE}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    stage = Path(tempfile.mkdtemp(dir=target, prefix=STAGE))
    try:
        yield stage
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    _move(stage, target)  # where this fails, what was not moved stays in the folder
    shutil.rmtree(stage, ignore_errors=True)


def _move(stage: Path, target: Path) -> None:
    """Every file to its place, so that a load at any moment finds the old checkpoint, the new one, or no weights.

    What a load of weights looks for goes away before anything is moved, and comes last.
    """
    files = {file.relative_to(stage): file for file in sorted(stage.rglob("*")) if file.is_file()}
    for file in files.values():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    entries = [name for name in files if is_entry(str(name))]
    kinds = {kind(str(name)) for name in files} - {None}
    there = [old for old in target.iterdir() if kind(old.name) in kinds]
    for old in (old for old in there if is_entry(old.name)):
        old.unlink()
    for name in (name for name in files if name not in entries):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(files[name], target / name)
    for old in (old for old in there if Path(old.name) not in files):
        old.unlink(missing_ok=True)  # a shard of an older save that had more of them
    for name in entries:
        os.replace(files[name], target / name)


def kind(name: str) -> tuple | None:
    """Which weights a file is part of: the model's or an adapter's, and their variant. None for other files."""
    found = WEIGHTS.fullmatch(name) or INDEX.fullmatch(name)
    return found and (found["of"], found["variant"])


def is_entry(name: str) -> bool:
    """Whether a load of weights looks for this file: all in one, or the index of the shards."""
    whole = WEIGHTS.fullmatch(name)
    return bool(INDEX.fullmatch(name) or (whole and not whole["shard"]))
