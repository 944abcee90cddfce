"""Weights that Accelerate keeps elsewhere (`device_map` with "cpu" or "disk") and brings to a module while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate.hooks import attach_align_device_hook
from accelerate.utils import OffloadedWeightsLoader, align_module_device, offload_weight
from torch import nn


def is_offloaded(module: nn.Module) -> bool:
    """Whether Accelerate brings a module's own weights only while it runs."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def without_weights(modules: Iterable[nn.Module]) -> bool:
    """Whether some parameter is on the meta device and nothing brings its values."""
    parts = (part for module in modules for part in module.modules() if not is_offloaded(part))
    return any(p.is_meta for part in parts for p in part.parameters(recurse=False))


@contextmanager
def in_memory(modules: Iterable[nn.Module]) -> Iterator[None]:
    """The weights of offloaded modules are where they run while the block does."""
    with ExitStack() as stack:
        for module in modules:
            for part in module.modules():
                stack.enter_context(align_module_device(part))
        yield


def storage_of(module: nn.Module) -> tuple[Any, Any]:
    """The hook of an offloaded module, and where that finds the weights of the whole model by their names."""
    hook: Any = module._hf_hook
    return hook, getattr(hook.weights_map, "dataset", hook.weights_map)


def drop_weights(old: nn.Module, name: str) -> None:
    """Let go of the weights of an offloaded module that nothing needs any more; those on a disk stay there."""
    if is_offloaded(old):
        _, stored = storage_of(old)
        for key in old.state_dict(prefix=f"{name}."):
            getattr(stored, "state_dict", stored).pop(key, None)


def offload_like(new: nn.Module, old: nn.Module, name: str) -> None:
    """Keep a new module's weights where those of the module are that it replaces; nothing where it was not offloaded.

    Args:
        name: the qualified name that it will have.
    """
    if not is_offloaded(old):
        return
    hook, stored = storage_of(old)
    on_disk = isinstance(stored, OffloadedWeightsLoader)
    for key, tensor in new.state_dict(prefix=f"{name}.").items():
        if on_disk and stored.save_folder is not None:
            offload_weight(tensor.detach(), key, stored.save_folder, stored.index)
        else:
            (stored.state_dict if on_disk else stored)[key] = tensor.detach().cpu()
        if on_disk and key not in stored.all_keys:
            stored.all_keys.append(key)
    attach_align_device_hook(
        new,
        hook.execution_device,
        offload=True,
        weights_map=stored,
        module_name=name,
        skip_keys=hook.skip_keys,
        tied_params_map=hook.tied_params_map,
    )
