"""Saving a patched model: a card beside the weights, and never half a checkpoint in place of a whole one.

Transformers writes straight into the target, so that a save which is killed leaves neither the old checkpoint nor
the new one. For patched models `save_pretrained` writes into a folder inside the target, and only when everything is
there, and on the disk, are the files moved to their places, one rename each. The weights' index, or their one file,
goes first and comes last: a kill between two renames leaves a folder that fails to load, and no mixture of two saves.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from peft import PeftModel
from transformers import PreTrainedModel
from transformers.utils.hub import PushToHubMixin

import hub_cards

from ..config import HyperAttnConfig
from ..registry import MECHANISMS
from .guard import wrap
from .records import patched_hosts, recorded_hosts, saved_name, tree, without_records, write_records
from .stock import PATCHED

logger = logging.getLogger("hf_hyperattn")

STAGE = ".hyperattn-saving-"
VARIANT = r"(?P<variant>\.\w+)?"
WEIGHTS = re.compile(rf"(?P<of>(adapter_)?model){VARIANT}(?P<shard>-\d+-of-\d+)?\.safetensors")
INDEX = re.compile(rf"(?P<of>(adapter_)?model)\.safetensors\.index{VARIANT}\.json")


def card_facts(published: object) -> dict | None:
    """What the card of a published object says beyond its files; None for anything that is not ours."""
    facts = hub_cards.patched_facts(published)
    if facts is not None:
        papers = {
            m.name: {"stage": m.stage, "papers": [m.paper] if m.paper else []} for m in MECHANISMS.values()
        }
        facts["about"] = papers
    return facts


hub_cards.hook_uploads(PushToHubMixin, card_facts)


@wrap("save_pretrained")
def _save(original, self, save_directory, is_main_process=True, *args, **kwargs):
    patched = next(patched_hosts(self), None) is not None
    if getattr(self, "_hf_peft_config_loaded", False):
        warn_unrecorded_name(self)
    if patched:
        write_records(self)  # parts of it may have been patched, or unpatched, by themselves
    elif any(recorded_hosts(part) is not None for part in tree(self.config)):
        with without_records(self):  # it shares its config with a patched model, or with parts that were one
            return original(self, save_directory, is_main_process, *args, **kwargs)
    alone = not is_main_process or kwargs.get("distributed_checkpoint") or os.path.isfile(save_directory)
    if alone or not patched:
        return original(self, save_directory, is_main_process, *args, **kwargs)
    pushed, target = kwargs.pop("push_to_hub", False), Path(save_directory)
    with hub_cards.card_beside(save_directory, self, facts_for=card_facts), staged(target) as stage:
        local = {name: value for name, value in kwargs.items() if name not in HUB_ONLY}
        original(self, stage, is_main_process, *args, **local)
        _write_config_beside(stage, self)
    if pushed:
        _push(original, self, target.resolve().name, *args, **kwargs)


@wrap("save_pretrained", PeftModel)
def _save_adapter(original, self, save_directory, *args, **kwargs):
    base = self.get_base_model()
    warn_unrecorded_name(base)
    if not isinstance(base, PreTrainedModel) or next(patched_hosts(base), None) is None:
        return original(self, save_directory, *args, **kwargs)
    with hub_cards.card_beside(save_directory, self, facts_for=card_facts):
        result = original(self, save_directory, *args, **kwargs)
        for folder in (Path(save_directory), *(p for p in Path(save_directory).iterdir() if p.is_dir())):
            _write_config_beside(folder, base)
    return result


def warn_unrecorded_name(base) -> None:
    """Warn where an adapter is saved without its base, and the base runs a mechanism by name: adapters record none."""
    name = saved_name(base.config) if isinstance(base, PreTrainedModel) else None
    if name and PATCHED not in str(name):
        logger.warning(
            f"the adapter saved of {type(base).__name__} was trained with attn_implementation={name!r}, which adapters "
            f"do not record; load its base with attn_implementation={name!r}"
        )


def _write_config_beside(folder: Path, model: PreTrainedModel) -> None:
    """Beside an adapter goes the config that patches its base: `HyperAttnConfig.from_pretrained(adapter_directory)`."""
    if (folder / "adapter_config.json").is_file() and recorded_hosts(model.config) is not None:
        HyperAttnConfig.from_dict(model.config.hyperattn).save_pretrained(folder)


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
