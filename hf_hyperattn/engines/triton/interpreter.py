"""Repair Triton's interpreter (TRITON_INTERPRET=1) for NumPy 2.4.

The interpreter turns arrays of one element into loop bounds with `int()`, which NumPy refuses from
2.4 on.
"""

from __future__ import annotations

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_with_index(tensor, scope) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_with_index
