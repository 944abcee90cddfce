"""PEFT adapters on patched models: every operation is exact, or raises, or warns.

An adapter holds the added parameters if its config has `modules_to_save=["hyper"]`. PEFT then wraps
every `hyper` in a `ModulesToSaveWrapper`, with a copy for each adapter. The functions below wrap
methods of PEFT and Transformers, and correct what PEFT would do without a message:

- PEFT skips names in `modules_to_save` that the model does not have, and so loads half of an
  adapter.
- PEFT freezes what no adapter holds, including gates that a patch has just set to zero.
- PEFT does not remove the wrapper when it unloads (LN tuning), or fails on it (IA3, VeRA, LoHa,
  LoKr, OFT).
- `enable_adapters` of Transformers leaves the wrapper disabled.

`adapter_config` describes the files of an adapter. `saving` writes them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import peft.helpers
import peft.utils.hotswap
import transformers
from packaging.version import Version
from peft import IA3Model, LoraModel, PeftModel, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import ModulesToSaveWrapper, load_peft_weights
from torch import nn
from transformers.integrations.peft import PeftAdapterMixin

from ..attention.hyper import Hyper, patched_hosts
from ..patching.attach import beyond_depth, cut_to_depth
from ..patching.checkpoint_config import WHERE
from ..patching.wrapping import wrap
from .adapter_config import (
    SAVED_BASE,
    base_difference,
    holds_hyper,
    hyper_wrappers,
    normalize_record,
)
from .hyper_adapter import base_hyper, hyper_adapters, refuse_adapters, refuse_two
from .hyper_lora import HyperLoraConfig

logger = logging.getLogger(__name__)


# Putting an adapter on a model


def check_place(model: nn.Module, config) -> None:
    """Check that an adapter fits the model that it is put on.

    A different base without added parameters is a warning.

    Raises:
        ValueError: The adapter holds added parameters, and the model is not patched, or not patched
            as its base was.
    """
    if isinstance(config, HyperLoraConfig):
        # `HyperLoraConfig` patches the model itself, or compares an existing patch.
        return
    if holds_hyper(config):
        refuse_adapters(model, "modules_to_save=['hyper']")
    patched = any(base_hyper(host) is not None for _, host in patched_hosts(model))
    name = type(model).__name__
    if holds_hyper(config) and not patched:
        raise ValueError(
            f"this adapter was trained on a patched model (modules_to_save has 'hyper'), and {name} is "
            "not patched; first call hf_hyperattn.patch_model(model, ...) as it was patched then, for instance with "
            "hf_hyperattn.HyperAttnConfig.from_pretrained(adapter_directory)"
        )
    saved = getattr(config, SAVED_BASE, None)
    difference = base_difference(model, saved) if saved is not None else None
    if difference and holds_hyper(config):
        raise ValueError(f"this adapter holds parameters of another patch: {difference}")
    if difference:
        logger.warning(
            f"this adapter may compute something else than it did in training: {difference}"
        )
    elif patched and not holds_hyper(config) and not getattr(config, "inference_mode", False):
        logger.warning(
            f"{name} is patched, and this adapter leaves out what the patch added: it stays frozen (gates at 0 change "
            "nothing); to train it, make the config with hf_hyperattn.lora_config(model), or with "
            "modules_to_save=['hyper']"
        )


@wrap("inject_adapter", BaseTuner)
def _inject_adapter(original, self, model, adapter_name, *args, **kwargs):
    """Check the adapter before PEFT changes any module."""
    check_place(model, self.peft_config[adapter_name])
    return original(self, model, adapter_name, *args, **kwargs)


@wrap("add_adapter", PeftModel)
def _add_adapter(original, self, adapter_name, peft_config, *args, **kwargs):
    """Check an adapter that PEFT adds without injecting modules."""
    if peft_config.is_prompt_learning:
        # Prompt learning injects nothing, so `_inject_adapter` is never called.
        check_place(self.base_model, peft_config)
    return original(self, adapter_name, peft_config, *args, **kwargs)


# Loading


@wrap("load_adapter", PeftModel)
def _load_adapter(original, self, *args, **kwargs):
    """Load an adapter, and raise if an added parameter has no counterpart."""
    arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
    name = arguments["adapter_name"]
    with explain_lost_keys():
        result = original(self, *args, **kwargs)
    check_tensors(
        [*find_missing(name, result), *drop_names_beyond_depth(self, result.unexpected_keys)]
    )
    warn_of_other_patch(self, name, arguments["model_id"], arguments.get("kwargs", {}))
    return result


@contextmanager
def explain_lost_keys() -> Iterator[None]:
    """Turn PEFT's KeyError about an added parameter into the error of `check_tensors`."""
    try:
        yield
    except KeyError as error:
        check_tensors([str(error.args[0])])
        raise


