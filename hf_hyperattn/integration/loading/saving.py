"""Save a patched model or its adapter as a whole, with a model card.

Transformers and PEFT write straight into the target folder, so a killed save leaves neither the old
checkpoint nor the new one. Patched models are saved through `folders.replace_folder` instead. If
several processes save one model, all gather its weights and one of them writes.
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

from ...config import HyperAttnConfig
from ...config.registry import MECHANISMS
from ...utils.folders import is_interrupted, replace_folder
from ..adapters.adapter_config import (
    BASE,
    describe_adapters,
    describe_base,
    hyper_wrappers,
    normalize_record,
    write_config_beside,
)
from ..adapters.hyper_adapter import base_hyper, hyper_adapters
from ..attention.hyper import Hyper, patched_hosts, unwrap_hyper
from ..attention.stock import OURS, PATCHED, RUNNING
from ..parallel.partitioned import PARTITIONED
from ..patching.attach import cut_to_depth
from ..patching.checkpoint_config import (
    LOADING,
    WHERE,
    all_configs,
    is_recorded,
    list_configs,
    recorded_hosts,
    without_records,
    write_records,
)
from ..patching.wrapping import wrap
from .record_check import warn_of_unused_parameters
from .state_dicts import check_saved_state_dict, warn_of_config, warn_of_noted

logger = logging.getLogger("hf_hyperattn")

#: Arguments of `save_pretrained` that only a push reads.
HUB_ONLY = ("repo_id", "private", "commit_message", "create_pr", "exist_ok", "revision")


def card_facts(published: object) -> dict | None:
    """Return the facts for a model card that files lack, or None if nothing is ours.

    Args:
        published: The model, adapter or config that is saved or uploaded.
    """
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


# Missing upstream: a way to add files to an upload. `push_to_hub` of all classes ends in
# `PushToHubMixin`, whose methods are wrapped here.
hub_cards.hook_uploads(PushToHubMixin, card_facts)


@contextmanager
def checkpoint_folder(target: str | os.PathLike, published: object) -> Iterator[Path]:
    """Yield a folder that replaces the checkpoint in `target` when the block ends.

    Other files in `target` stay, also a README.md that a person wrote.

    Args:
        target: The folder of the checkpoint.
        published: The model or adapter, for the card.
    """
    with replace_folder(target) as folder:
        with hub_cards.card_beside(folder, published, facts_for=card_facts, replaces=target):
            yield folder


# A whole model


# Missing upstream: an atomic save, and callbacks before and after the files are written.
@wrap("save_pretrained")
def _save_model(original, self, save_directory, is_main_process=True, *args, **kwargs):
    """Write records, check the tensors, and save the checkpoint as a whole."""
    patched = any(patched_hosts(self))
    state_dict = kwargs.get("state_dict", args[0] if args else None)
    if patched:
        if state_dict is None:
            refuse_parts(self)
        # Again, because parts of the model may have been patched or unpatched by themselves.
        write_records(self)
    if getattr(self, "_hf_peft_config_loaded", False):
        before_saving_adapters(self, self.peft_config, self.active_adapters())
    elif state_dict is None:
        refuse_wrapped(self)
    # With adapters or a quantiser Transformers writes other tensors than these.
    if not getattr(self, "peft_config", None) and getattr(self, "hf_quantizer", None) is None:
        check_saved_state_dict(self, state_dict)
    if not patched and is_recorded(self.config):
        # It shares its config with a patched model. Its own config.json must not say "patched".
        with without_records(self):
            return original(self, save_directory, is_main_process, *args, **kwargs)
    warn_of_unsaved_names(self)
    warn_of_unused_parameters(self, type(self).__name__)
    by_name = any(part._attn_implementation in OURS for part in list_configs(self.config))
    # A file as target: Transformers reports that error.
    if not (patched or by_name) or os.path.isfile(save_directory):
        return original(self, save_directory, is_main_process, *args, **kwargs)
    signature = inspect.signature(original)
    call = signature.bind(self, save_directory, is_main_process, *args, **kwargs).arguments
    options = {**call.pop("kwargs", {}), **call}
    del options["self"], options["save_directory"]
    target = Path(save_directory)
    if options.get("push_to_hub"):
        # Transformers takes the folder's name, which here would be a temporary one.
        options.setdefault("repo_id", target.resolve().name)
    if options.get("distributed_checkpoint") and torch.distributed.is_initialized():
        return _write_by_all(original, self, target, options)
    pushed = options.pop("push_to_hub", False)
    _write_model(original, self, target, {n: v for n, v in options.items() if n not in HUB_ONLY})
    if pushed:
        # From a folder of its own: other files of the target are not uploaded.
        with tempfile.TemporaryDirectory() as folder:
            original(self, folder, push_to_hub=True, **options)


def refuse_parts(model: PreTrainedModel) -> None:
    """Raise if this process holds a part of the weights, and Transformers would write that part.

    Raises:
        ValueError: The model is a stage of a pipeline, or ZeRO-3 has shared out its weights.
    """
    if hasattr(model, "_pp_stage"):
        raise ValueError(
            f"{type(model).__name__} is one stage of a pipeline (pp_size), and save_pretrained would write the layers "
            "of this stage only; allowed: save the model that was loaded without pp_size"
        )
    if any(hasattr(p, PARTITIONED) and not p.numel() for p in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has weights that DeepSpeed's ZeRO-3 shares out, and save_pretrained would write "
            "empty tensors; allowed: Trainer.save_model, or state_dict=accelerator.get_state_dict(model)"
        )


def refuse_wrapped(model: PreTrainedModel) -> None:
    """Raise if a whole model is saved while it contains PEFT's wrappers.

    Raises:
        ValueError: Added tensors would be saved under names that no load finds.
    """
    names = [name for name, _ in hyper_wrappers(model)]
    names += [f"{host}.hyper" for host, _, _ in hyper_adapters(model)]
    for name in names:
        raise ValueError(
            f"{name} is inside PEFT's wrapper, and would be saved under a name that no load finds; save the "
            "adapter with PeftModel.save_pretrained, or the whole model after merge_and_unload() or unload()"
        )


def warn_of_unsaved_names(model: PreTrainedModel) -> None:
    """Warn if a part runs a name of ours on a config that is not in config.json.

    T5's encoder is such a part: it runs on a copy of the model's config.
    """
    written = {config._attn_implementation for config in list_configs(model.config)}
    running = (OURS - {PATCHED, RUNNING}) & {
        config._attn_implementation for config in all_configs(model)
    }
    for name in sorted(running - written):
        logger.warning(
            f"a part of {type(model).__name__} runs attn_implementation={name!r}, which its config.json cannot say; "
            f"call set_attn_implementation({name!r}) on the whole model, or on that part after every load"
        )


def _write_model(original, model: PreTrainedModel, target: Path, options: dict) -> None:
    """Save a model: every process gathers its weights, and one process writes them.

    Args:
        original: Transformers' `save_pretrained`.
        model: The model.
        target: The folder of the checkpoint.
        options: Further arguments by name, except the ones in `HUB_ONLY`.
    """
    distributed = getattr(model.config, "distributed_config", None)
    if not model.should_save_on_this_rank(options["is_main_process"]):
        # The call gathers the weights with the other processes, and writes nothing.
        with tempfile.TemporaryDirectory() as nothing_is_written_here:
            original(model, nothing_is_written_here, **options)
        return model.barrier_after_gathered_checkpoint_save(distributed)
    gathered = False
    try:
        with checkpoint_folder(target, model) as folder:
            original(model, folder, **options)
            gathered = True
    finally:
        # The other processes wait here until the checkpoint is in its place, also if moving it
        # failed.
        if gathered:
            model.barrier_after_gathered_checkpoint_save(distributed)


def _write_by_all(original, model: PreTrainedModel, target: Path, options: dict) -> None:
    """Save a model whose processes each write their own part into one folder.

    The first process creates the folder and moves it into its place.

    Args:
        original: Transformers' `save_pretrained`.
        model: The model.
        target: The folder of the checkpoint.
        options: Further arguments by name.

    Raises:
        OSError: The folder cannot be created, or the processes do not share it.
    """
    with ExitStack() as stack:
        shared: list[str | None] = [None, None]  # the folder, and the error if there is none
        if torch.distributed.get_rank() == 0:
            try:
                shared[0] = str(stack.enter_context(checkpoint_folder(target, model)))
            except OSError as error:
                # Not raised yet: the other processes wait for the broadcast below.
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
    # No process returns before the checkpoint is in its place.
    torch.distributed.barrier()


# Adapters


# Missing upstream in PEFT: an atomic save, and callbacks before and after the files are written.
@wrap("save_pretrained", PeftModel)
def _save_adapters(original, self, save_directory, *args, **kwargs):
    """Save adapters as a whole, with the patch of their base."""
    base = self.get_base_model()
    if not isinstance(base, PreTrainedModel):
        return original(self, save_directory, *args, **kwargs)
    if any(patched_hosts(base)):
        write_records(base)
    selected = kwargs.get("selected_adapters") or (args[1] if len(args) > 1 else None)
    names = selected or list(self.peft_config)
    before_saving_adapters(base, self.peft_config, names)
    call = inspect.signature(original).bind(self, save_directory, *args, **kwargs).arguments
    description = describe_base(base)
    if recorded_hosts(base.config) is None:
        return original(self, save_directory, *args, **kwargs)
    if not call.get("is_main_process", True) or os.path.isfile(save_directory):
        return original(self, save_directory, *args, **kwargs)
    # All processes gather sharded parameters, and only the first one may write.
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    is_other_rank = together and torch.distributed.get_rank() != 0
    if is_other_rank and any(isinstance(p, DTensor) for p in self.parameters()):
        with tempfile.TemporaryDirectory() as nothing_is_kept_here:
            return original(self, nothing_is_kept_here, *args, **kwargs)
    with checkpoint_folder(save_directory, self) as folder:
        result = original(self, folder, *args, **kwargs)
        if description is not None:
            write_config_beside(folder, description)
    return result


def before_saving_adapters(base: PreTrainedModel, configs: dict, names: list[str]) -> None:
    """Write base and patch of adapters into their configs.

    Warns of added parameters that were trained and are not in a saved adapter.

    Args:
        base: The model without PEFT's wrapper.
        configs: The configs of all adapters, by name.
        names: The adapters that are saved.
    """
    for config in configs.values():
        setattr(config, BASE, describe_base(base))
    for name in set(names) & set(configs):
        record_running_patch(base, name, configs[name])
    for name in names:
        left_out = next(
            (host for host, hyper in list_outside_adapter(base, name) if is_trained(hyper)), None
        )
        # The Trainer saves many times: one warning per model and adapter.
        key = f"_hyperattn_warned_of_{name}"
        if left_out is not None and key not in base.__dict__:
            base.__dict__[key] = True
            logger.warning(
                f"the added parameters of {left_out} were trained, or are free to be, and are not in adapter {name!r} "
                "that is saved now; train them in an adapter made with hf_hyperattn.lora_config(model) "
                "(modules_to_save=['hyper']), or save the whole model after merge_and_unload()"
            )


def record_running_patch(base: PreTrainedModel, name: str, config) -> None:
    """Write the patch that an adapter runs into its config.

    Warns if the config was edited to say something else.

    Args:
        base: The model without PEFT's wrapper.
        name: The adapter.
        config: Its config.
    """
    running = describe_adapters(base).get(name)
    if running is None:
        return
    there, prefix = config.hyperattn, base.base_model_prefix
    cut = cut_to_depth(there, base) if isinstance(there, HyperAttnConfig) else there
    # Layers were deleted from the model. Their entries go without the warning below.
    if cut is not there:
        there = config.hyperattn = cut or running
    is_config = isinstance(there, HyperAttnConfig)
    if not is_config or normalize_record(there, prefix) != normalize_record(running, prefix):
        logger.warning(
            f"peft_config[{name!r}].hyperattn is not what the model computes: it was changed after the adapter was put "
            "on the model, or layers were moved or deleted. What the model computes is saved; to change that, add an "
            "adapter with a HyperLoraConfig of its own"
        )
        config.hyperattn = running


def list_outside_adapter(base: PreTrainedModel, name: str) -> Iterator[tuple[str, Hyper]]:
    """Yield the added parameters that an adapter does not contain.

    Args:
        base: The model without PEFT's wrapper.
        name: The adapter.

    Yields:
        Name of the attention layer, and its `hyper`.
    """
    for host, module in patched_hosts(base):
        copies = getattr(module.hyper, "modules_to_save", getattr(module.hyper, "lora_hyper", {}))
        # Only adapters patch this layer: each saves its own parameters.
        if base_hyper(module) is None:
            continue
        # A patched layer may itself be a part that PEFT saves whole.
        inside = ".modules_to_save." in f".{host}." or ".original_module." in f".{host}."
        if name not in copies and not inside:
            yield host, unwrap_hyper(base_hyper(module))


def is_trained(hyper: Hyper) -> bool:
    """Return whether a `hyper` is trainable, or differs after a load of its base.

    Loading the base gives the values of its checkpoint, or the starting values of a new patch.
    """
    parameters = list(hyper.parameters())
    if any(p.requires_grad for p in parameters):
        return True
    # Their values cannot be compared here. Without a comparison there is no warning.
    offloaded_or_sharded = any(p.is_meta or hasattr(p, "device_mesh") for p in parameters)
    if hyper.came_with_model or offloaded_or_sharded:
        return False
    # Starting values may be random: keep the generator of the training as it is.
    with torch.random.fork_rng(devices=[]):
        start = copy.deepcopy(hyper)
        start.reset_parameters()
    moved = any(not torch.equal(p, q) for p, q in zip(parameters, start.parameters(), strict=True))
    return moved and not all(layer.identical() for layer in hyper.layers())


# Missing upstream: a callback after a load with its arguments, and after a failed one.
@wrap("from_pretrained", PeftModel)
@wrap("from_pretrained")
def _load_pretrained(original, cls, *args, **kwargs):
    """Load, and explain in the error how to finish a save that was interrupted."""
    # While a model loads, its configs may ask for names that are resolved later.
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
    """Warn if the attention of a model is not the attention of its weights.

    Args:
        model: The loaded model.
        pretrained_model_name_or_path: The checkpoint, as in `from_pretrained`. None for a state
            dict.
        args, kwargs: Further arguments of `from_pretrained`.
    """
    source, config = pretrained_model_name_or_path, kwargs.get("config")
    if source is None:
        warn_of_noted(model, kwargs.get("state_dict"))
    elif isinstance(config, PreTrainedConfig) and config._name_or_path != str(source):
        warn_of_config(model, source, **{key: kwargs[key] for key in WHERE if key in kwargs})
