"""Change the class of a live module, and change it back.

The new class is a subclass whose `forward` does more. The work here is to keep wrappers of the old
`forward` (Accelerate, `functools.wraps`, the compiler) in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

#: Attribute of an instance: the forwards that `swap_class` replaced on it.
KEPT = "_hyperattn_forwards"
#: Attribute of a copy from `rebind_wrapper`: (the copy, the original wrapper). Later wrappers copy
#: the attribute, so the first entry shows whether a function is the copy itself.
WRAPPER = "_hyperattn_wrapper"
#: Number of nested wrappers around a forward that are followed.
DEPTH = 4


def swap_class(module: nn.Module, cls: Any) -> None:
    """Change the class of a module, also if the instance has a `forward` of its own.

    Hooks of Accelerate keep the bound method as `_old_forward`, and set a function that calls it as
    `forward`. When the hooks are removed, the bound method stays behind as `forward`. Wrappers by
    `functools.wraps` and by the compiler keep the bound method in a closure. They are replaced by
    copies that call the new method, and come back with the old class.

    Args:
        cls: The new class: a subclass or a superclass of the current one.
    """
    before = module.__dict__.pop(KEPT, {})
    kept = {}
    previous = type(module)
    for name in ("forward", "_old_forward"):
        value: Any = module.__dict__.get(name)
        # 1. A copy from an earlier swap goes, and the wrapper comes back.
        copied, wrapper = getattr(value, WRAPPER, (None, None))
        if copied is not None and copied is value and issubclass(previous, cls):
            module.__dict__[name] = wrapper
            continue
        # 2. A wrapper of the old method: a copy of it calls the new method.
        if wraps_forward(value, previous.forward) and issubclass(cls, previous):
            copy: Any = rebind_wrapper(value, previous.forward, MethodType(cls.forward, module))
            setattr(copy, WRAPPER, (copy, value))
            module.__dict__[name] = copy
            continue
        # 3. The bound method itself, or Accelerate's partial function around it.
        hooked = isinstance(value, functools.partial)
        method = getattr(value, "__wrapped__", None) if hooked else value
        if getattr(method, "__func__", None) is not previous.forward:
            continue
        new: Any = MethodType(cls.forward, module)
        if hooked:
            new = functools.update_wrapper(functools.partial(value.func, *value.args), new)
        kept[name] = value
        module.__dict__[name] = before[name] if type(before.get(name)) is type(new) else new
    module.__class__ = cls
    if kept and issubclass(cls, previous):
        module.__dict__[KEPT] = kept


def unwrap_forward(forward: Any) -> Iterator[Any]:
    """Yield a forward and everything that it wraps, from the outside in.

    Wrappers of Accelerate, of `functools.wraps` and of the compiler are followed.
    """
    while forward is not None:
        yield forward
        inside = (
            getattr(forward, name, None)
            for name in ("_torchdynamo_orig_callable", "__wrapped__", "__func__")
        )
        forward = next(
            (part for part in inside if part is not None), getattr(forward, "func", None)
        )


def wraps_forward(forward: Any, original: Callable) -> bool:
    """Return whether a function claims to wrap a method, and keeps it in its closure.

    Args:
        forward: The function.
        original: The function of the bound method.
    """
    claims = any(getattr(part, "__func__", None) is original for part in unwrap_forward(forward))
    if not claims or not isinstance(forward, FunctionType):
        return False
    # Only a wrapper with the method in its closure can be copied, and then the copy is another
    # function.
    return rebind_wrapper(forward, original, forward) is not forward


def rebind_wrapper(value: Any, original: Callable, new: Any, depth: int = DEPTH) -> Any:
    """Return a copy of a wrapper that calls a new function instead of a bound method.

    Args:
        value: The wrapper, or a value in its closure.
        original: The function of the bound method.
        new: The callable that replaces the bound method.
        depth: Number of further wrappers to follow.

    Returns:
        The copy, or the value itself if it does not contain the method.
    """
    if getattr(value, "__func__", None) is original:
        return new
    if not isinstance(value, FunctionType) or depth == 0:
        return value
    cells = value.__closure__ or ()
    closure = tuple(rebind_cell(cell, original, new, depth - 1) for cell in cells)
    if all(after is before for after, before in zip(closure, cells, strict=True)):
        return value
    copy = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, closure
    )
    functools.update_wrapper(copy, value)
    copy.__kwdefaults__ = value.__kwdefaults__
    # `__wrapped__`, and the attribute in which the compiler keeps the same function.
    for name, kept in vars(value).items():
        setattr(copy, name, rebind_wrapper(kept, original, new, depth - 1))
    return copy


def rebind_cell(cell: CellType, original: Callable, new: Any, depth: int) -> CellType:
    """Return a closure cell with rebound content, or the cell itself if nothing changes.

    An unchanged cell stays shared with the original wrapper.
    """
    if cell == CellType():
        # The variable has no value yet, and reading it would raise.
        return cell
    after = rebind_wrapper(cell.cell_contents, original, new, depth)
    return cell if after is cell.cell_contents else CellType(after)
