"""The hidden states that a host is called with, on their way to mechanisms that read them.

Attention functions are given queries, keys and values, but not what they were made from. So a patched host with such
a mechanism gets a forward pre-hook, which notes its first input until its attention function has taken it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from ..mechanisms.base import MechanismLayer

#: Where a host keeps the note, from the start of its forward to its attention function.
NOTED = "_hyperattn_hidden"
#: The names of the mechanisms that read them.
READERS = "_hyperattn_hidden_readers"


def listen(host: nn.Module, layers: Iterable[MechanismLayer]) -> None:
    """Add the hook to a host where one of the layers it was patched with reads hidden states."""
    readers = [layer.config.mechanism for layer in layers if layer.reads_hidden]
    if readers:
        setattr(host, READERS, " and ".join(readers))
        host.register_forward_pre_hook(note, with_kwargs=True)


def ignore(host: nn.Module) -> None:
    """Undo `listen`."""
    for key in [k for k, hook in host._forward_pre_hooks.items() if hook is note]:
        del host._forward_pre_hooks[key]
        host._forward_pre_hooks_with_kwargs.pop(key, None)
    for name in (NOTED, READERS):
        host.__dict__.pop(name, None)


def note(host: nn.Module, args: tuple, keywords: dict) -> None:
    """The hook."""
    given = keywords.get("hidden_states", args[0] if args else None)
    setattr(host, NOTED, given if isinstance(given, Tensor) else None)


def take_hidden(host: nn.Module, queries: int) -> Tensor | None:
    """The hidden states [B, N, width] of the running call; None where no layer reads them.

    Raises:
        ValueError: the host was called with something else.
    """
    if NOTED not in host.__dict__:
        return None
    hidden = getattr(host, NOTED)
    setattr(host, NOTED, None)
    if hidden is None or hidden.dim() < 3 or hidden.shape[-2] != queries:
        found = "none" if hidden is None else f"of shape {tuple(hidden.shape)}"
        raise ValueError(
            f"{type(host).__name__} was called with hidden states {found} for {queries} queries, of which "
            f"{getattr(host, READERS)} reads one row a query; allowed: mechanisms that read none there"
        )
    return hidden
