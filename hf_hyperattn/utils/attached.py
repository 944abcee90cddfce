"""One table of facts about tensors that pass through code of Transformers.

Transformers passes only tensors to an attention function: not the cache of the keys, and not the
origin of a mask. So this table stores such facts by the identity of the tensor, for as long as the
tensor lives. A tensor has at most one entry; a new one replaces the old. A tensor that was copied
or cast on its way has no entry. Then its values are read, and the state that a cache keeps with its
keys is not used.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Weak keys, so that an entry does not keep its tensor alive. By identity, because tensors compare
# elementwise.
_ATTACHED: WeakIdKeyDictionary = WeakIdKeyDictionary()

T = TypeVar("T")


def attach(tensor: Tensor, what: object) -> None:
    """Store a fact about a tensor. Does nothing in compiled calls.

    Args:
        tensor: Any tensor.
        what: The fact. It must not refer to the tensor, which would then never be freed.
    """
    if not torch.compiler.is_compiling():
        _ATTACHED[tensor] = what


def attached_to(tensor: Tensor | None, kind: type[T]) -> T | None:
    """Return the fact about a tensor, if it has this type; else None.

    In compiled calls tensors have no lasting identity, so the result is None.

    Args:
        tensor: Any tensor; None: no fact.
        kind: Type of the fact.
    """
    if tensor is None or torch.compiler.is_compiling():
        return None
    what = _ATTACHED.get(tensor)
    return what if isinstance(what, kind) else None
