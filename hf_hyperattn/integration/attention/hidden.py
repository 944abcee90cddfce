"""Hand the hidden states of an attention layer to mechanisms that read them.

Attention functions get queries, keys and values, but not the hidden states that these were computed
from. A patched attention layer with such a mechanism therefore becomes an instance of a subclass,
whose `forward` notes its first input. A forward pre-hook would not work: other hooks, and the
`forward` of Accelerate, change the input after it.
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

#: Attribute of an attention layer: its `HiddenStates`.
HIDDEN = "_hyperattn_hidden"

GRID = "the rows and columns of an image [B, height, width, C]"
#: Attention layers, by file and class, whose hidden states are not [B, N, C]. The values describe
#: what they get, for an error.
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
    """The hidden states of the running call of an attention layer, in this thread.

    Copies of the layer start without any.

    Args:
        readers: Names of the mechanisms that read the states.
    """

    # `threading.local` calls this again in every thread.
    def __init__(self, readers: str):
        self.readers = readers
        #: Hidden states of the call (None if it has none), and the number of rows read so far. None
        #: outside of calls.
        self.call: tuple[Tensor | None, int] | None = None

    def __reduce__(self):
        return HiddenStates, (self.readers,)


class NotesHidden:
    """Base of the subclasses that `noting_class` makes.

    Attributes:
        class_before: The original class.
        packed: Whether `forward` gets several images as the rows of one tensor (`cu_seqlens`), and
            attends to each image by itself.
    """

    class_before: type
    packed: bool

    def __reduce_ex__(self, protocol):
        # The subclass has the name of the original class, so pickle would restore the wrong one
        # without this.
        before: Any = type(self).class_before
        make, arguments, *_ = before.__reduce_ex__(before.__new__(before), protocol)
        return _make_noting, (make, arguments), self.__dict__


def _make_noting(make: Callable, arguments: tuple) -> nn.Module:
    """Rebuild a pickled attention layer: first the original class, then the subclass."""
    module = make(*arguments)
    stock: Any = type(module)
    module.__class__ = noting_class(stock)
    return module


@functools.cache
def noting_class(before: Any) -> type:
    """Return the subclass whose `forward` notes the hidden states while it runs.

    Args:
        before: The class of the attention layer.
    """
    original = before.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        states = self.__dict__.get(HIDDEN)
        if states is None:
            # A wrapper of the class, such as FSDP's, has outlived the patch.
            return original(self, *args, **kwargs)
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        # A layer may run again inside its own call, so the outer call comes back at the end.
        outer_call = states.call
        states.call = (hidden if isinstance(hidden, Tensor) else None, 0)
        try:
            return original(self, *args, **kwargs)
        finally:
            states.call = outer_call

    # Tools find modules by class name (`_no_split_modules`), so the name stays the original one.
    body = {name: getattr(before, name) for name in ("__module__", "__qualname__", "__doc__")}
    packed = "cu_seqlens" in inspect.signature(original).parameters
    body |= {"class_before": before, "packed": packed, "forward": forward}
    return type(before.__name__, (NotesHidden, before), body)


def readers_of(hyper: nn.Module) -> str:
    """Return the names of a `Hyper`'s mechanisms that read hidden states; "" for none."""
    readers = filter(attrgetter("reads_hidden"), hyper.children())
    return " and ".join(map(attrgetter("config.mechanism"), readers))


def form_of_hidden(host: nn.Module) -> str | None:
    """Return the form of a layer's hidden states if it is not [B, N, C], for an error."""
    cls: Any = type(host)
    return OTHER_FORMS.get(f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}")


def check_forward(name: str, host: nn.Module, hyper: nn.Module) -> None:
    """Raise if an attention layer's `forward` was replaced on the instance.

    `note_hidden` would not reach it. A function that wraps the forward of the class, and declares
    it, is followed: see `swap_class`.

    Args:
        name: Name of the attention layer.
        hyper: The `Hyper` that the layer will get.

    Raises:
        ValueError: A mechanism reads hidden states, and the forward is not the one of the class.
    """
    readers = readers_of(hyper)
    if not readers or HIDDEN in host.__dict__:
        return
    # Accelerate keeps the forward that it wraps as `_old_forward`.
    place = "_old_forward" if "_hf_hook" in host.__dict__ else "forward"
    replaced = host.__dict__.get(place)
    own = type(host).forward
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
    """Let attention layers note their hidden states if a mechanism reads them.

    Args:
        hosts: Pairs of an attention layer and its `Hyper`.
    """
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
    """Return the hidden states [B, N, width] of the running call, or None if no layer reads them.

    Args:
        queries: N, the number of queries of the call.

    Raises:
        ValueError: The attention layer was called with hidden states of another form, or without.
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
        # A packed layer attends to one image after the other. The next image begins where the last
        # one ended.
        if hidden.shape[0] == 1 and read + queries <= hidden.shape[1] > queries:
            states.call = (hidden, read + queries)
            hidden = hidden[:, read : read + queries]
    if hidden is None or hidden.dim() < 3 or hidden.shape[-2] != queries:
        what = "none" if hidden is None else f"of shape {tuple(hidden.shape)}"
        raise ValueError(
            f"{type(host).__name__} was called with hidden states {what} for {queries} queries, of which "
            f"{states.readers} reads one row a query; allowed: mechanisms that read none there"
        )
    return hidden
