"""Check that the first call of an attention layer reaches its mechanism.

A layer whose `forward` was replaced, or overridden in a subclass, may compute attention by itself.
The model would then run, and learn, without the mechanism. So every layer is watched until one of
its calls has reached our attention function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .class_swap import unwrap_forward
from .hosts import INTERFACE, find_hosts, interface_callers, names_in
from .stock import OURS, PATCHED, RUNNING

#: Attribute of a watched attention layer: its name in the model.
WATCHED = "_hyperattn_watched"
#: By attention layer, the code of the forward that reached a mechanism. It is no attribute, because
#: code objects cannot be pickled with the layer.
REACHED: WeakKeyDictionary[nn.Module, frozenset] = WeakKeyDictionary()


def watch_first_calls(model: nn.Module) -> None:
    """Watch every attention layer that runs a mechanism, by a patch or by name.

    A layer whose current forward has reached a mechanism before is not watched again. It may be
    running now, past the place where it calls attention, in this thread or in another one.
    """
    for module in model.modules():
        stop_watching(module)
    for name, host in find_hosts(model):
        if runs_mechanism(host) and REACHED.get(host) != code_of_forward(host):
            host.__dict__[WATCHED] = name
            host.register_forward_hook(check_reached)


def note_reached(host: nn.Module) -> None:
    """Stop watching an attention layer that has reached a mechanism.

    `attention_function` calls this.
    """
    REACHED[host] = code_of_forward(host)
    stop_watching(host)


def stop_watching(host: nn.Module) -> None:
    """Remove the watch from one attention layer."""
    if host.__dict__.pop(WATCHED, None) is None:
        return
    for key, hook in tuple(host._forward_hooks.items()):
        if hook is check_reached:
            host._forward_hooks.pop(key, None)


def runs_mechanism(host: Any) -> bool:
    """Return whether a layer is patched, or runs a mechanism by name."""
    name = getattr(getattr(host, "config", None), "_attn_implementation", None)
    return name in OURS and ("hyper" in host._modules or name not in (PATCHED, RUNNING))


def check_reached(host: Any, args: tuple, output: Any) -> None:
    """Raise if a watched call has ended without reaching our attention function.

    This is a forward hook. A call that reaches the attention function removes it before it would
    run.

    Raises:
        ValueError: The layer's `forward` computes attention by itself.
    """
    if torch.compiler.is_compiling():
        # A compiled attention function notes nothing, since a note would be a side effect of every
        # call.
        return
    if WATCHED not in host.__dict__:
        # Another thread has just ended the watch.
        return
    forward = host.forward
    # A forward that was compiled by itself notes nothing either, so its code is read instead.
    if not runs_mechanism(host) or (
        is_compiled(forward) and leads_to_interface(forward, type(host))
    ):
        return stop_watching(host)
    without = "set_attn_implementation('sdpa')"
    if "hyper" in host._modules:
        without = "a patch that leaves this layer out (layers=...)"
    raise ValueError(
        f"{host.__dict__[WATCHED]} ran without the mechanism that it was given, since its forward "
        f"({describe_forward(host)}) did not call Transformers' attention interface; allowed: a forward that calls "
        f"ALL_ATTENTION_FUNCTIONS.get_interface(...), as the class in Transformers does, or {without}"
    )


def code_of_forward(host: nn.Module) -> frozenset:
    """Return the code of a layer's forward and of everything that it wraps.

    The wrapper from `hidden.py` is skipped: it comes and goes as adapters are switched, even while
    the layer runs.
    """
    cls: Any = type(host)
    forward = host.__dict__.get("forward", vars(cls).get("class_before", cls).forward)
    return frozenset(getattr(part, "__code__", type(part)) for part in unwrap_forward(forward))


def is_compiled(forward: Callable) -> bool:
    """Return whether `torch.compile` made a forward, or one that it wraps."""
    return any(hasattr(part, "_torchdynamo_orig_callable") for part in unwrap_forward(forward))


def leads_to_interface(forward: Callable, cls: type) -> bool:
    """Return whether a forward calls the attention interface, directly or by a method of its class."""
    callers = {method.__name__ for method in interface_callers(cls)}
    codes = (getattr(part, "__code__", None) for part in unwrap_forward(forward))
    names = {name for code in codes if isinstance(code, CodeType) for name in names_in(code)}
    return INTERFACE <= names or not callers.isdisjoint(names)


def describe_forward(host: Any) -> str:
    """Return where a layer's forward comes from, for an error."""
    forward = inspect.unwrap(getattr(host.forward, "__func__", host.forward))
    if isinstance(forward, functools.partial):
        forward = forward.func
    module = getattr(forward, "__module__", None) or type(forward).__module__
    return f"{module}.{getattr(forward, '__qualname__', type(forward).__qualname__)}"
