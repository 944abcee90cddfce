"""What an adapter says on disk about the attention of its base, and what is compared when one is saved.

An adapter that was trained on a patched base says so in adapter_config.json: the key `hf_hyperattn` holds the base's
`attn_implementation` and its record, as the base's config.json would, and plain PEFT warns of the unknown key by name.
Where the adapter holds added parameters, of which plain PEFT would load nothing, `peft_type` also carries our name, so
that plain PEFT refuses it (`KeyError: 'HF_HYPERATTN_LORA'`). Both are read back here before PEFT sees them.
`hyperattn_config.json` beside it patches a stock base: `HyperAttnConfig.from_pretrained(adapter_directory)`.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel
from peft.config import PeftConfigMixin
from torch import nn
from transformers import PreTrainedModel

from ..config import CONFIG_NAME, HyperAttnConfig
from ..files import read_json
from .adapter_modules import SAVED_BASE, holds_hyper, hyper_wrappers
from .conversions import CONVERSIONS, conversion_of
from .hyper import Hyper
from .publishing import checkpoint_folder, gathers_elsewhere
from .records import inner, patched_hosts, recorded_hosts, saved_name, tree, write_records
from .stock import OURS, PATCHED, RUNNING
from .wrapping import wrap

logger = logging.getLogger(__name__)

#: On a PEFT config: what its base is now; None for a stock base.
BASE = "_hyperattn_base"
TYPE = "HF_HYPERATTN_"


def describe_base(model: PreTrainedModel) -> dict | None:
    """The attention of a base as adapters keep it: a name of ours and the record, and the model type where it was
    converted into one of ours; None for a stock base.
    """
    patched, conversion = next(patched_hosts(model), None) is not None, conversion_of(model)
    names = {c._attn_implementation for c in tree(model.config)} & OURS
    found = {}
    if patched or not names <= {PATCHED, RUNNING}:  # else it may share its config with a patched model
        record = getattr(model.config, "hyperattn", None)
        found = {"attn_implementation": saved_name(model.config), "hyperattn": record}
    if conversion is not None and not CONVERSIONS[conversion].in_place:
        found["model_type"] = model.config.model_type
    return found or None


def base_difference(
    model: nn.Module,
    saved: dict,
    what: str = "its base",
    remedy: str = "patch it with hf_hyperattn.HyperAttnConfig.from_pretrained(adapter_directory)",
) -> str | None:
    """In which way a model is no base for an adapter; None where it is as the adapter's base was.

    Args:
        model: what the adapter, or the weights of a whole model, are put on.
        saved: what `describe_base` said of the adapter's base, or of that model.
        what, remedy: what `saved` speaks of, and what helps where a patch differs, for the message.

    Raises:
        ValueError: `saved` is not of that form.
    """
    texts = [saved.get(k) for k in ("attn_implementation", "model_type")] if isinstance(saved, dict) else []
    if not any(texts) or not all(t is None or isinstance(t, str | dict) for t in texts):
        raise ValueError(
            f"adapter_config.json has {SAVED_BASE}={str(saved)[:80]!r}; allowed: what save_pretrained writes there"
        )
    here = (describe_base(model) if isinstance(model, PreTrainedModel) else None) or {}
    record, name = saved.get("hyperattn"), type(model).__name__
    wanted, kind = texts
    if kind and kind != getattr(getattr(model, "config", None), "model_type", None):
        return f"{what} was a converted model ({kind}) and {name} is not; load the adapter on the converted model"
    if not wanted:
        return None
    if not isinstance(record, dict) or record.get("hosts") is None:
        if here.get("attn_implementation") == wanted and here.get("hyperattn") == record:
            return None
        if here.get("attn_implementation") == wanted:
            return f"{what} ran {wanted!r} with config.hyperattn={record}, and {name} has {here.get('hyperattn')}"
        return f"{what} ran attn_implementation={wanted!r} and {name} does not; load {name} with that name"
    wanted = HyperAttnConfig.from_dict(record)
    if here and recorded_hosts(model.config) is not None:
        found = HyperAttnConfig.from_dict(here["hyperattn"])
        if in_short(found, model.base_model_prefix) == in_short(wanted, model.base_model_prefix):
            return None
    mechanisms = " and ".join(m.mechanism for m in wanted.mechanisms)
    return (
        f"{what} had {mechanisms} in {len(wanted.hosts)} attention modules, and {name} is patched otherwise or not "
        f"at all; {remedy}"
    )


def in_short(config: HyperAttnConfig, prefix: str) -> dict:
    """A record such that two of one patch are equal, whether or not the model had a head."""
    names = {host: host.removeprefix(prefix + ".") for host in config.hosts}
    own = {names[host]: configs for host, configs in (config.overrides or {}).items()}
    return replace(config, hosts=tuple(sorted(names.values())), overrides=own).to_dict()


# Reading and writing adapter_config.json


@wrap("from_json_file", PeftConfigMixin)
def _read(original, cls, path_json_file, **kwargs):
    if Path(path_json_file).exists():
        read_json(Path(path_json_file))  # one line where it is damaged
    data, folder = original(cls, path_json_file, **kwargs), Path(path_json_file).parent
    if str(data.get("peft_type")).startswith(TYPE):
        data["peft_type"] = data["peft_type"].removeprefix(TYPE)
    elif "hyper" in (data.get("modules_to_save") or ()) and (folder / CONFIG_NAME).is_file():
        record = HyperAttnConfig.from_pretrained(folder).to_dict()  # an adapter of an earlier version
        data.setdefault(SAVED_BASE, {"attn_implementation": PATCHED, "hyperattn": record})
    return data


@wrap("from_peft_type", PeftConfigMixin)
def _make(original, cls, **kwargs):
    saved = kwargs.pop(SAVED_BASE, None)
    config = original(cls, **kwargs)
    if saved is not None:
        setattr(config, SAVED_BASE, saved)
    return config


@wrap("save_pretrained", PeftConfigMixin)
def _write(original, self, save_directory, **kwargs):
    original(self, save_directory, **kwargs)
    base = self.__dict__.get(BASE, getattr(self, SAVED_BASE, None))
    if base is None:
        return
    path = Path(save_directory) / "adapter_config.json"
    data = json.loads(path.read_text(encoding="utf-8")) | {SAVED_BASE: base}
    if holds_hyper(self):
        data["peft_type"] = TYPE + data["peft_type"]
    path.write_text(json.dumps(data, indent=2, sort_keys=True), encoding="utf-8")
    write_config_beside(save_directory, base)


def write_config_beside(folder, base: dict) -> None:
    """Write the config that patches a stock base like the adapter's, where it was patched."""
    record = base.get("hyperattn")
    if isinstance(record, dict) and record.get("hosts") is not None:
        HyperAttnConfig.from_dict(record).save_pretrained(folder)


