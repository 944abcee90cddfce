"""The names that `attn_implementation=` accepts, each registered as an attention function and a mask function together.

A mechanism's own names ("cone", ...) are the published operators, without anything to learn. `hf_hyperattn` is the
name of patched models: its function looks for `host.hyper`; a host without one runs what the model ran before.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

import model_patches

from .. import mechanisms  # noqa: F401  fills the registry
from ..registry import Mechanism, on_register
from .by_name import NamedMechanism
from .call import UNROUTED
from .hyper import attention_function, family_mask, patched_forward
from .stock import OURS, PATCHED
from .unsupported import refuse_unrouted


def register_names() -> None:
    """Register every name with Transformers, those of mechanisms that are registered later too."""
    UNROUTED.update(dict.fromkeys(model_patches.REFUSED, refuse_unrouted))
    _register(PATCHED, patched_forward)
    on_register(register_names_of)


def register_names_of(mechanism: Mechanism) -> None:
    """Register the names of one mechanism."""
    for name, config in mechanism.names.items():
        forward = attention_function(NamedMechanism(config))
        forward.__name__ = forward.__qualname__ = f"{name}_attention_forward"
        _register(name, forward)


def _register(name: str, function) -> None:
    OURS.add(name)
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, family_mask)
