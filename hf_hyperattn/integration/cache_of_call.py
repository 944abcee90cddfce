"""The Transformers cache that an attention layer is called with, on its way to mechanisms that keep state on it.

Attention functions get the keys and values that a cache returned, but not the cache. So a patched attention layer with
such a mechanism gets two forward hooks: one notes the cache, the other forgets it, also after an error.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

#: The attribute of an attention layer that holds its `CacheOfCall`.
CACHE = "_hyperattn_cache"


class CacheOfCall(threading.local):
    """The caches that an attention layer is being called with in this thread; copies of the layer start with none."""

    def __init__(self):
        #: One entry a running call, the innermost last: a layer may run again inside its own call.
        self.running: list[Any] = []

    def __reduce__(self):
        return CacheOfCall, ()


def add_cache_hooks(hosts: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Add the hooks to each attention layer if a layer of its `Hyper`, given with it, keeps state on caches.

    What `refuse_pruned` keeps is about all attention layers of a stack, whose first one has the hooks for it: hooks
    cost time in every call.
    """
    stacks = set()
    for host, hyper in hosts:
        is_first = False
        if any(map(attrgetter("counts_keys"), hyper.children())):
            config: Any = getattr(host, "config", None)
            # Encoders and decoders may share the class and the config, but not this.
            stack = type(host), id(config), getattr(host, "is_causal", None)
            is_first = stack not in stacks
            stacks.add(stack)
        if is_first or any(map(attrgetter("reads_cache"), hyper.children())):
            setattr(host, CACHE, CacheOfCall())
            host.register_forward_pre_hook(note_cache, with_kwargs=True)
            host.register_forward_hook(forget_cache, always_call=True)


def remove_cache_hooks(host: nn.Module) -> None:
    """Undo `add_cache_hooks`."""
    if host.__dict__.pop(CACHE, None) is None:
        return
    tables = (
        host._forward_pre_hooks,
        host._forward_pre_hooks_with_kwargs,
        host._forward_hooks,
        host._forward_hooks_always_called,
    )
    hooks = {**host._forward_pre_hooks, **host._forward_hooks}
    for key in [key for key, hook in hooks.items() if hook in (note_cache, forget_cache)]:
        for table in tables:
            table.pop(key, None)


def note_cache(host: nn.Module, args: tuple, keywords: dict) -> None:
    """Note the cache before a call. Families name the argument differently, and some pass it by position."""
    if not torch.compiler.is_compiling():
        # Any class will do that knows how long it is: some caches are no subclass of Transformers' own.
        caches = (
            given for given in (*keywords.values(), *args) if hasattr(given, "get_seq_length")
        )
        host.__dict__[CACHE].running.append(next(caches, None))


def forget_cache(host: nn.Module, args: tuple, output: Any) -> None:
    """Forget the cache after a call."""
    running = host.__dict__[CACHE].running
    if running and not torch.compiler.is_compiling():  # another hook may have failed before ours
        running.pop()


def cache_of_call(host: nn.Module) -> Any:
    """Return the cache of the running call; None without one, or if no layer reads it."""
    noted = host.__dict__.get(CACHE)
    return noted.running[-1] if noted is not None and noted.running else None
