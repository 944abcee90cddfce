"""Giving a live module another class, such as a subclass whose `forward` does more, and its own class back."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

from torch import nn

#: Where an instance keeps what `swap_class` changed on it.
KEPT = "_hyperattn_forwards"


def swap_class(module: nn.Module, cls: Any) -> None:
    """Change the class of a module, also where the instance keeps its own `forward`.

    Hooks of Accelerate's keep the bound method as `_old_forward`, and a function that calls it as `forward`. When they
    are removed, the bound method stays behind as `forward`.
    """
    before, kept, previous = module.__dict__.pop(KEPT, {}), {}, type(module)
    for name in ("forward", "_old_forward"):
        value: Any = module.__dict__.get(name)
        hooked = isinstance(value, functools.partial)
        method = getattr(value, "__wrapped__", None) if hooked else value
        if getattr(method, "__func__", None) is not previous.forward:
            continue
        new: Any = MethodType(cls.forward, module)
        new = functools.update_wrapper(functools.partial(value.func, *value.args), new) if hooked else new
        kept[name] = value
        module.__dict__[name] = before[name] if type(before.get(name)) is type(new) else new
    module.__class__ = cls
    if kept and issubclass(cls, previous):
        module.__dict__[KEPT] = kept
