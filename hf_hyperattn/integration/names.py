"""The names that `attn_implementation=` accepts, each registered as an attention function and a mask function together.

A mechanism's own names ("cone", ...) are the published operators, without anything to learn. `hf_hyperattn` is the
name of patched models: its function looks for `host.hyper`; a host without one runs what the model ran before.
`hyper_dot` is the plain dot product on the engine that is the fastest for it, whose last digits are not SDPA's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

import model_patches

from .. import mechanisms  # noqa: F401  fills the registry
from ..engines import attention, dot_score
from ..mechanisms.base import HostCall
from ..registry import Mechanism, on_register
from .attention import attention_function, family_mask, patched_forward
from .by_name import NamedMechanism
from .call import UNROUTED
from .stock import FUNCTIONS, HYPER_DOT, OURS, PATCHED
from .unsupported import refuse_unrouted


def register_names() -> None:
    """Register every name with Transformers, those of mechanisms that are registered later too."""
    UNROUTED.update(dict.fromkeys(model_patches.REFUSED, refuse_unrouted))
    _register(PATCHED, patched_forward)
    FUNCTIONS[HYPER_DOT] = attention_function(PlainDot)
    AttentionInterface.register(HYPER_DOT, FUNCTIONS[HYPER_DOT])
    AttentionMaskInterface.register(HYPER_DOT, family_mask)
    on_register(register_names_of)


def register_names_of(mechanism: Mechanism) -> None:
    """Register the names of one mechanism."""
    for name, config in mechanism.names.items():
        forward = attention_function(NamedMechanism(config))
        forward.__name__ = forward.__qualname__ = f"{name}_attention_forward"
        _register(name, forward)


def _register(name: str, function) -> None:
    OURS.add(name)
    FUNCTIONS[name] = function
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, family_mask)


class PlainDot:
    """What `hyper_dot` runs: no layer, with the same for all modules."""

    @staticmethod
    def layers(
        call: HostCall, weights: bool = False, stock: Callable | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The host's own attention; arguments and result as in `Layers.forward`."""
        score, options = (
            dot_score(call.query, call.key, call.scale),
            replace(call.options, any_rounding=True),
        )
        out, attention_weights = attention(
            score, call.value, options, backend=call.backend, weights=weights
        )
        return out.to(call.query.dtype), attention_weights

    @staticmethod
    def find_layers(_: nn.Module) -> Callable:
        """See `attention_function`."""
        return PlainDot.layers
