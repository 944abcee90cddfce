"""Saving a patched model or its adapter: a card beside the weights, and always a whole checkpoint in the folder.

Transformers and PEFT write straight into the target, so that a save which is killed leaves neither the old checkpoint
nor the new one. What is ours is saved through `folders.replace_folder` instead. Where many processes save one model
together, all gather its weights and one of them writes.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import PushToHubMixin

import hub_cards

from ..config import HyperAttnConfig
from ..folders import is_interrupted, replace_folder
from ..registry import MECHANISMS
from .adapter_config import (
    BASE,
    describe_adapters,
    describe_base,
    hyper_wrappers,
    normalize_record,
    write_config_beside,
)
from .attach import cut_to_depth
from .checkpoint_config import (
    LOADING,
    all_configs,
    inner,
    is_recorded,
    patched_hosts,
    recorded_hosts,
    tree,
    without_records,
    write_records,
)
from .hyper import Hyper
from .hyper_adapter import base_hyper, hyper_adapters
from .record_check import warn_of_unused_parameters
from .state_dicts import WHERE, check_saved_state_dict, warn_of_config, warn_of_noted
from .stock import OURS, PATCHED, RUNNING
from .wrapping import wrap

logger = logging.getLogger("hf_hyperattn")

#: Arguments of `save_pretrained` that only a push reads.
HUB_ONLY = ("repo_id", "private", "commit_message", "create_pr", "exist_ok", "revision")


def card_facts(published: object) -> dict | None:
    """What the card of a published object says beyond its files; None for anything that is not ours."""
    facts = hub_cards.patched_facts(published)
    if facts is not None:
        facts["about"] = {
            m.name: {
                "stage": m.stage,
                "what": (m.config.__doc__ or "").partition("\n")[0],
                "papers": [m.paper] if m.paper else [],
            }
            for m in MECHANISMS.values()
        }
    return facts


hub_cards.hook_uploads(PushToHubMixin, card_facts)


@contextmanager
def checkpoint_folder(target: str | os.PathLike, published: object) -> Iterator[Path]:
    """A folder to save into, which takes the place of `target`'s checkpoint, card included, when the block ends.

    Other files of `target` stay, a person's own README.md too.
    """
    with replace_folder(target) as folder:
        with hub_cards.card_beside(folder, published, facts_for=card_facts, replaces=target):
            yield folder


# A whole model


@wrap("save_pretrained")
def _save(original, self, save_directory, is_main_process=True, *args, **kwargs):
    patched = any(patched_hosts(self))
    if patched:
        write_records(self)  # parts of it may have been patched, or unpatched, by themselves
    state_dict = kwargs.get("state_dict", args[0] if args else None)
    if getattr(self, "_hf_peft_config_loaded", False):
        before_saving_adapters(self, self.peft_config, self.active_adapters())
    elif state_dict is None:
        refuse_wrapped(self)
    if not getattr(self, "peft_config", None) and getattr(self, "hf_quantizer", None) is None:
        check_saved_state_dict(self, state_dict)  # else other tensors are written
    if not patched and is_recorded(self.config):
        with without_records(
            self
        ):  # it shares its config with a patched model, or with parts that were one
            return original(self, save_directory, is_main_process, *args, **kwargs)
    call = (
        inspect.signature(original)
        .bind(self, save_directory, is_main_process, *args, **kwargs)
        .arguments
    )
    options = {**call.pop("kwargs", {}), **call}
    del options["self"], options["save_directory"]
    warn_of_unsaved_names(self)
    warn_of_unused_parameters(self, type(self).__name__)
    by_name = any(part._attn_implementation in OURS for part in tree(self.config))
    if not (patched or by_name) or os.path.isfile(save_directory):
        return original(self, save_directory, is_main_process, *args, **kwargs)
    target = Path(save_directory)
    if options.get("push_to_hub"):
        options.setdefault("repo_id", target.resolve().name)
    if options.get("distributed_checkpoint") and torch.distributed.is_initialized():
        return _write_by_all(original, self, target, options)
    pushed = options.pop("push_to_hub", False)
    _write_model(original, self, target, {n: v for n, v in options.items() if n not in HUB_ONLY})
    if pushed:  # from a folder of its own: what is pushed is what was saved
        with tempfile.TemporaryDirectory() as folder:
            original(self, folder, push_to_hub=True, **options)


def refuse_wrapped(model: PreTrainedModel) -> None:
    """Raise where a whole model is to be saved while PEFT's wrappers are in it, under names that no load finds."""
    names = [
        *hyper_wrappers(model),
        *((f"{host}.hyper", None) for host, _, _ in hyper_adapters(model)),
    ]
    for name, _ in names:
        raise ValueError(
            f"{name} is inside PEFT's wrapper, and would be saved under a name that no load finds; save the "
            "adapter with PeftModel.save_pretrained, or the whole model after merge_and_unload() or unload()"
        )


