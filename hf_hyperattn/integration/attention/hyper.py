"""`host.hyper`: the one child module that a patched attention layer gets. It owns every added parameter.

It has one layer for each mechanism. These layers change the plan of a call, and an engine computes
the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...config import HyperAttnConfig, MechanismConfig, mechanisms_of
from ...config.choice import select_heads
from ...config.registry import get_mechanism
from ...mechanisms.base import Host, HostCall, MechanismLayer
from ...utils.readable import can_read
from .call_path import Layers

logger: Any = logging.getLogger("hf_hyperattn")  # `warning_once` is Transformers'


class Hyper(Layers):
    """The layers of all mechanisms of one attention layer.

    Args:
        config: The patch of the whole model.
        host: The attention layer that it is built for.

    Attributes:
        overrides: Mechanism configs for this attention layer only.
        moved: Whether a gate has been seen away from its starting value.
        newly_routed: Whether the patch made this attention layer call the attention interface.
        came_with_model: Whether it was built with its model, from a checkpoint or a config.
    """

    # Transformers sets it on modules whose weights were loaded or initialised.
    _is_hf_initialized: bool

    def __init__(self, config: HyperAttnConfig, host: Host):
        super().__init__()
        # Without facts of single layers, so that configs of equally patched layers are equal.
        self.config = config.for_any_host
        self.overrides = (config.overrides or {}).get(host.name, ())
        self.heads = host.heads
        self.moved = False
        self.newly_routed = False
        self.came_with_model = False
        heads = None if config.heads is None else select_heads(config.heads, host.heads, host.name)
        for mechanism in self.mechanisms():
            layer = get_mechanism(mechanism.mechanism).layer(mechanism, host, config.mode, heads)
            if heads is not None:
                check_heads(layer, heads, host)
            self.add_module(mechanism.mechanism, layer)

    def mechanisms(self) -> tuple[MechanismConfig, ...]:
        """Return the mechanism configs that hold for this attention layer."""
        return mechanisms_of(self.config.mechanisms, self.overrides)

    def layers(self) -> list[MechanismLayer]:
        """Return the layers of the mechanisms, in the order of their stages."""
        return list(self._modules.values())

    def starts(self, call: HostCall) -> bool:
        """Return whether training begins with this call: no gate has moved yet.

        Once a gate has moved the answer stays False, without reading the gates again.
        """
        # With dropout the layer's own attention is random, so its exact output cannot be repeated.
        if self.moved or not torch.is_grad_enabled() or call.options.dropout_p:
            return False
        if not can_read(*self.parameters()):
            return False
        self.moved = not all(layer.identical() for layer in self.layers())
        return not self.moved

    def reset_parameters(self) -> None:
        """Set every added parameter to its starting value."""
        self.moved = False
        for layer in self.layers():
            layer.reset_parameters()


def check_heads(layer: MechanismLayer, heads: tuple[int, ...], host: Host) -> None:
    """Raise if only some heads were chosen for a layer that would change all of them.

    Args:
        layer: The layer, as its mechanism built it.
        heads: Numbers of the chosen heads.
        host: The attention layer that it is built for.

    Raises:
        ValueError: The layer does not honour the choice.
    """
    if len(heads) < host.heads and not (layer.honours_heads and layer.heads == heads):
        raise ValueError(
            f"{layer.config.mechanism} changes all heads of {host.name}, and heads= chooses {len(heads)} of "
            f"{host.heads}; allowed: heads=None, or a {type(layer).__name__} that passes heads to MechanismLayer, "
            "changes those alone (self.head_mask) and says honours_heads = True"
        )


def patched_hosts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Return an iterator over the patched attention layers: name and module."""
    hosts = []
    for name, module in model.named_modules():
        hyper = module._modules.get("hyper")
        if isinstance(getattr(hyper, "original_module", hyper), Hyper):
            # The child may be a `Hyper`, or PEFT's wrapper around one.
            hosts.append((name, module))
    return iter(hosts)


def unwrap_hyper(module: Any) -> Any:
    """Return the `Hyper` inside PEFT's wrapper, or the module itself if it is not wrapped."""
    return getattr(module, "original_module", module)


def active_hyper(module: Any) -> Hyper | None:
    """Return the `Hyper` that is in use at an attention layer.

    Args:
        module: The module at `host.hyper`: a `Hyper`, PEFT's wrapper around one, or a
            `HyperAdapter`. None for a layer that is not patched.
    """
    # A `HyperAdapter` answers this itself. No `isinstance`: its module imports this one.
    if hasattr(module, "running_hyper"):
        return module.running_hyper
    # PEFT's `ModulesToSaveWrapper` keeps one copy for each adapter.
    copies = getattr(module, "modules_to_save", {})
    names = [name for name in getattr(module, "active_adapters", []) if name in copies]
    if names and not module.disable_adapters:
        return copies[names[0]]
    return getattr(module, "original_module", module)
