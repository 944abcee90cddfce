"""Saving a patched model or its adapter: a card beside the weights, and always a whole checkpoint in the folder.

Transformers and PEFT write straight into the target, so that a save which is killed leaves neither the old checkpoint
nor the new one. What is ours is saved through `folders.replace_folder` instead. Where many processes save one model
together, all gather its weights and one of them writes.
"""

from __future__ import annotations

import inspect
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed
from peft import PeftModel
from transformers import PreTrainedConfig, PreTrainedModel

from ..folders import is_interrupted
from .adapter_modules import adapter_configs
from .adapter_saving import before_saving_natively
from .publishing import checkpoint_folder
from .record_check import check_saved_state_dict, warn_of_config, warn_of_noted, warn_of_unused_parameters
from .records import all_configs, patched_hosts, recorded_hosts, tree, without_records, write_records
from .stock import OURS, PATCHED, RUNNING
from .wrapping import wrap

logger = logging.getLogger("hf_hyperattn")

#: Arguments of `save_pretrained` that only a push reads.
HUB_ONLY = ("repo_id", "private", "commit_message", "create_pr", "exist_ok", "revision")
#: Arguments of `from_pretrained` that say which files of the Hub are meant.
WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


@wrap("save_pretrained")
def _save(original, self, save_directory, is_main_process=True, *args, **kwargs):
    patched = next(patched_hosts(self), None) is not None
    if patched:
        write_records(self)  # parts of it may have been patched, or unpatched, by themselves
    state_dict = kwargs.get("state_dict", args[0] if args else None)
    before_saving_natively(self, state_dict)
    if (
        not adapter_configs(self) and getattr(self, "hf_quantizer", None) is None
    ):  # else other tensors are written
        check_saved_state_dict(self, state_dict)
    if not patched and any(recorded_hosts(part) is not None for part in tree(self.config)):
        with without_records(self):  # it shares its config with a patched model, or with parts that were one
            return original(self, save_directory, is_main_process, *args, **kwargs)
    call = inspect.signature(original).bind(self, save_directory, is_main_process, *args, **kwargs).arguments
    options = {**call.pop("kwargs", {}), **call}
    warn_of_unsaved_names(self)
    warn_of_unused_parameters(self, type(self).__name__)
    by_name = any(part._attn_implementation in OURS for part in tree(self.config))
    if not (patched or by_name) or os.path.isfile(save_directory):
        return original(self, save_directory, is_main_process, *args, **kwargs)
    if options.get("distributed_checkpoint") and torch.distributed.is_initialized():
        if options.get("push_to_hub"):
            options.setdefault("repo_id", Path(save_directory).resolve().name)
        options.pop("self"), options.pop("save_directory")
        return _write_by_all(original, self, Path(save_directory), options)
    pushed = options.pop("push_to_hub", False)
    local = {n: v for n, v in options.items() if n not in (*HUB_ONLY, "self", "save_directory")}
    _write_model(original, self, Path(save_directory), local)
    if pushed:  # from a folder of its own: what is pushed is what was saved
        hub = {n: v for n, v in options.items() if n not in ("self", "save_directory")}
        hub.setdefault("repo_id", Path(save_directory).resolve().name)
        with tempfile.TemporaryDirectory() as folder:
            original(self, folder, push_to_hub=True, **hub)


def warn_of_unsaved_names(model: PreTrainedModel) -> None:
    """Warn where a part runs a name of ours on a config of its own, of which config.json says nothing: T5's encoder."""
    said = {config._attn_implementation for config in tree(model.config)}
    running = {config._attn_implementation for config in all_configs(model)} & OURS - {PATCHED, RUNNING}
    for name in sorted(running - said):
        logger.warning(
            f"a part of {type(model).__name__} runs attn_implementation={name!r}, which its config.json cannot say; "
            f"call set_attn_implementation({name!r}) on the whole model, or on that part after every load"
        )


def _write_model(original, model: PreTrainedModel, target: Path, options: dict) -> None:
    """Save a model; every process takes part in gathering its weights, and one writes them."""
    if not model.should_save_on_this_rank(options["is_main_process"]):
        with tempfile.TemporaryDirectory() as nothing_is_written_here:
            original(model, nothing_is_written_here, **options)
        return model.barrier_after_gathered_checkpoint_save(_distributed_config(model))
    gathered = False
    try:
        with checkpoint_folder(target, model) as folder:
            original(model, folder, **options)
            gathered = True
    finally:
        if gathered:  # the others leave `save_pretrained` when the checkpoint is in its place
            model.barrier_after_gathered_checkpoint_save(_distributed_config(model))


def _write_by_all(original, model: PreTrainedModel, target: Path, options: dict) -> None:
    """Save a model of which every process writes its own part, into one folder that the first process brings in place.

    Raises:
        OSError: the folder cannot be made, or the processes do not share it.
    """
    first = torch.distributed.get_rank() == 0
    with ExitStack() as stack:
        shared: list = [None, None]
        if first:
            try:
                shared[0] = str(stack.enter_context(checkpoint_folder(target, model)))
            except OSError as error:  # the others wait to hear of it
                shared[1] = str(error)
        torch.distributed.broadcast_object_list(shared, src=0)
        seen = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(seen, shared[0] is not None and os.path.isdir(shared[0]))
        if not all(seen):
            reason = (
                shared[1]
                or "not all processes see what the first one makes there; save to a shared file system"
            )
            raise OSError(f"{target}: distributed_checkpoint=True cannot save there: {reason}")
        original(model, shared[0], **options)
    torch.distributed.barrier()  # the others leave `save_pretrained` when the checkpoint is in its place


def _distributed_config(model: PreTrainedModel):
    return getattr(model.config, "distributed_config", None)


@wrap("from_pretrained")
def _load(original, cls, pretrained_model_name_or_path, *args, **kwargs):
    with interrupted_save_named(pretrained_model_name_or_path):
        result = original(cls, pretrained_model_name_or_path, *args, **kwargs)
    config, source = kwargs.get("config"), pretrained_model_name_or_path
    model = result[0] if isinstance(result, tuple) else result
    if source is None:
        warn_of_noted(model, kwargs.get("state_dict"))
    elif isinstance(config, PreTrainedConfig) and config._name_or_path != str(
        source
    ):  # not the checkpoint's own
        warn_of_config(model, source, **{key: kwargs[key] for key in WHERE if key in kwargs})
    return result


@wrap("from_pretrained", PeftModel)
def _load_adapter(original, cls, model, model_id, *args, **kwargs):
    with interrupted_save_named(model_id):
        return original(cls, model, model_id, *args, **kwargs)


@contextmanager
def interrupted_save_named(folder: object) -> Iterator[None]:
    """Let the error of a load from a folder that an interrupted save left say how to bring the save to its end."""
    try:
        yield
    except Exception as error:
        if isinstance(folder, str | os.PathLike) and is_interrupted(folder):
            raise OSError(
                f"a save into {folder} was interrupted, or is under way; to bring it to its end, run "
                f"`hyperattn recover {folder}` ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
            ) from error
        raise