def warn_of_unsaved_names(model: PreTrainedModel) -> None:
    """Warn where a part runs a name of ours on a config of its own, of which config.json says nothing: T5's encoder."""
    written = {config._attn_implementation for config in tree(model.config)}
    running = (OURS - {PATCHED, RUNNING}) & {
        config._attn_implementation for config in all_configs(model)
    }
    for name in sorted(running - written):
        logger.warning(
            f"a part of {type(model).__name__} runs attn_implementation={name!r}, which its config.json cannot say; "
            f"call set_attn_implementation({name!r}) on the whole model, or on that part after every load"
        )


def _write_model(original, model: PreTrainedModel, target: Path, options: dict) -> None:
    """Save a model; every process takes part in gathering its weights, and one writes them."""
    distributed = getattr(model.config, "distributed_config", None)
    if not model.should_save_on_this_rank(options["is_main_process"]):
        with tempfile.TemporaryDirectory() as nothing_is_written_here:
            original(model, nothing_is_written_here, **options)
        return model.barrier_after_gathered_checkpoint_save(distributed)
    gathered = False
    try:
        with checkpoint_folder(target, model) as folder:
            original(model, folder, **options)
            gathered = True
    finally:
        if gathered:  # the others leave `save_pretrained` when the checkpoint is in its place
            model.barrier_after_gathered_checkpoint_save(distributed)


def _write_by_all(original, model: PreTrainedModel, target: Path, options: dict) -> None:
    """Save a model of which every process writes its own part, into one folder that the first process brings in place.

    Raises:
        OSError: the folder cannot be made, or the processes do not share it.
    """
    with ExitStack() as stack:
        shared: list[str | None] = [None, None]  # the folder, and why there is none
        if torch.distributed.get_rank() == 0:
            try:
                shared[0] = str(stack.enter_context(checkpoint_folder(target, model)))
            except OSError as error:  # the others wait to hear of it
                shared[1] = str(error)
        torch.distributed.broadcast_object_list(shared, src=0)
        seen = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(
            seen, shared[0] is not None and os.path.isdir(shared[0])
        )
        if not all(seen):
            unshared = (
                "not all processes see what the first one makes there; save to a shared file system"
            )
            why = shared[1] or unshared
            raise OSError(f"{target}: distributed_checkpoint=True cannot save there: {why}")
        original(model, shared[0], **options)
    torch.distributed.barrier()  # the others leave `save_pretrained` when the checkpoint is in its place


# Adapters


@wrap("save_pretrained", PeftModel)
def _save_adapters(original, self, save_directory, *args, **kwargs):
    base = self.get_base_model()
    if not isinstance(base, PreTrainedModel):
        return original(self, save_directory, *args, **kwargs)
    if any(patched_hosts(base)):
        write_records(base)  # parts of it may have been patched, or unpatched, by themselves
    names = (
        kwargs.get("selected_adapters")
        or (args[1] if len(args) > 1 else None)
        or list(self.peft_config)
    )
    before_saving_adapters(base, self.peft_config, names)
    call = inspect.signature(original).bind(self, save_directory, *args, **kwargs).arguments
    description = describe_base(base)
    if recorded_hosts(base.config) is None:
        return original(self, save_directory, *args, **kwargs)
    if not call.get("is_main_process", True) or os.path.isfile(save_directory):
        return original(self, save_directory, *args, **kwargs)
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    if (
        together
        and torch.distributed.get_rank()
        and any(isinstance(p, DTensor) for p in self.parameters())
    ):
        with tempfile.TemporaryDirectory() as nothing_is_kept_here:
            return original(self, nothing_is_kept_here, *args, **kwargs)
    with checkpoint_folder(save_directory, self) as folder:
        result = original(self, folder, *args, **kwargs)
        if description is not None:
            write_config_beside(folder, description)
    return result