# Saving a model with adapters


def before_saving_natively(model: PreTrainedModel, state_dict: dict | None) -> None:
    """Before `PreTrainedModel.save_pretrained`: what its adapters are to say, and a check of what will be written.

    Raises:
        ValueError: the whole model is to be written while PEFT's wrappers are in it, under names that no load finds.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        return before_saving(model, model.peft_config, model.active_adapters())
    wrapped = next(hyper_wrappers(model), None)
    if wrapped is not None and state_dict is None:
        raise ValueError(
            f"{wrapped[0]} is inside PEFT's wrapper, and would be saved under a name that no load finds; save the "
            "adapter with PeftModel.save_pretrained, or the whole model after merge_and_unload() or unload()"
        )
    return None


def before_saving(base: PreTrainedModel, configs: dict, names: list[str]) -> None:
    """Let adapters say what their base is, and warn of added parameters that were trained and are in none of them."""
    for config in configs.values():
        setattr(config, BASE, describe_base(base))
    for name in names:
        left_out = next((host for host, hyper in not_in_adapter(base, name) if is_trained(hyper)), None)
        key = f"_hyperattn_warned_of_{name}"
        if left_out is not None and key not in base.__dict__:
            base.__dict__[key] = True
            logger.warning(
                f"the added parameters of {left_out} were trained, or are free to be, and are not in adapter {name!r} "
                "that is saved now; train them in an adapter made with hf_hyperattn.lora_config(model) "
                "(modules_to_save=['hyper']), or save the whole model after merge_and_unload()"
            )


def not_in_adapter(base: PreTrainedModel, name: str) -> Iterator[tuple[str, Hyper]]:
    """Host and `hyper` of all added parameters that are not written with an adapter."""
    for host, module in patched_hosts(base):
        copies = getattr(module.hyper, "modules_to_save", {})
        inside = ".modules_to_save." in f".{host}." or ".original_module." in f".{host}."
        if name not in copies and not inside:
            yield host, inner(module.hyper)


def is_trained(hyper: Hyper) -> bool:
    """Whether a `hyper` is open to training, or is not what a load of its base will give.

    That is what the base's own checkpoint has, or what a new patch starts from.
    """
    parameters = list(hyper.parameters())
    if any(p.requires_grad for p in parameters):
        return True
    elsewhere = any(
        p.is_meta or hasattr(p, "device_mesh") for p in parameters
    )  # offloaded, or spread over ranks
    if getattr(hyper, "_is_hf_initialized", False) or elsewhere:
        return False
    with torch.random.fork_rng(devices=[]):
        start = copy.deepcopy(hyper)
        start.reset_parameters()
    moved = any(not torch.equal(p, q) for p, q in zip(parameters, start.parameters(), strict=True))
    return moved and not all(layer.identical() for layer in hyper.layers())


@wrap("save_pretrained", PeftModel)
def _save(original, self, save_directory, *args, **kwargs):
    base = self.get_base_model()
    if not isinstance(base, PreTrainedModel):
        return original(self, save_directory, *args, **kwargs)
    if next(patched_hosts(base), None) is not None:
        write_records(base)  # parts of it may have been patched, or unpatched, by themselves
    names = kwargs.get("selected_adapters") or (args[1] if len(args) > 1 else None) or list(self.peft_config)
    before_saving(base, self.peft_config, names)
    call = inspect.signature(original).bind(self, save_directory, *args, **kwargs).arguments
    described = describe_base(base)
    if described is None or recorded_hosts(base.config) is None or not call.get("is_main_process", True):
        return original(self, save_directory, *args, **kwargs)
    if os.path.isfile(save_directory):
        return original(self, save_directory, *args, **kwargs)
    if gathers_elsewhere(self):
        with tempfile.TemporaryDirectory() as nothing_is_kept_here:
            return original(self, nothing_is_kept_here, *args, **kwargs)
    with checkpoint_folder(save_directory, self) as folder:
        result = original(self, folder, *args, **kwargs)
        write_config_beside(folder, described)
    return result
