"""The names that `attn_implementation=` accepts, each with an attention and a mask function.

- A mechanism's own names ("cone", ...) run the published operators, without learned parameters.
- `hf_hyperattn` is the name of patched models. Its function looks for `host.hyper`. An attention
  layer without one runs the implementation from before the patch.
- `hyper_dot` is the plain dot product on the fastest of our engines. Its last digits differ from
  SDPA's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

import model_patches

from ... import mechanisms  # noqa: F401  fills the registry
from ...config.registry import Mechanism, on_register
from ...engines import attention, dot_score
from ...mechanisms.base import HostCall
from ..attention.by_name import NamedMechanism
from ..attention.call import UNROUTED
from ..attention.call_path import attention_function, family_mask, patched_forward
from ..attention.stock import FUNCTIONS, HYPER_DOT, OURS, PATCHED
from ..patching.unsupported import refuse_unrouted


def register_names() -> None:
    """Register every name with Transformers, also for mechanisms registered later."""
    # Missing upstream: an error for families that never call the attention interface. Transformers
    # still asks for their masks by our name, so the mask function can raise.
    UNROUTED.update(dict.fromkeys(model_patches.REFUSED, refuse_unrouted))
    _register_name(PATCHED, patched_forward)
    # Not in `OURS`: like "sdpa" it is a base implementation, on which patches may build.
    FUNCTIONS[HYPER_DOT] = attention_function(PlainDot)
    AttentionInterface.register(HYPER_DOT, FUNCTIONS[HYPER_DOT])
    AttentionMaskInterface.register(HYPER_DOT, family_mask)
    on_register(register_names_of)


def register_names_of(mechanism: Mechanism) -> None:
    """Register the names of one mechanism."""
    for name, config in mechanism.names.items():
        forward = attention_function(NamedMechanism(config))
        forward.__name__ = forward.__qualname__ = f"{name}_attention_forward"
        _register_name(name, forward)


def _register_name(name: str, function) -> None:
    # A name without a mask function of its own would get no mask at all.
    OURS.add(name)
    FUNCTIONS[name] = function
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, family_mask)


class PlainDot:
    """The implementation of `hyper_dot`, the same for all attention layers."""

    @staticmethod
    def layers(
        call: HostCall, weights: bool = False, stock: Callable | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention layer's own attention; see `Layers.forward`."""
        score = dot_score(call.query, call.key, call.scale)
        # The fastest engine may run: this name promises no equal last digits.
        options = replace(call.options, any_rounding=True)
        out, attention_weights = attention(
            score, call.value, options, backend=call.backend, weights=weights
        )
        return out.to(call.query.dtype), attention_weights

    @staticmethod
    def find_layers(_: nn.Module) -> Callable:
        """Return the layers for a module; see `attention_function`."""
        return PlainDot.layers
