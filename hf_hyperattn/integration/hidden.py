"""The hidden states that a host is called with, on their way to mechanisms that read them.

Attention functions are given queries, keys and values, but not what they were made from. So a patched host with such
a mechanism gets two forward hooks: the first notes its first input, the second, also after an error, takes it away.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from operator import attrgetter

from torch import Tensor, nn

#: Where a host keeps its `HiddenStates`.
HIDDEN = "_hyperattn_hidden"


class HiddenStates(threading.local):
    """What a host is being called with in this thread; copies of the host start with nothing.

    Args:
        readers: the names of the mechanisms that read it.
    """

    def __init__(self, readers: str):  # in every thread anew
        self.readers = readers
        #: (hidden states or None, the same of the call around this one); None outside of calls.
        self.call: tuple | None = None

    def __reduce__(self):
        return HiddenStates, (self.readers,)


def add_hooks(hosts: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Add the hooks to each host of which a layer of its `Hyper`, given beside it, reads hidden states."""
    for host, hyper in hosts:
        readers = " and ".join(
            map(attrgetter("config.mechanism"), filter(attrgetter("reads_hidden"), hyper.children()))
        )
        if readers:
            setattr(host, HIDDEN, HiddenStates(readers))
            host.register_forward_pre_hook(note, with_kwargs=True)
            host.register_forward_hook(forget, always_call=True)


def remove_hooks(host: nn.Module) -> None:
    """Undo `add_hooks`."""
    if host.__dict__.pop(HIDDEN, None) is None:
        return
    hooks = {**host._forward_pre_hooks, **host._forward_hooks}
    known = (
        host._forward_pre_hooks,
        host._forward_pre_hooks_with_kwargs,
        host._forward_hooks,
        host._forward_hooks_always_called,
    )
    for key in [k for k, hook in hooks.items() if hook in (note, forget)]:
        for place in known:
            place.pop(key, None)


def note(host: nn.Module, args: tuple, keywords: dict) -> None:
    """The hook before a call."""
    states, hidden = getattr(host, HIDDEN), keywords.get("hidden_states", args[0] if args else None)
    states.call = (hidden if isinstance(hidden, Tensor) else None, states.call)


def forget(host: nn.Module, args: tuple, output) -> None:
    """The hook after a call."""
    states = getattr(host, HIDDEN)
    if states.call is not None:  # another hook may have failed before ours
        states.call = states.call[1]


def hidden_states_of_call(host: nn.Module, queries: int) -> Tensor | None:
    """The hidden states [B, N, width] of the running call; None where no layer reads them.

    Raises:
        ValueError: the host was called with something else.
    """
    states = getattr(host, HIDDEN, None)
    if states is None:
        return None
    hidden = None if states.call is None else states.call[0]
    if hidden is None or hidden.dim() < 3 or hidden.shape[-2] != queries:
        what = "none" if hidden is None else f"of shape {tuple(hidden.shape)}"
        raise ValueError(
            f"{type(host).__name__} was called with hidden states {what} for {queries} queries, of which "
            f"{states.readers} reads one row a query; allowed: mechanisms that read none there"
        )
    return hidden
