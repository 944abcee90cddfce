"""`host.hyper`: the one child module that a patched host gets. It owns every added parameter is only ever called."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from ..choice import head_numbers
from ..config import HyperAttnConfig
from ..mechanisms.base import Host, HostCall, MechanismLayer, Plan
from ..registry import get_mechanism


class Hyper(nn.Module):
    """The layers of a host's mechanisms, one child each, in the order of their stages.

    Args:
        config: what is done to the model.
        host: the host it is built for.
    """

    def __init__(self, config: HyperAttnConfig, host: Host):
        super().__init__()
        self.config = replace(config, layers=None, hosts=None)
        self.heads = host.heads
        self.newly_routed = False  # whether the patch made this host call the attention interface
        heads = head_numbers(config.heads, host.heads, host.name)
        for mechanism in config.mechanisms:
            layer = get_mechanism(mechanism.mechanism).layer(mechanism, host, config.mode, heads)
            self.add_module(mechanism.mechanism, layer)

    def layers(self) -> list[MechanismLayer]:
        return list(self.children())

    def forward(self, call: HostCall, weights: bool = False) -> tuple[Tensor, Tensor | None] | None:
        """The output [B, H, N, dv] and the weights where asked for; None where every layer leaves the call as it is.

        Raises:
            ValueError: the call has another number of heads than the host was patched for.
        """
        if call.query.shape[1] != self.heads:
            raise ValueError(
                f"a host patched for {self.heads} heads was called with {call.query.shape[1]}; patch it in "
                "the form in which it runs"
            )
        untouched = plan = Plan.of(call)
        for layer in self.children():
            plan = layer(plan)
        return None if plan is untouched else plan.run(weights=weights)

    def reset_parameters(self) -> None:
        """Every added parameter at its starting value."""
        for layer in self.children():
            layer.reset_parameters()
