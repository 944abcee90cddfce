"""What an adapter says on disk about the attention of its base, and how it holds the parameters that a patch added.

An adapter that was trained on a patched base says so in adapter_config.json: the key `hf_hyperattn` holds the base's
`attn_implementation` and its record, as the base's config.json would, and plain PEFT warns of the unknown key by name.
Where the adapter holds added parameters, of which plain PEFT would load nothing, `peft_type` also carries our name, so
that plain PEFT refuses it (`KeyError: 'HF_HYPERATTN_LORA'`). Both are read back here before PEFT sees them.
`hyperattn_config.json` beside it patches a stock base: `HyperAttnConfig.from_pretrained(adapter_directory)`.

In memory, a `ModulesToSaveWrapper` around every `hyper` has a copy of it for each adapter.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft.config import PeftConfigMixin
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from ..config import CONFIG_NAME, HyperAttnConfig
from ..files import read_json
from .attach import cut_to_depth
from .checkpoint_config import make_record, patched_hosts, recorded_hosts, saved_name, tree
from .conversions import CONVERSIONS, conversion_of
from .hyper import Hyper
from .hyper_adapter import base_hyper, hyper_adapters
from .stock import OURS, PATCHED, RUNNING
from .wrapping import wrap

logger = logging.getLogger(__name__)

#: In adapter_config.json, and on a PEFT config that was read from one: what the base of the adapter was.
SAVED_BASE = "hf_hyperattn"
#: On a PEFT config: what its base is now; None for a stock base.
BASE = "_hyperattn_base"
TYPE = "HF_HYPERATTN_"


def holds_hyper(config: Any) -> bool:
    """Whether an adapter's config asks for the added parameters to be trained and saved with it."""
    return any(
        name.rpartition(".")[2] == "hyper"
        for name in getattr(config, "modules_to_save", None) or ()
    )


def hyper_wrappers(model: nn.Module) -> Iterator[tuple[str, ModulesToSaveWrapper]]:
    """Name and module of every wrapper that PEFT put around a `hyper`."""
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and isinstance(module.original_module, Hyper):
            yield name, module


def adapter_configs(model: nn.Module, base: PreTrainedModel) -> dict[str, Any]:
    """Adapter name -> config, of a PEFT model around the base, and of the base's own adapters."""
    return {
        **(getattr(base, "peft_config", None) or {}),
        **(getattr(model, "peft_config", None) or {}),
    }


def give_adapters_hyper(model: nn.Module, base: PreTrainedModel) -> None:
    """After a patch of a model that has adapters: each of them gets the added parameters, to train and to save.

    Where an adapter's config cannot say so, what was added is frozen like the rest of the base, with a warning.
    """
    configs = adapter_configs(model, base)
    layers = [module for module in base.modules() if isinstance(module, BaseTunerLayer)]
    active = layers[0].active_adapters if layers else [getattr(model, "active_adapter", None)]
    for name, config in configs.items():
        if not hasattr(config, "modules_to_save"):
            for _, host in patched_hosts(base):
                host.hyper.requires_grad_(False)
            logger.warning(
                f"adapter {name!r} cannot hold what the patch of {type(base).__name__} added, which stays frozen; "
                "patch the model first and use an adapter that has modules_to_save"
            )
            continue
        if not holds_hyper(config):
            config.modules_to_save = [*(config.modules_to_save or ()), "hyper"]
        for _, host in patched_hosts(base):
            if isinstance(host.hyper, ModulesToSaveWrapper):
                host.hyper.update(name)
            else:
                host.hyper = ModulesToSaveWrapper(host.hyper, name)
            if name in active:
                host.hyper.set_adapter(name)
            trained = name in active and not config.inference_mode
            host.hyper.modules_to_save[name].requires_grad_(trained)


def take_hyper_from_adapters(model: nn.Module, base: PreTrainedModel) -> None:
    """After a patch was taken off: no adapter's config speaks of it any more."""
    for config in adapter_configs(model, base).values():
        if holds_hyper(config):
            kept = [name for name in config.modules_to_save if name.rpartition(".")[2] != "hyper"]
            config.modules_to_save = kept or None
        config.__dict__.pop(SAVED_BASE, None)


def describe_base(model: PreTrainedModel) -> dict | None:
    """The attention of a base as adapters keep it: a name of ours and the record, and the model type where it was
    converted into one of ours; None for a stock base, also while an adapter patches it.
    """
    patched = any(base_hyper(host) is not None for _, host in patched_hosts(model))
    conversion = conversion_of(model)
    names = {c._attn_implementation for c in tree(model.config)} & OURS
    facts: dict[str, Any] = {}
    if patched or not names <= {
        PATCHED,
        RUNNING,
    }:  # else it may share its config with a patched model
        record = getattr(model.config, "hyperattn", None)
        facts = {"attn_implementation": saved_name(model.config), "hyperattn": record}
    if conversion is not None and not CONVERSIONS[conversion].in_place:
        facts["model_type"] = model.config.model_type
    return facts or None


