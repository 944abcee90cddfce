"""Added parameters inside PEFT: a `ModulesToSaveWrapper` around every `hyper`, with a copy for each adapter."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from .hyper import Hyper
from .records import patched_hosts

logger = logging.getLogger(__name__)

#: In adapter_config.json, and on a PEFT config that was read from one: what the base of the adapter was.
SAVED_BASE = "hf_hyperattn"


def holds_hyper(config) -> bool:
    """Whether an adapter's config asks for the added parameters to be trained and saved with it."""
    return any(name.rpartition(".")[2] == "hyper" for name in getattr(config, "modules_to_save", None) or ())


def hyper_wrappers(model: nn.Module) -> Iterator[tuple[str, ModulesToSaveWrapper]]:
    """Name and module of every wrapper that PEFT put around a `hyper`."""
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and isinstance(module.original_module, Hyper):
            yield name, module


def adapter_configs(model: nn.Module) -> dict:
    """Adapter name -> config, of a PEFT model or of a Transformers model with adapters of its own; {} for others."""
    return getattr(model, "peft_config", None) or {}


def give_adapters_hyper(model: nn.Module, base: PreTrainedModel) -> None:
    """After a patch of a model that has adapters: each of them gets the added parameters, to train and to save.

    Where an adapter's config cannot say so, what was added is frozen like the rest of the base, with a warning.
    """
    configs = {**adapter_configs(base), **adapter_configs(model)}
    layer = next((module for module in base.modules() if isinstance(module, BaseTunerLayer)), None)
    active = layer.active_adapters if layer is not None else [getattr(model, "active_adapter", None)]
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
        for _, host in list(patched_hosts(base)):
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
    for config in {**adapter_configs(base), **adapter_configs(model)}.values():
        if holds_hyper(config):
            kept = [name for name in config.modules_to_save if name.rpartition(".")[2] != "hyper"]
            config.modules_to_save = kept or None
        config.__dict__.pop(SAVED_BASE, None)
