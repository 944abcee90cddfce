"""`host.hyper`, the one child module that a patched attention layer gets. It owns every added parameter.

Its layers, one for each mechanism, change the plan of a call, and the plan is computed by an engine.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..config import HyperAttnConfig, MechanismConfig, mechanisms_of
from ..mechanisms.base import Host, HostCall, MechanismLayer
from ..readable import can_read
from ..registry import get_mechanism
from ..selection import select_heads
from .attention import Layers

logger: Any = logging.getLogger("hf_hyperattn")  # `warning_once` is Transformers'


class Hyper(Layers):
    """The layers of a host's mechanisms.

    Args:
        config: what is done to the model.
        host: the host it is built for.
    """

    _is_hf_initialized: bool

    def __init__(self, config: HyperAttnConfig, host: Host):
        super().__init__()
        self.config = config.for_any_host
        self.overrides = (config.overrides or {}).get(
            host.name, ()
        )  # configs that hold for this host alone
        self.heads = host.heads
        self.moved = False  # whether a gate was seen away from where it starts
        self.newly_routed = False  # whether the patch made this host call the attention interface
        self.came_with_model = (
            False  # whether it was built with its model, from a checkpoint or a config
        )
        heads = None if config.heads is None else select_heads(config.heads, host.heads, host.name)
        mechanisms = (
            mechanisms_of(config.mechanisms, self.overrides)
            if self.overrides
            else config.mechanisms
        )
        for mechanism in mechanisms:
            layer = get_mechanism(mechanism.mechanism).layer(mechanism, host, config.mode, heads)
            if heads is not None:
                check_heads(layer, heads, host)
            self.add_module(mechanism.mechanism, layer)

    def mechanisms(self) -> tuple[MechanismConfig, ...]:
        """The mechanism configs that hold for this host."""
        return mechanisms_of(self.config.mechanisms, self.overrides)

    def layers(self) -> list[MechanismLayer]:
        return list(self._modules.values())

    def starts(self, call: HostCall) -> bool:
        """Whether training begins here: nothing has moved yet. Not asked again once something has."""
        if (
            self.moved
            or not torch.is_grad_enabled()
            or call.options.dropout_p
            or not can_read(*self.parameters())
        ):
            return False
        self.moved = not all(layer.identical() for layer in self.layers())
        return not self.moved

    def reset_parameters(self) -> None:
        """Every added parameter at its starting value."""
        self.moved = False
        for layer in self.layers():
            layer.reset_parameters()


def check_heads(layer: MechanismLayer, heads: tuple[int, ...], host: Host) -> None:
    """Refuse some of a host's heads for a layer that would change all of them.

    Args:
        layer: as its mechanism built it.
        heads: those that were chosen.
        host: where it is to be put.
    """
    if len(heads) < host.heads and not (layer.honours_heads and layer.heads == heads):
        raise ValueError(
            f"{layer.config.mechanism} changes all heads of {host.name}, and heads= chooses {len(heads)} of "
            f"{host.heads}; allowed: heads=None, or a {type(layer).__name__} that passes heads to MechanismLayer, "
            "changes those alone (self.head_mask) and says honours_heads = True"
        )