def find_missing(name: str, result) -> list[str]:
    """Return the added parameters of one adapter that its file lacks.

    PEFT lists every name that contains the adapter's name, also of other adapters.
    """
    places = f".lora_hyper.{name}.", f".modules_to_save.{name}."
    return [key for key in result.missing_keys if any(place in key for place in places)]


def warn_of_other_patch(model: PeftModel, name: str, where: str, options: dict[str, Any]) -> None:
    """Warn if an adapter is loaded into an existing one that has other mechanisms.

    PEFT does not compare the two configs.

    Args:
        name: Name of the existing adapter.
        where, options: As in `PeftModel.load_adapter`.
    """
    config = model.peft_config[name]
    base = model.get_base_model()
    if not isinstance(config, HyperLoraConfig):
        return
    hub_options = {k: options[k] for k in WHERE if options.get(k)}
    read: Any = HyperLoraConfig.from_pretrained(where, **hub_options)
    # Layers that this model lacks are in neither adapter.
    cut = [
        cut_to_depth(each.hyperattn, base, warn=False) or each.hyperattn for each in (config, read)
    ]
    there, saved = (normalize_record(each, getattr(base, "base_model_prefix", "")) for each in cut)
    differ = [key for key in there if there[key] != saved[key]]
    if differ:
        logger.warning(
            f"adapter {name!r} has other {' and '.join(differ)} than {where}, whose parameters it was given: it "
            "computes something else; load them under a new adapter_name, or begin with a HyperLoraConfig that is alike"
        )


@wrap("load_adapter", PeftAdapterMixin)
def _load_natively(original, self, *args, **kwargs):
    """Load an adapter by Transformers' own `load_adapter`, completely or not at all."""
    result = original(self, *args, **kwargs)
    arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
    name = arguments.get("adapter_name") or "default"
    config = self.peft_config[name]
    ours = isinstance(config, HyperLoraConfig)
    # Before 5.18 Transformers made our modules but loaded nothing into them. No version loads
    # DoRA's magnitude vectors.
    before = Version(transformers.__version__) < Version("5.18")
    if (before and (ours or holds_hyper(config))) or (ours and config.use_dora):
        with explain_lost_keys():
            read = set_peft_model_state_dict(self, adapter_weights(arguments), name)
        if before:
            # The report of Transformers still lists what was loaded only now.
            result.missing_keys &= {*read.missing_keys}
            result.unexpected_keys &= {*read.unexpected_keys}
            check_tensors(
                [*find_missing(name, read), *drop_names_beyond_depth(self, read.unexpected_keys)]
            )
    if before:
        return result
    if ours:
        # The magnitude vectors were loaded above.
        for keys in (result.missing_keys, result.unexpected_keys):
            keys -= {key for key in keys if ".lora_magnitude_vector." in key}
    check_tensors(
        [*find_missing(name, result), *drop_names_beyond_depth(self, result.unexpected_keys)]
    )
    return result


