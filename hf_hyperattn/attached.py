"""What this package knows of tensors that reach attention through the code of others.

Transformers hands an attention function tensors and nothing else: not the cache that gave the keys, and not what a mask
was made of. So what belongs to such a tensor stands in this one table, by the identity of the tensor, for as long as
the tensor lives; of one tensor one thing is known. A tensor that was copied or cast on its way has no entry: then its
numbers are read, and what a cache keeps beside its keys is not used.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_ATTACHED: WeakIdKeyDictionary = WeakIdKeyDictionary()

What = TypeVar("What")


def attach(tensor: Tensor, what: object) -> None:
    """Remember `what` of a tensor, but in compiled calls. It must not hold the tensor, which would live for ever."""
    if not torch.compiler.is_compiling():
        _ATTACHED[tensor] = what


def attached_to(tensor: Tensor | None, kind: type[What]) -> What | None:
    """Return what is known of a tensor, if it is of this kind; None in compiled calls, whose tensors are no objects."""
    if tensor is None or torch.compiler.is_compiling():
        return None
    what = _ATTACHED.get(tensor)
    return what if isinstance(what, kind) else None