def describe_adapters(model: PreTrainedModel) -> dict[str, HyperAttnConfig]:
    """What each adapter with a patch of its own patches a model with, by the adapter's name."""
    hypers: dict[str, dict[str, Hyper]] = {}
    for host, _, adapter in hyper_adapters(model):
        for name, hyper in adapter.lora_hyper.items():
            hypers.setdefault(name, {})[host] = hyper
    records = {name: make_record(of_adapter) for name, of_adapter in hypers.items()}
    return {
        name: HyperAttnConfig.from_dict(record)
        for name, record in records.items()
        if record is not None
    }


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
    texts = (
        [saved.get(k) for k in ("attn_implementation", "model_type")]
        if isinstance(saved, dict)
        else []
    )
    if not any(texts) or not all(t is None or isinstance(t, str | dict) for t in texts):
        raise ValueError(
            f"adapter_config.json has {SAVED_BASE}={str(saved)[:80]!r}; allowed: what save_pretrained writes there"
        )
    here = (describe_base(model) if isinstance(model, PreTrainedModel) else None) or {}
    implementation, model_type = texts
    record, name = saved.get("hyperattn"), type(model).__name__
    if model_type and model_type != getattr(getattr(model, "config", None), "model_type", None):
        advice = "load the adapter on the converted model"
        return f"{what} was a converted model ({model_type}) and {name} is not; {advice}"
    if not implementation:
        return None
    if not isinstance(record, dict) or record.get("hosts") is None:
        if here.get("attn_implementation") != implementation:
            advice = f"load {name} with that name"
            return (
                f"{what} ran attn_implementation={implementation!r} and {name} does not; {advice}"
            )
        if here.get("hyperattn") == record:
            return None
        return f"{what} ran {implementation!r} with config.hyperattn={record}, and {name} has {here.get('hyperattn')}"
    config, prefix = HyperAttnConfig.from_dict(record), getattr(model, "base_model_prefix", "")
    config = cut_to_depth(config, model) or config
    if here and recorded_hosts(getattr(model, "config", None)) is not None:
        if normalize_record(
            HyperAttnConfig.from_dict(here["hyperattn"]), prefix
        ) == normalize_record(config, prefix):
            return None
    mechanisms = " and ".join(m.mechanism for m in config.mechanisms)
    return (
        f"{what} had {mechanisms} in {len(config.hosts or ())} attention modules, and {name} is patched otherwise or "
        f"not at all; {remedy}"
    )


def normalize_record(config: HyperAttnConfig, prefix: str) -> dict:
    """A record such that two of one patch are equal, whether or not the model had a head."""
    record = config.to_dict()
    hosts = [host.removeprefix(prefix + ".") for host in config.hosts or ()]
    overrides = {
        host.removeprefix(prefix + "."): o for host, o in record.get("overrides", {}).items()
    }
    return record | {"hosts": sorted(hosts), "overrides": overrides}


# Reading and writing adapter_config.json


@wrap("from_json_file", PeftConfigMixin)
def _read_adapter_config(original, cls, path_json_file, **kwargs):
    if Path(path_json_file).exists():
        read_json(Path(path_json_file))  # one line where it is damaged
    data, folder = original(cls, path_json_file, **kwargs), Path(path_json_file).parent
    if str(data.get("peft_type")).startswith(TYPE):
        data["peft_type"] = data["peft_type"].removeprefix(TYPE)
    elif "hyper" in (data.get("modules_to_save") or ()) and (folder / CONFIG_NAME).is_file():
        record = HyperAttnConfig.from_pretrained(
            folder
        ).to_dict()  # an adapter of an earlier version
        data.setdefault(SAVED_BASE, {"attn_implementation": PATCHED, "hyperattn": record})
    return data


@wrap("from_peft_type", PeftConfigMixin)
def _make_adapter_config(original, cls, **kwargs):
    saved = kwargs.pop(SAVED_BASE, None)
    config = original(cls, **kwargs)
    if saved is not None:
        setattr(config, SAVED_BASE, saved)
    return config


@wrap("save_pretrained", PeftConfigMixin)
def _write_adapter_config(original, self, save_directory, **kwargs):
    original(self, save_directory, **kwargs)
    hyperattn = getattr(self, "hyperattn", None)
    if isinstance(hyperattn, HyperAttnConfig):  # the adapter patches its base itself
        return write_config_beside(save_directory, {"hyperattn": hyperattn.to_dict()})
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