def drop_names_beyond_depth(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the tensor names without those beyond the model's last layer.

    PEFT leaves such tensors out.
    """
    left_out = set(beyond_depth(names, model))
    return [name for name in names if name not in left_out]


def check_tensors(names: list[str]) -> None:
    """Raise if a missing or unexpected tensor is an added parameter.

    Args:
        names: Names of tensors that only one of the two has, the model or the adapter's file.
    """
    lost = next((name for name in sorted(names) if "hyper" in name.split(".")), None)
    if lost is not None:
        raise ValueError(
            f"the added parameter {lost} is not both in this adapter's file and in the model; patch the base as "
            "the adapter's hyperattn_config.json says; if it is, save the adapter again from the model that trained it"
        )


def adapter_weights(arguments: dict[str, Any]) -> dict:
    """Return the parameters of an adapter, given the arguments of `load_adapter`."""
    weights: Any = arguments.get("adapter_state_dict")
    config: Any = arguments.get("load_config")
    if weights is None:
        # Options for the Hub can come from four places. Later ones win.
        hub = {
            **(getattr(config, "download_kwargs", None) or {}),
            **(arguments.get("adapter_kwargs") or {}),
            **arguments,
            **arguments.get("kwargs", {}),
        }
        where = arguments.get("peft_model_id") or config.pretrained_model_name_or_path
        weights = load_peft_weights(where, "cpu", **{k: hub[k] for k in WHERE if hub.get(k)})
    return {key.removeprefix("base_model.model."): value for key, value in weights.items()}


# Choosing between adapters


@wrap("set_adapter", ModulesToSaveWrapper)
def _set_adapter(original, self, adapter_names, *args, **kwargs):
    """Select the copy of `hyper`, and refuse two adapters that both have one."""
    if isinstance(self.original_module, Hyper):
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        # PEFT fails on adapters that have no copy of `hyper`.
        adapter_names = [name for name in names if name in self.modules_to_save]
        refuse_two(adapter_names, "set_adapter")
    return original(self, adapter_names, *args, **kwargs)


@wrap("check_set_adapter", ModulesToSaveWrapper)
def _check_set(original, self, adapter_name):
    """Refuse two adapters with added parameters before PEFT switches any module."""
    if isinstance(self.original_module, Hyper) and not isinstance(adapter_name, str):
        refuse_two([name for name in adapter_name if name in self.modules_to_save], "set_adapter")
    return original(self, adapter_name)


@wrap("enable_adapters", PeftAdapterMixin)
def _enable_adapters(original, self, *args, **kwargs):
    """Enable the copies of `hyper`, too."""
    result = original(self, *args, **kwargs)
    for _, wrapper in hyper_wrappers(self):
        wrapper.enable_adapters(True)
    return result


@wrap("disable_adapter", PeftModel)
@contextmanager
def _disable_adapter(original, self, *args, **kwargs) -> Iterator[None]:
    """Disable the adapter for a while, with its copy of `hyper`.

    PEFT leaves the modules of `modules_to_save` enabled if the adapter is a prompt.
    """
    wrappers = [wrapper for _, wrapper in hyper_wrappers(self)] if self._is_prompt_learning else []
    trained = [p for wrapper in wrappers for p in wrapper.parameters() if p.requires_grad]
    for wrapper in wrappers:
        wrapper.enable_adapters(False)
    try:
        with original(self, *args, **kwargs):
            yield
    finally:
        # `enable_adapters` makes all copies trainable. Restore which ones were.
        for wrapper in wrappers:
            wrapper.enable_adapters(True)
            wrapper.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)


@wrap("_check_forward_args", ModulesToSaveWrapper)
def _check_rows(original, self, *args, **kwargs):
    """Refuse to mix adapters with added parameters in one batch."""
    if isinstance(self.original_module, Hyper) and kwargs.get("adapter_names") is not None:
        raise ValueError(
            "adapter_names= mixes adapters in one batch, and these hold added parameters ('hyper'), which change "
            "attention as a whole; call the model once for each adapter, after set_adapter(name)"
        )
    return original(self, *args, **kwargs)


# Merging


@wrap("merge_and_unload", BaseTuner)
def _merge_and_unload(original, self, progressbar=False, safe_merge=False, adapter_names=None):
    """Merge adapters, and leave the `hyper` that was merged in place of its wrapper."""
    with unwrapped_hyper(self, adapter_names or self.active_adapters, safe_merge):
        return original(
            self, progressbar=progressbar, safe_merge=safe_merge, adapter_names=adapter_names
        )


@wrap("unload", BaseTuner)
def _unload_adapters(original, self):
    """Unload all adapters, and leave the base model's `hyper` in place of its wrapper."""
    with unwrapped_hyper(self, []):
        return original(self)


@contextmanager
def unwrapped_hyper(tuner: BaseTuner, names: list[str], check: bool = False) -> Iterator[None]:
    """Replace every wrapper by the `hyper` that remains after a merge.

    If the block fails, the wrappers come back.

    Args:
        names: Adapters that are merged. []: keep the base model's `hyper`.
        check: Whether to raise for numbers that are not finite.

    Raises:
        ValueError: Two of the adapters hold added parameters, or some of these are not finite.
    """
    replaced = []
    try:
        for path, wrapper in list(hyper_wrappers(tuner.model)):
            holding = [name for name in names if name in wrapper.modules_to_save]
            refuse_two(holding, "merge_and_unload")
            kept = wrapper.modules_to_save[holding[0]] if holding else wrapper.original_module
            if check and not all(p.isfinite().all() for p in kept.parameters()):
                raise ValueError(
                    f"{path} of adapter {holding} has numbers that are not finite; train it again, or merge without "
                    "safe_merge"
                )
            host = tuner.model.get_submodule(path.rpartition(".")[0])
            host.hyper = kept
            replaced.append((host, wrapper))
        yield
    # Also for a keyboard interrupt: a half-unwrapped model would be useless.
    except BaseException:
        for host, wrapper in replaced:
            host.hyper = wrapper
        raise


@wrap("merge_adapter", BaseTuner)
def _merge_adapter(original, self, adapter_names: Any = None, *args, **kwargs):
    """Merge adapters only if the active added parameters belong to them."""
    # Without names PEFT merges the active adapters, and their copies of `hyper` run already.
    for _, wrapper in hyper_wrappers(self.model) if adapter_names else ():
        # PEFT merges LoRA matrices only. A copy of `hyper` that stays active must belong to a
        # merged adapter.
        merged = [name for name in adapter_names if name in wrapper.modules_to_save]
        if merged != [name for name in wrapper.active_adapters if name in wrapper.modules_to_save]:
            raise ValueError(
                f"merge_adapter({adapter_names}) would leave the added parameters of {wrapper.active_adapters} on; "
                "first call set_adapter with the adapters to merge"
            )
    return original(self, adapter_names, *args, **kwargs)


def refuse_hyper(model: nn.Module, names, what: str) -> None:
    """Raise if one of the adapters holds added parameters that an operation would ignore.

    Args:
        names: Names of the adapters.
        what: Name of the operation, for the error.
    """
    for path, wrapper in hyper_wrappers(model):
        for name in names:
            if name in wrapper.modules_to_save:
                raise ValueError(
                    f"{what} does not reach the added parameters ({path}) of adapter {name!r}; allowed: adapters "
                    "without 'hyper' in modules_to_save; load the other one under a name of its own and use set_adapter"
                )


@wrap("add_weighted_adapter", IA3Model)
@wrap("add_weighted_adapter", LoraModel)
def _add_weighted(original, self, adapters, *args, **kwargs):
    """Refuse to average adapters with added parameters."""
    refuse_hyper(self.model, adapters, "add_weighted_adapter")
    return original(self, adapters, *args, **kwargs)


@wrap("rescale_adapter_scale", peft.helpers)
def _rescale_adapter(original, model, multiplier):
    """Refuse to rescale adapters with added parameters."""
    paths = [f"{host}.hyper" for host, _, _ in hyper_adapters(model)]
    paths += [path for path, _ in hyper_wrappers(model)]
    if paths:
        raise ValueError(
            f"rescale_adapter_scale does not reach the added parameters ({paths[0]}); allowed: adapters without some, "
            "or add_weighted_adapter([name], [multiplier], new_name) of a HyperLoraConfig"
        )
    return original(model, multiplier)


@wrap("subtract_mutated_init", LoraModel)
def _convert_to_lora(original, self, output_state_dict, *args, **kwargs):
    """Add our parameters to a converted state dict. PEFT returns only the LoRA matrices."""
    added = {
        name: tensor for name, tensor in output_state_dict.items() if "hyper" in name.split(".")
    }
    return original(self, output_state_dict, *args, **kwargs) | added


@wrap("hotswap_adapter_from_state_dict", peft.utils.hotswap)
def _hotswap_adapter(original, model, state_dict, adapter_name, *args, **kwargs):
    """Swap the added parameters together with the LoRA matrices.

    Raises:
        ValueError: Only one of the two adapters has added parameters, or a wrapper holds them.
    """
    refuse_hyper(model, [adapter_name], "hot-swapping")
    # 1. Both adapters must have the same added parameters.
    # `.lora_hyper.` holds the added parameters of all adapters that patch the base themselves.
    there = {key: tensor for key, tensor in model.state_dict().items() if ".lora_hyper." in key}
    new = {key: tensor for key, tensor in state_dict.items() if "hyper" in key.split(".")}
    swapped = {key for key in there if f".lora_hyper.{adapter_name}." in key}
    strange = next(iter(sorted(new.keys() ^ swapped)), None)
    if strange is not None:
        raise ValueError(
            f"hot-swapping does not reach the added parameters ({strange}), which only one of the two adapters has; "
            "load the new one under a name of its own and use set_adapter"
        )
    # 2. PEFT swaps the LoRA matrices. It also zeroes some of our parameters, which it takes for
    # LoRA's.
    kept = {key: new.get(key, tensor.clone()) for key, tensor in there.items()}
    lora_only = {key: tensor for key, tensor in state_dict.items() if key not in new}
    original(model, lora_only, adapter_name, *args, **kwargs)
    # 3. Write the new values, and restore the values of all other adapters.
    for key, tensor in there.items():
        tensor.copy_(kept[key])
    for _, _, adapter in hyper_adapters(model):
        if adapter_name in adapter.lora_hyper:
            # Its gates may be zero again. The next call finds out.
            adapter.lora_hyper[adapter_name].moved = False
