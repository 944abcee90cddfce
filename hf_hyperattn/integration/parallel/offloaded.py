"""Weights that Accelerate offloads (`device_map` with "cpu" or "disk") and loads while a module runs.

These functions find, read, add and drop such weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate.hooks import attach_align_device_hook
from accelerate.utils import OffloadedWeightsLoader, align_module_device, offload_weight
from torch import nn


def is_offloaded(module: nn.Module) -> bool:
    """Return whether Accelerate loads a module's own weights only while it runs."""
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


def without_weights(modules: Iterable[nn.Module]) -> bool:
    """Return whether a parameter is on the meta device and nothing loads its values."""
    parts = (part for module in modules for part in module.modules() if not is_offloaded(part))
    return any(p.is_meta for part in parts for p in part.parameters(recurse=False))


@contextmanager
def in_memory(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Load the weights of offloaded modules for the length of the block."""
    with ExitStack() as stack:
        for module in modules:
            for part in module.modules():
                stack.enter_context(align_module_device(part))
        yield


def storage_of(module: nn.Module) -> tuple[Any, Any]:
    """Return the hook of an offloaded module, and the model's weights by name."""
    # Missing upstream: Accelerate has no function to add or remove a single offloaded weight, so
    # the private hook and the mapping inside it are used.
    hook: Any = module._hf_hook
    # A prefixed view of the mapping has the mapping of the whole model as `dataset`.
    return hook, getattr(hook.weights_map, "dataset", hook.weights_map)


def drop_weights(old: nn.Module, name: str) -> None:
    """Release the weights of an offloaded module that is no longer used.

    Weights on a disk stay there.

    Args:
        old: The module.
        name: Its qualified name in the model.
    """
    if is_offloaded(old):
        _, stored = storage_of(old)
        for key in old.state_dict(prefix=f"{name}."):
            getattr(stored, "state_dict", stored).pop(key, None)


def offload_like(new: nn.Module, old: nn.Module, name: str) -> None:
    """Offload a new module's weights like the weights of the module that it replaces.

    Does nothing if the old module was not offloaded.

    Args:
        new: The new module, with its weights in memory.
        old: The module that it replaces.
        name: The qualified name that both have in the model.
    """
    if not is_offloaded(old):
        return
    hook, stored = storage_of(old)
    on_disk = isinstance(stored, OffloadedWeightsLoader)
    for key, tensor in new.state_dict(prefix=f"{name}.").items():
        if on_disk and stored.save_folder is not None:
            offload_weight(tensor.detach(), key, stored.save_folder, stored.index)
        else:
            # A loader without a folder keeps a part of its weights in memory, by name.
            weights = stored.state_dict if on_disk else stored
            weights[key] = tensor.detach().cpu()
        # The loader made this list when it was created, and iterates over it.
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
