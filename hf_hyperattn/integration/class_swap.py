"""Giving a live module another class, such as a subclass whose `forward` does more, and its own class back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

#: Where an instance keeps what `swap_class` changed on it.
KEPT = "_hyperattn_forwards"
#: Where a copy that `rebind_wrapper` made keeps itself, since later wrappers take its attributes over, and what it stands for.
WRAPPER = "_hyperattn_wrapper"
#: How many wrappers around a forward are looked through.
DEPTH = 4


def swap_class(module: nn.Module, cls: Any) -> None:
    """Change the class of a module, also where the instance keeps its own `forward`.

    Hooks of Accelerate's keep the bound method as `_old_forward`, and a function that calls it as `forward`. When they
    are removed, the bound method stays behind as `forward`. Wrappers by `functools.wraps` and the compiler keep the
    bound method in a closure: a copy that calls the new one stands for them, and they come back with the old class.
    """
    before, kept, previous = module.__dict__.pop(KEPT, {}), {}, type(module)
    for name in ("forward", "_old_forward"):
        value: Any = module.__dict__.get(name)
        copied, wrapper = getattr(value, WRAPPER, (None, None))
        if copied is not None and copied is value and issubclass(previous, cls):
            module.__dict__[name] = wrapper
            continue
        if wraps_forward(value, previous.forward) and issubclass(cls, previous):
            copy: Any = rebind_wrapper(value, previous.forward, MethodType(cls.forward, module))
            setattr(copy, WRAPPER, (copy, value))
            module.__dict__[name] = copy
            continue
        hooked = isinstance(value, functools.partial)
        method = getattr(value, "__wrapped__", None) if hooked else value
        if getattr(method, "__func__", None) is not previous.forward:
            continue
        new: Any = MethodType(cls.forward, module)
        new = (
            functools.update_wrapper(functools.partial(value.func, *value.args), new)
            if hooked
            else new
        )
        kept[name] = value
        module.__dict__[name] = before[name] if type(before.get(name)) is type(new) else new
    module.__class__ = cls
    if kept and issubclass(cls, previous):
        module.__dict__[KEPT] = kept


def unwrap_forward(forward: Any) -> Iterator[Any]:
    """Yield a forward and all that it wraps: as Accelerate, `functools.wraps` and the compiler do."""
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
    """Whether a function says that it wraps a bound method of `original`, and keeps that in its closure."""
    says = any(getattr(part, "__func__", None) is original for part in unwrap_forward(forward))
    return (
        says
        and isinstance(forward, FunctionType)
        and rebind_wrapper(forward, original, forward) is not forward
    )


def rebind_wrapper(value: Any, original: Callable, new: Any, depth: int = DEPTH) -> Any:
    """Return a copy of a wrapper that calls `new` in place of a bound method of `original`; else the value itself.

    Args:
        value: The wrapper, or what one keeps in its closure.
        original: The function of the bound method.
        new: The callable in its place.
        depth: How many wrappers may stand around it.
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
    for name, kept in vars(value).items():  # `__wrapped__`, and where the compiler keeps the same
        setattr(copy, name, rebind_wrapper(kept, original, new, depth - 1))
    return copy


def rebind_cell(cell: CellType, original: Callable, new: Any, depth: int) -> CellType:
    """Return a new cell with the content rebound; the cell itself if nothing in it changes, which stays shared."""
    if cell == CellType():  # its variable has no value yet
        return cell
    after = rebind_wrapper(cell.cell_contents, original, new, depth)
    return cell if after is cell.cell_contents else CellType(after)
