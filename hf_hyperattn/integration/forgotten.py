"""The keys and values that a cache hands out once it may forget some: only the attention it was made for may use them.

Transformers passes what a cache returns on to any attention. There these tensors raise an error at the first operation,
so that no model computes with numbers that are not there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attached import attached_to
from ..mechanisms.selection.cache import EVICTING, LayerCache

REFUSAL = (
    f"{EVICTING} does not hold the keys and values that this attention reads: it was made for another model or another "
    "patch, or the layer changes keys or values after they were cached; allowed: the patched model that the cache was "
    "made for, or evict=False"
)


class ForgottenTokens(Tensor):
    """A tensor that has a shape, a dtype and a device, and no numbers: every operation raises a `ValueError`.

    Args:
        shown: The placeholder that the cache made, which hsa and sparse rules find the cache by.
    """

    shown: Tensor
    # Names such as `shape` need no override; operations arrive in `__torch_dispatch__`.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore

    @staticmethod
    def __new__(cls, shown: Tensor):
        made = Tensor._make_wrapper_subclass(
            cls, shown.shape, dtype=shown.dtype, device=shown.device
        )
        made.shown = shown
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise ValueError(REFUSAL)

    def __repr__(self, *, tensor_contents=None):
        return f"<{EVICTING}: {tuple(self.shape)}, {self.dtype}>"

    # Copies and pickles of a cache are caches of their own.
    def __deepcopy__(self, memo: dict) -> ForgottenTokens:
        return type(self)(self.shown.clone())

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return type(self), (self.shown,)


def open_forgotten(layers: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the placeholders of a call for the one layer that reads from the cache itself.

    Args:
        layers: The `Layers` of the call, or a function in their place.
        key, value: Of the call; one of them is a `ForgottenTokens`.

    Raises:
        ValueError: Something else than the cache would be read.
    """
    each = list(layers.children()) if isinstance(layers, nn.Module) else []
    reads_cache = len(each) == 1 and each[0].reads_forgotten and each[0].mode == "replace"
    opened = tuple(t.shown if isinstance(t, ForgottenTokens) else t for t in (key, value))
    caches = {attached_to(tensor, LayerCache) for tensor in opened}
    if not reads_cache or len(caches) != 1 or None in caches:
        raise ValueError(REFUSAL)
    return opened[0], opened[1]
