"""Carry the hierarchy of a model's call to its attention layers.

Most families would pass a keyword of the call down to the attention function. Others (BLOOM, MPT,
GPT-J, DeBERTa, ...) drop it on the way, or reject it. So the model keeps the hierarchy, for the
duration of the call, in a context object that it shares with its parts and attention layers only.
Each thread sees its own calls. The compiler reads and writes the context like any object's
attributes: a hierarchy enters a graph as an input.
"""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch import nn

from ...utils.torch_private import find_backward_pass

#: Attribute of an attention layer: the context of its model. None on layers that read other tokens
#: than the hierarchy describes, such as the decoder of an encoder-decoder, or the images of a
#: vision-language model.
CONTEXT = "_hyperattn_hierarchy"

#: Attribute of a model and its parts: the context, and the part's name (".encoder.", or "." for the
#: whole model).
PART = "_hyperattn_hierarchy_part"

#: Attribute that is set on attention layers once they were called with a hierarchy in training.
USED = "_hyperattn_used_hierarchy"

#: Attributes with the function that checkpoints a layer: of Transformers' models, and of FSDP's
#: wrapper.
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


class HierarchyContext(threading.local):
    """The running call of one model, in this thread.

    Copies of the model get a context of their own, without a running call.

    Attributes:
        part: Name of the innermost part that is being called. None outside of calls.
        hierarchy: The hierarchy of that call: a `Hierarchy`, group ids, or None.
    """

    # `threading.local` calls this again in every thread. The compiler cannot guard defaults that
    # are only on the class, so they are set here.
    def __init__(self):
        self.part: str | None = None
        self.hierarchy = None

    def __reduce__(self):
        return HierarchyContext, ()


def inherited_hierarchy(model: nn.Module):
    """Return the hierarchy for a call that got none.

    It is the hierarchy of the running call if the model is a part of the calling model, else None.
    A model that is called again while it runs (by a hook, for example) is not a part of itself:
    that is another call.
    """
    context, name = getattr(model, PART)
    inside = context.part is not None and name != context.part and name.startswith(context.part)
    return context.hierarchy if inside else None


def use_hierarchy(
    context: HierarchyContext, part: str | None, hierarchy, function, /, *args, **keywords
):
    """Run `function(*args, **keywords)` as a call of a part with this hierarchy, or with None."""
    before = context.part, context.hierarchy
    context.part, context.hierarchy = part, hierarchy
    try:
        return function(*args, **keywords)
    finally:
        context.part, context.hierarchy = before


def hierarchy_of_call(host: nn.Module, keywords: dict):
    """Return the hierarchy of an attention call: a `Hierarchy`, group ids, or None.

    Args:
        host: The attention layer.
        keywords: Keywords of the call. A `hierarchy` there wins over the context.

    Raises:
        RuntimeError: The layer is recomputed in the backward pass, where the hierarchy of its call
            is out of reach.
    """
    if ignores_hierarchy(host):
        return None
    context = getattr(host, CONTEXT, None)
    hierarchy = keywords.get("hierarchy")
    if context is None:
        return hierarchy
    hierarchy = context.hierarchy if hierarchy is None else hierarchy
    if torch.compiler.is_compiling():
        return hierarchy
    if hierarchy is not None and (host.training or torch.is_grad_enabled()):
        host.__dict__[USED] = True
    # Within a backward pass torch has a graph task. A checkpoint that we could not wrap then runs
    # the layer without the context, and would silently compute something else.
    recomputed = context.part is None and find_backward_pass() != -1
    if hierarchy is None and recomputed and USED in host.__dict__:
        raise RuntimeError(
            f"{type(host).__name__} is computed again in the backward pass without the hierarchy of its call; "
            "allowed: model.gradient_checkpointing_enable() or FSDP's activation checkpointing"
        )
    return hierarchy


def ignores_hierarchy(host: nn.Module) -> bool:
    """Return whether hierarchies of the model do not apply to this attention layer."""
    return getattr(host, CONTEXT, host) is None


class CheckpointWithHierarchy:
    """Checkpoint function that recomputes layers with the hierarchy of their own call.

    Args:
        checkpoint: The original function.
        context: Context of the model that has the layers.
    """

    def __init__(self, checkpoint, context: HierarchyContext):
        self.checkpoint = checkpoint
        self.context = context

    def __call__(self, function, /, *args, **keywords):
        if not torch.compiler.is_compiling():
            # Bind the current call now: in the backward pass the context is empty.
            call = self.context.part, self.context.hierarchy
            function = partial(use_hierarchy, self.context, *call, function)
        return self.checkpoint(function, *args, **keywords)


def wrap_checkpoints(model: nn.Module, context: HierarchyContext) -> None:
    """Let the checkpoint functions of a model's layers carry hierarchies.

    `unwrap_checkpoints` undoes it.
    """
    for module in model.modules():
        for name in CHECKPOINTS:
            function = module.__dict__.get(name)
            if function is not None and not isinstance(function, CheckpointWithHierarchy):
                module.__dict__[name] = CheckpointWithHierarchy(function, context)


def unwrap_checkpoints(model: nn.Module) -> None:
    """Undo `wrap_checkpoints`."""
    for module in model.modules():
        for name in CHECKPOINTS:
            if isinstance(function := module.__dict__.get(name), CheckpointWithHierarchy):
                module.__dict__[name] = function.checkpoint
