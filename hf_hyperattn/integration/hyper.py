"""`host.hyper`: the one child module that a patched host gets; it owns every added parameter and is only called."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from ..config import HyperAttnConfig, MechanismConfig, mechanisms_of
from ..mechanisms.base import Host, HostCall, MechanismLayer, Plan
from ..readable import can_read
from ..registry import get_mechanism
from ..selection import head_numbers

logger = logging.getLogger("hf_hyperattn")


class Hyper(nn.Module):
    """The layers of a host's mechanisms, one child each, in the order of their stages.

    Args:
        config: what is done to the model.
        host: the host it is built for.
    """

    def __init__(self, config: HyperAttnConfig, host: Host):
        super().__init__()
        self.config = config.for_any_host
        self.own = (config.overrides or {}).get(host.name, ())  # configs that hold for this host alone
        self.heads = host.heads
        self.moved = False  # whether a gate was seen away from where it starts
        self.newly_routed = False  # whether the patch made this host call the attention interface
        heads = None if config.heads is None else head_numbers(config.heads, host.heads, host.name)
        mechanisms = mechanisms_of(config.mechanisms, self.own) if self.own else config.mechanisms
        for mechanism in mechanisms:
            layer = get_mechanism(mechanism.mechanism).layer(mechanism, host, config.mode, heads)
            if heads is not None:
                check_heads(layer, heads, host)
            self.add_module(mechanism.mechanism, layer)

    def mechanisms(self) -> tuple[MechanismConfig, ...]:
        """The mechanism configs that hold for this host."""
        return mechanisms_of(self.config.mechanisms, self.own)

    def layers(self) -> list[MechanismLayer]:
        return list(self.children())

    def forward(
        self, call: HostCall, weights: bool = False, stock: Callable[[], Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """The output [B, H, N, dv] and the weights where asked for; None where every layer leaves the call as it is.

        Args:
            call: the host's call.
            weights: whether to return the attention weights.
            stock: computes the output of the host's own attention. Where gates have not moved but are to learn, the
                output is that to the last bit, with the gradients of the mechanism.

        Raises:
            ValueError: the call has another number of heads than the host was patched for.
        """
        if call.query.shape[1] != self.heads:
            raise ValueError(
                f"a host patched for {self.heads} heads was called with {call.query.shape[1]}; patch it in "
                "the form in which it runs"
            )
        warn_of_hierarchy(call, tuple(self._modules))
        untouched = plan = Plan.of(call)
        for layer in self.children():
            plan = layer(plan)
        if plan is untouched:
            return None
        out, found = plan.run(weights=weights)
        if stock is not None and self.starts(call):
            with torch.no_grad():
                exact = stock().to(out.dtype)
            out = exact + (out - out.detach())
        return out, found

    def starts(self, call: HostCall) -> bool:
        """Whether training begins here: nothing has moved yet. Not asked again once something has."""
        if (
            self.moved
            or not torch.is_grad_enabled()
            or call.options.dropout_p
            or not can_read(*self.parameters())
        ):
            return False
        self.moved = not all(layer.identical() for layer in self.children())
        return not self.moved

    def reset_parameters(self) -> None:
        """Every added parameter at its starting value."""
        self.moved = False
        for layer in self.children():
            layer.reset_parameters()


def warn_of_hierarchy(call: HostCall, names: tuple[str, ...]) -> None:
    """Warn where a call has a hierarchy, and none of these mechanisms can use one."""
    if call.keywords.get("hierarchy") is not None and not torch.compiler.is_compiling():
        if all(get_mechanism(name).stage != "structure" for name in names):
            _warn_of_hierarchy(" and ".join(names))


@lru_cache(maxsize=64)
def _warn_of_hierarchy(names: str) -> None:
    logger.warning(
        f"hierarchy= reached attention that runs {names}, which ignores it; leave it out, or patch the model with a "
        "mechanism over hierarchies too, such as HsaConfig()"
    )


def check_heads(layer: MechanismLayer, heads: tuple[int, ...] | None, host: Host) -> None:
    """Refuse some of a host's heads for a layer that would change all of them.

    Args:
        layer: as its mechanism built it.
        heads: those that were chosen, None for all.
        host: where it is to be put.
    """
    some = heads is not None and len(heads) < host.heads
    if some and not (layer.honours_heads and layer.heads == heads):
        raise ValueError(
            f"{layer.config.mechanism} changes all heads of {host.name}, and heads= chooses {len(heads)} of "
            f"{host.heads}; allowed: heads=None, or a {type(layer).__name__} that passes heads to MechanismLayer, "
            "changes those alone (self.chosen) and says honours_heads = True"
        )
