"""PEFT adapters of patched models: their record in adapter_config.json, and their copies of
`hyper`.

On disk:

- An adapter trained on a patched base records that base in adapter_config.json. The key
  `hf_hyperattn` holds the `attn_implementation` and the record, as the config.json of the base
  would. Plain PEFT warns about the unknown key.
- If the adapter holds added parameters, `peft_type` carries our name too. Plain PEFT would load
  none of these parameters, and now fails instead (`KeyError: 'HF_HYPERATTN_LORA'`). Our hooks
  remove the name before PEFT reads the type.
- `hyperattn_config.json` in the same directory patches a stock base:
  `HyperAttnConfig.from_pretrained(adapter_directory)`.

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

from ...config import CONFIG_NAME, HyperAttnConfig
from ...utils.files import read_json
from ..attention.hyper import Hyper, patched_hosts
from ..attention.stock import OURS, PATCHED, RUNNING
from ..patching.attach import cut_to_depth
from ..patching.checkpoint_config import list_configs, make_record, recorded_hosts, saved_name
from ..patching.conversions import CONVERSIONS, conversion_of
from ..patching.patch import LISTENERS, PatchListener
from ..patching.wrapping import wrap
from .hyper_adapter import base_hyper, hyper_adapters, refuse_adapters

logger = logging.getLogger(__name__)

PACKAGE = __name__.split(".")[0]
#: Key in adapter_config.json, and attribute of a PEFT config that was read from it: the base in
#: training.
SAVED_BASE = "hf_hyperattn"
#: Attribute of a PEFT config: the base that it is on now. None for a stock base.
BASE = "_hyperattn_base"
#: Prefix of `peft_type` on disk if the adapter holds added parameters.
TYPE = "HF_HYPERATTN_"


def holds_hyper(config: Any) -> bool:
    """Return whether an adapter's config trains and saves the added parameters."""
    return any(
        name.rpartition(".")[2] == "hyper"
        for name in getattr(config, "modules_to_save", None) or ()
    )


def hyper_wrappers(model: nn.Module) -> Iterator[tuple[str, ModulesToSaveWrapper]]:
    """Yield the name and module of every wrapper that PEFT put around a `hyper`."""
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and isinstance(module.original_module, Hyper):
            yield name, module


def adapter_configs(model: nn.Module, base: PreTrainedModel) -> dict[str, Any]:
    """Return the configs of all adapters by name: of a PEFT model, and of its base model."""
    return {
        **(getattr(base, "peft_config", None) or {}),
        **(getattr(model, "peft_config", None) or {}),
    }


def give_adapters_hyper(model: nn.Module, base: PreTrainedModel) -> None:
    """Give every adapter of a newly patched model a copy of the added parameters.

    If an adapter's config has no `modules_to_save`, the added parameters are frozen like the base,
    with a warning.
    """
    configs = adapter_configs(model, base)
    # Tuner layers know all active adapters. Without any (prompt tuning), PEFT has one active
    # adapter.
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
    """Remove the added parameters from all adapter configs of a model that was unpatched."""
    for config in adapter_configs(model, base).values():
        if holds_hyper(config):
            kept = [name for name in config.modules_to_save if name.rpartition(".")[2] != "hyper"]
            config.modules_to_save = kept or None
        config.__dict__.pop(SAVED_BASE, None)


LISTENERS.append(
    PatchListener(
        check=refuse_adapters,
        after_patch=give_adapters_hyper,
        after_unpatch=take_hyper_from_adapters,
    )
)


def describe_base(model: PreTrainedModel) -> dict | None:
    """Return the record of a base model that its adapters keep, or None for a stock base.

    A base that only an adapter patches counts as stock.

    Returns:
        A dict with `attn_implementation` and `hyperattn` if names of ours run, and with
        `model_type` if the model was converted into one of our classes.
    """
    patched = any(base_hyper(host) is not None for _, host in patched_hosts(model))
    conversion = conversion_of(model)
    names = {c._attn_implementation for c in list_configs(model.config)} & OURS
    facts: dict[str, Any] = {}
    # The name of patched models alone proves nothing: an unpatched model may share its config with
    # a patched one.
    runs_by_name = not names <= {PATCHED, RUNNING}
    if patched or runs_by_name:
        record = getattr(model.config, "hyperattn", None)
        facts = {"attn_implementation": saved_name(model.config), "hyperattn": record}
    if conversion is not None and not CONVERSIONS[conversion].in_place:
        facts["model_type"] = model.config.model_type
    return facts or None


