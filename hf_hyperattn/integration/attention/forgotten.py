"""Placeholder keys and values of a cache that evicts tokens.

Transformers passes on what a cache returns to any attention. Only the attention that the cache was
made for can use an evicting one. For any other code these tensors raise at the first operation, so
no model computes with missing numbers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...mechanisms.selection.cache import EVICTING, LayerCache
from ...utils.attached import attached_to
from ...utils.torch_private import make_wrapper, no_torch_function

REFUSAL = (
    f"{EVICTING} does not hold the keys and values that this attention reads: it was made for another model or another "
    "patch, or the layer changes keys or values after they were cached; allowed: the patched model that the cache was "
    "made for, or evict=False"
)


class ForgottenTokens(Tensor):
    """A tensor with shape, dtype and device, but without numbers.

    Every operation on it raises a `ValueError`.

    Args:
        shown: Placeholder that the cache made. HSA and sparse layers find the cache by it.
    """

    shown: Tensor
    # Attributes such as `shape` work without an override. Operations arrive in
    # `__torch_dispatch__`.
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, shown: Tensor):
        made = make_wrapper(cls, shown.shape, dtype=shown.dtype, device=shown.device)
        made.shown = shown
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise ValueError(REFUSAL)

    def __repr__(self, *, tensor_contents=None):
        return f"<{EVICTING}: {tuple(self.shape)}, {self.dtype}>"

    # A copied cache must have a placeholder of its own: the original one belongs to the original
    # cache.
    def __deepcopy__(self, memo: dict) -> ForgottenTokens:
        return type(self)(self.shown.clone())

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return type(self), (self.shown,)


def open_forgotten(layers: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the placeholders of a call, for the one layer that reads the cache itself.

    Args:
        layers: `Layers` of the call, or the function that runs in their place.
        key, value: Keys and values of the call. At least one is a `ForgottenTokens`.

    Raises:
        ValueError: Something other than that layer would read the tensors.
    """
    # The keys are gone, so the call must have exactly one layer, and that layer must replace the
    # original attention.
    each = list(layers.children()) if isinstance(layers, nn.Module) else []
    reads_cache = len(each) == 1 and each[0].reads_forgotten and each[0].mode == "replace"
    opened = tuple(t.shown if isinstance(t, ForgottenTokens) else t for t in (key, value))
    # Both tensors must come from the same cache, unchanged: a computed tensor has no cache
    # attached.
    caches = {attached_to(tensor, LayerCache) for tensor in opened}
    if not reads_cache or len(caches) != 1 or None in caches:
        raise ValueError(REFUSAL)
    return opened[0], opened[1]