def before_saving_adapters(base: PreTrainedModel, configs: dict, names: list[str]) -> None:
    """Let adapters say what their base is and what they patch it with, and warn of added parameters that were trained
    and are in none of them.
    """
    for config in configs.values():
        setattr(config, BASE, describe_base(base))
    for name in set(names) & set(configs):
        say_what_runs(base, name, configs[name])
    for name in names:
        left_out = next(
            (host for host, hyper in not_in_adapter(base, name) if is_trained(hyper)), None
        )
        key = f"_hyperattn_warned_of_{name}"
        if left_out is not None and key not in base.__dict__:
            base.__dict__[key] = True
            logger.warning(
                f"the added parameters of {left_out} were trained, or are free to be, and are not in adapter {name!r} "
                "that is saved now; train them in an adapter made with hf_hyperattn.lora_config(model) "
                "(modules_to_save=['hyper']), or save the whole model after merge_and_unload()"
            )


def say_what_runs(base: PreTrainedModel, name: str, config) -> None:
    """Let an adapter's config say what it patches its base with; a warning where it was changed to say otherwise."""
    running = describe_adapters(base).get(name)
    if running is None:
        return
    there, prefix = config.hyperattn, base.base_model_prefix
    cut = cut_to_depth(there, base) if isinstance(there, HyperAttnConfig) else there
    if cut is not there:  # layers were deleted from the model
        there = config.hyperattn = cut or running
    if not isinstance(there, HyperAttnConfig) or normalize_record(
        there, prefix
    ) != normalize_record(running, prefix):
        logger.warning(
            f"peft_config[{name!r}].hyperattn is not what the model computes: it was changed after the adapter was put "
            "on the model, or layers were moved or deleted. What the model computes is saved; to change that, add an "
            "adapter with a HyperLoraConfig of its own"
        )
        config.hyperattn = running


def not_in_adapter(base: PreTrainedModel, name: str) -> Iterator[tuple[str, Hyper]]:
    """Host and `hyper` of all added parameters that are not written with an adapter."""
    for host, module in patched_hosts(base):
        copies = getattr(module.hyper, "modules_to_save", getattr(module.hyper, "lora_hyper", {}))
        if base_hyper(module) is None:  # there is but what other adapters brought along
            continue
        inside = ".modules_to_save." in f".{host}." or ".original_module." in f".{host}."
        if name not in copies and not inside:
            yield host, inner(base_hyper(module))


def is_trained(hyper: Hyper) -> bool:
    """Whether a `hyper` is open to training, or is not what a load of its base will give.

    That is what the base's own checkpoint has, or what a new patch starts from.
    """
    parameters = list(hyper.parameters())
    if any(p.requires_grad for p in parameters):
        return True
    offloaded_or_sharded = any(p.is_meta or hasattr(p, "device_mesh") for p in parameters)
    if hyper.came_with_model or offloaded_or_sharded:
        return False
    with torch.random.fork_rng(devices=[]):
        start = copy.deepcopy(hyper)
        start.reset_parameters()
    moved = any(not torch.equal(p, q) for p, q in zip(parameters, start.parameters(), strict=True))
    return moved and not all(layer.identical() for layer in hyper.layers())


@wrap("from_pretrained", PeftModel)
@wrap("from_pretrained")
def _load(original, cls, *args, **kwargs):
    """A load, whose error says of a folder that an interrupted save left how to bring the save to its end."""
    token = LOADING.set(issubclass(cls, PreTrainedModel) or LOADING.get())
    try:
        result = original(cls, *args, **kwargs)
    except Exception as error:
        for folder in (*args, *kwargs.values()):
            if isinstance(folder, str | os.PathLike) and is_interrupted(folder):
                why = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise OSError(
                    f"a save into {folder} was interrupted, or is under way; to bring it to its end, run "
                    f"`hyperattn recover {folder}` ({why})"
                ) from error
        raise
    finally:
        LOADING.reset(token)
    if issubclass(cls, PreTrainedModel):
        warn_of_source(result[0] if isinstance(result, tuple) else result, *args, **kwargs)
    return result


def warn_of_source(model, pretrained_model_name_or_path, *args, **kwargs) -> None:
    """Warn where a model was not made from the config of the weights that it took, which ran another attention."""
    source, config = pretrained_model_name_or_path, kwargs.get("config")
    if source is None:
        warn_of_noted(model, kwargs.get("state_dict"))
    elif isinstance(config, PreTrainedConfig) and config._name_or_path != str(source):
        warn_of_config(model, source, **{key: kwargs[key] for key in WHERE if key in kwargs})
