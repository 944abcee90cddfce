"""Hand the Transformers cache of a running call to mechanisms that keep state on it.

Attention functions get the keys and values that a cache returned, but not the cache. Each patched
attention layer with such a mechanism therefore gets two forward hooks: one notes the cache, the
other forgets it, also after an error.
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
    """The caches of the running calls of one attention layer, in this thread.

    Copies and pickles of the layer start without any.
    """

    def __init__(self):
        #: One entry per running call, the innermost last: a layer may run again inside its own
        #: call.
        self.running: list[Any] = []

    def __reduce__(self):
        return CacheOfCall, ()


def add_cache_hooks(hosts: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Add the hooks to every attention layer whose mechanisms keep state on caches.

    Args:
        hosts: Pairs of an attention layer and its `Hyper`.
    """
    # `refuse_pruned` needs the cache only once per stack of layers, and hooks cost time in every
    # call. So only the first attention layer of a stack gets hooks for `counts_keys`.
    stacks = set()
    for host, hyper in hosts:
        is_first = False
        if any(map(attrgetter("counts_keys"), hyper.children())):
            config: Any = getattr(host, "config", None)
            # Encoder and decoder may share class and config. `is_causal` tells them apart.
            stack = type(host), id(config), getattr(host, "is_causal", None)
            is_first = stack not in stacks
            stacks.add(stack)
        if is_first or any(map(attrgetter("reads_cache"), hyper.children())):
            setattr(host, CACHE, CacheOfCall())
            host.register_forward_pre_hook(note_cache, with_kwargs=True)
            host.register_forward_hook(forget_cache, always_call=True)


def remove_cache_hooks(host: nn.Module) -> None:
    """Undo `add_cache_hooks` for one attention layer."""
    if host.__dict__.pop(CACHE, None) is None:
        return
    # torch keeps the options of a hook in separate tables under the same key.
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
    """Note the cache before a call of the attention layer.

    Families name the argument differently, and some pass it by position, so every argument is
    looked at.
    """
    if not torch.compiler.is_compiling():
        # Some caches are no subclass of Transformers' `Cache`, but all have this method.
        caches = (
            given for given in (*keywords.values(), *args) if hasattr(given, "get_seq_length")
        )
        host.__dict__[CACHE].running.append(next(caches, None))


def forget_cache(host: nn.Module, args: tuple, output: Any) -> None:
    """Forget the cache after a call of the attention layer."""
    running = host.__dict__[CACHE].running
    # The list is empty if another hook failed before ours could note the cache.
    if running and not torch.compiler.is_compiling():
        running.pop()


def cache_of_call(host: nn.Module) -> Any:
    """Return the cache of the running call; None without a cache, or if no mechanism reads it."""
    noted = host.__dict__.get(CACHE)
    return noted.running[-1] if noted is not None and noted.running else None
