"""The hidden states that an attention layer computes from, on their way to mechanisms that read them.

Attention functions get queries, keys and values, but not the hidden states these were made from. So a patched attention
layer with such a mechanism becomes an instance of a subclass of its class, whose `forward` notes its first input. A
forward pre-hook would not do: other hooks, and the `forward` of Accelerate, change the input after it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from .class_swap import swap_class, wraps_forward

#: Where a host keeps its `HiddenStates`.
HIDDEN = "_hyperattn_hidden"

GRID = "the rows and columns of an image [B, height, width, C]"
#: Hosts whose hidden states come in another form than [B, N, C], by their file and class.
OTHER_FORMS = {
    "modeling_fsmt.Attention": "them with the batch behind the length [N, B, C]",
    "modeling_granite_speech5.GraniteSpeech5EncoderAttention": "a whole row, and attends to one block at a time",
    "modeling_sam.SamVisionAttention": GRID,
    "modeling_sam.SamVisionSdpaAttention": GRID,
    "modeling_sam2.Sam2MultiScaleAttention": GRID,
    "modeling_sam3.Sam3ViTRoPEAttention": GRID,
    "modeling_sam_hq.SamHQVisionAttention": GRID,
    "modeling_sam_hq.SamHQVisionSdpaAttention": GRID,
    "modeling_seggpt.SegGptAttention": GRID,
    "modeling_squeezebert.SqueezeBertSelfAttention": "them with channels before the length [B, C, N]",
    "modeling_vitdet.VitDetAttention": GRID,
}


class HiddenStates(threading.local):
    """What a host is being called with in this thread; copies of the host start with nothing.

    Args:
        readers: the names of the mechanisms that read it.
    """

    def __init__(self, readers: str):  # in every thread anew
        self.readers = readers
        #: The hidden states, or None if there are none, and how many of their rows were read; None outside of calls.
        self.call: tuple[Tensor | None, int] | None = None

    def __reduce__(self):
        return HiddenStates, (self.readers,)


class NotesHidden:
    """Marks the subclasses made here.

    Attributes:
        class_before: what it is a subclass of.
        packed: whether `forward` gets several images as the rows of one (`cu_seqlens`), and attends to each by itself.
    """

    class_before: type
    packed: bool

    def __reduce_ex__(self, protocol):
        # The class is known under the name of the one before it, so pickle has to be told how to make it again.
        before: Any = type(self).class_before
        make, arguments, *_ = before.__reduce_ex__(before.__new__(before), protocol)
        return _make_noting, (make, arguments), self.__dict__


def _make_noting(make: Callable, arguments: tuple) -> nn.Module:
    module = make(*arguments)
    stock: Any = type(module)
    module.__class__ = noting_class(stock)
    return module


@functools.cache
def noting_class(before: Any) -> type:
    """The subclass of an attention layer's class whose `forward` notes the hidden states while it runs."""
    original = before.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        states = self.__dict__.get(HIDDEN)
        if states is None:  # a wrapper of the class, such as FSDP's, has outlived the patch
            return original(self, *args, **kwargs)
        hidden, around = kwargs.get("hidden_states", args[0] if args else None), states.call
        states.call = (hidden if isinstance(hidden, Tensor) else None, 0)
        try:
            return original(self, *args, **kwargs)
        finally:
            states.call = around

    body = {name: getattr(before, name) for name in ("__module__", "__qualname__", "__doc__")}
    packed = "cu_seqlens" in inspect.signature(original).parameters
    body |= {"class_before": before, "packed": packed, "forward": forward}
    return type(before.__name__, (NotesHidden, before), body)


def readers_of(hyper: nn.Module) -> str:
    """The names of the mechanisms in a `Hyper` that read hidden states; "" for none."""
    return " and ".join(
        map(attrgetter("config.mechanism"), filter(attrgetter("reads_hidden"), hyper.children()))
    )


def form_of_hidden(host: nn.Module) -> str | None:
    """The form of a host's hidden states, for a message, if they are not known to have a row for each query."""
    cls: Any = type(host)
    return OTHER_FORMS.get(f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}")


def check_forward(name: str, host: nn.Module, hyper: nn.Module) -> None:
    """Raise if the `forward` of a host was replaced on the instance, so that `note_hidden` would not reach it.

    A function that wraps the forward of the class, and says so, is followed: see `swap_class`.

    Args:
        name: of the host.
        hyper: the `Hyper` that the host is to get.
    """
    readers = readers_of(hyper)
    if not readers or HIDDEN in host.__dict__:
        return
    place = (
        "_old_forward" if "_hf_hook" in host.__dict__ else "forward"
    )  # Accelerate keeps there what it wraps
    replaced, own = host.__dict__.get(place), type(host).forward
    is_own = (
        replaced is None
        or getattr(replaced, "__func__", None) is own
        or wraps_forward(replaced, own)
    )
    if not is_own:
        raise ValueError(
            f"{name}.forward was replaced on the instance, and {readers} reads the hidden states that "
            f"{type(host).__name__}.forward gets; allowed: a wrapper of that forward by functools.wraps or "
            "torch.compile, or patch_model first, and then a function that calls the forward that the patched layer "
            "has"
        )


def note_hidden(hosts: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Let each host note its hidden states if a layer of its `Hyper`, given with it, reads them."""
    for host, hyper in hosts:
        if readers := readers_of(hyper):
            setattr(host, HIDDEN, HiddenStates(readers))
            stock: Any = type(host)
            swap_class(host, noting_class(stock))


def stop_noting(host: nn.Module) -> None:
    """Undo `note_hidden`."""
    host.__dict__.pop(HIDDEN, None)
    if "class_before" in vars(type(host)):
        swap_class(host, vars(type(host))["class_before"])


def hidden_states_of_call(host: nn.Module, queries: int) -> Tensor | None:
    """The hidden states [B, N, width] of the running call; None where no layer reads them.

    Raises:
        ValueError: the host was called with something else.
    """
    states = getattr(host, HIDDEN, None)
    if states is None:
        return None
    if states.call is None:
        raise ValueError(
            f"{states.readers} reads the hidden states that {type(host).__name__}.forward gets, and this call came "
            "past it, through a function that stands in its place; allowed: a function that calls the forward that the "
            "patched layer has"
        )
    hidden, read = states.call
    if hidden is not None and getattr(host, "packed", False):
        hidden = hidden[None] if hidden.dim() == 2 else hidden
        if (
            hidden.shape[0] == 1 and read + queries <= hidden.shape[1] > queries
        ):  # one image after the other
            states.call = (hidden, read + queries)
            hidden = hidden[:, read : read + queries]
    if hidden is None or hidden.dim() < 3 or hidden.shape[-2] != queries:
        what = "none" if hidden is None else f"of shape {tuple(hidden.shape)}"
        raise ValueError(
            f"{type(host).__name__} was called with hidden states {what} for {queries} queries, of which "
            f"{states.readers} reads one row a query; allowed: mechanisms that read none there"
        )
    return hidden
