"""What this package knows of tensors that reach attention through the code of others.

Transformers hands an attention function tensors and nothing else: not the cache that gave the keys, and not what a mask
was made of. So this one table stores what belongs to such a tensor, by the identity of the tensor, for as long as the
tensor lives. A tensor has at most one entry; a new one replaces the old. A tensor that was copied or cast on its way
has none: then its numbers are read, and what a cache keeps beside its keys is not used.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_ATTACHED: WeakIdKeyDictionary = WeakIdKeyDictionary()

T = TypeVar("T")


def attach(tensor: Tensor, what: object) -> None:
    """Remember `what` of a tensor. Does nothing in compiled calls.

    Args:
        tensor: Any.
        what: Must not refer to the tensor, which would then never be freed.
    """
    if not torch.compiler.is_compiling():
        _ATTACHED[tensor] = what


def attached_to(tensor: Tensor | None, kind: type[T]) -> T | None:
    """Return what is known of a tensor, if it is of this kind.

    None in compiled calls, where tensors have no lasting identity.
    """
    if tensor is None or torch.compiler.is_compiling():
        return None
    what = _ATTACHED.get(tensor)
    return what if isinstance(what, kind) else None