def describe_adapters(model: PreTrainedModel) -> dict[str, HyperAttnConfig]:
    """Return, by name, the patch of every adapter that patches its base by itself."""
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
    """Describe how a model differs from the base of an adapter; None if it does not.

    Args:
        model: Model that receives the adapter, or the weights of a whole model.
        saved: Result of `describe_base` for the adapter's base, or for the model that was saved.
        what: Subject of the message.
        remedy: Advice of the message if the patches differ.

    Raises:
        ValueError: `saved` does not have that form.
    """
    # The file may have been edited by hand, so its form is checked first.
    texts = []
    if isinstance(saved, dict):
        texts = [saved.get("attn_implementation"), saved.get("model_type")]
    if not any(texts) or not all(t is None or isinstance(t, str | dict) for t in texts):
        raise ValueError(
            f"adapter_config.json has {SAVED_BASE}={str(saved)[:80]!r}; allowed: what save_pretrained writes there"
        )
    here = (describe_base(model) if isinstance(model, PreTrainedModel) else None) or {}
    implementation, model_type = texts
    record = saved.get("hyperattn")
    name = type(model).__name__
    # 1. A conversion changes the class of the model.
    if model_type and model_type != getattr(getattr(model, "config", None), "model_type", None):
        advice = "load the adapter on the converted model"
        return f"{what} was a converted model ({model_type}) and {name} is not; {advice}"
    if not implementation:
        return None
    # 2. A mechanism by name has no list of attention layers. Compare the name and its parameters.
    if not isinstance(record, dict) or record.get("hosts") is None:
        if here.get("attn_implementation") != implementation:
            advice = f"load {name} with that name"
            return (
                f"{what} ran attn_implementation={implementation!r} and {name} does not; {advice}"
            )
        if here.get("hyperattn") == record:
            return None
        return f"{what} ran {implementation!r} with config.hyperattn={record}, and {name} has {here.get('hyperattn')}"
    # 3. A patch: compare the records, without layers that this model does not have.
    config = HyperAttnConfig.from_dict(record)
    config = cut_to_depth(config, model) or config
    prefix = getattr(model, "base_model_prefix", "")
    if here and recorded_hosts(getattr(model, "config", None)) is not None:
        record_here = HyperAttnConfig.from_dict(here["hyperattn"])
        if normalize_record(record_here, prefix) == normalize_record(config, prefix):
            return None
    mechanisms = " and ".join(m.mechanism for m in config.mechanisms)
    return (
        f"{what} had {mechanisms} in {len(config.hosts or ())} attention modules, and {name} is patched otherwise or "
        f"not at all; {remedy}"
    )


def normalize_record(config: HyperAttnConfig, prefix: str) -> dict:
    """Return a record that is equal for equal patches, with or without a model head.

    Names lose the prefix of the base model, and the list of attention layers is sorted.
    """
    record = config.to_dict()
    hosts = [host.removeprefix(prefix + ".") for host in config.hosts or ()]
    overrides = {
        host.removeprefix(prefix + "."): o for host, o in record.get("overrides", {}).items()
    }
    return record | {"hosts": sorted(hosts), "overrides": overrides}


# Reading and writing adapter_config.json


@wrap("from_json_file", PeftConfigMixin)
def _read_adapter_config(original, cls, path_json_file, **kwargs):
    """Read adapter_config.json as a dict that plain PEFT accepts."""
    if Path(path_json_file).exists():
        # A damaged file raises an error of one line here, before PEFT reads it.
        read_json(Path(path_json_file))
    data = original(cls, path_json_file, **kwargs)
    folder = Path(path_json_file).parent
    name_public_module(data.get("auto_mapping"))
    if str(data.get("peft_type")).startswith(TYPE):
        data["peft_type"] = data["peft_type"].removeprefix(TYPE)
    elif "hyper" in (data.get("modules_to_save") or ()) and (folder / CONFIG_NAME).is_file():
        # Earlier versions wrote only hyperattn_config.json.
        record = HyperAttnConfig.from_pretrained(folder).to_dict()
        data.setdefault(SAVED_BASE, {"attn_implementation": PATCHED, "hyperattn": record})
    return data


def name_public_module(mapping: Any) -> None:
    """Let `AutoPeftModel` find a base model class of ours, wherever its module is now.

    PEFT records the module that defines the class. That module may have moved since the adapter was
    saved, but the package itself has all our model classes.

    Args:
        mapping: The value of `auto_mapping` in adapter_config.json. It is changed in place.
    """
    if isinstance(mapping, dict) and str(mapping.get("parent_library")).startswith(f"{PACKAGE}."):
        mapping["parent_library"] = PACKAGE


@wrap("from_peft_type", PeftConfigMixin)
def _make_adapter_config(original, cls, **kwargs):
    """Build a PEFT config that remembers the base of its adapter."""
    # PEFT would drop an unknown key with a warning, so ours becomes an attribute afterwards.
    saved = kwargs.pop(SAVED_BASE, None)
    config = original(cls, **kwargs)
    if saved is not None:
        setattr(config, SAVED_BASE, saved)
    return config


@wrap("save_pretrained", PeftConfigMixin)
def _write_adapter_config(original, self, save_directory, **kwargs):
    """Write adapter_config.json with the base of the adapter, and hyperattn_config.json."""
    original(self, save_directory, **kwargs)
    hyperattn = getattr(self, "hyperattn", None)
    if isinstance(hyperattn, HyperAttnConfig):
        # A `HyperLoraConfig` patches its base itself.
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
    """Write the config that patches a stock base like the adapter's base, if that was patched."""
    record = base.get("hyperattn")
    if isinstance(record, dict) and record.get("hosts") is not None:
        HyperAttnConfig.from_dict(record).save_pretrained(folder)
