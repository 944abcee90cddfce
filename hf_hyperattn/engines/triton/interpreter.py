"""A mend for Triton's interpreter (TRITON_INTERPRET=1): it turns arrays of one element into loop bounds with int(),
which NumPy refuses from 2.4 on.
"""

from __future__ import annotations

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patched(tensor, scope) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched
