"""The hierarchy that a model was called with, on its way to its attention hosts.

Most families would pass a keyword of the call down to the attention function; others (BLOOM, MPT, GPT-J, DeBERTa, ...)
drop it on the way, or refuse it. So the model keeps it, for the time of the call, in a context that it shares with its
parts and hosts and with no other model. Each thread sees its own calls in it. The compiler reads and writes it like any
object's attributes: a hierarchy enters a graph as an input.
"""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch import nn

#: Where a host keeps the context of its model; None on hosts that hierarchies are not about: the decoder beside an
#: encoder, the images beside a text.
CONTEXT = "_hyperattn_hierarchy"

#: Where a model and its parts keep (context, name of the part in the model: "." for the model, ".encoder.").
PART = "_hyperattn_hierarchy_part"

#: Set on hosts that were called with a hierarchy in training.
USED = "_hyperattn_used_hierarchy"

#: Where modules keep the function that checkpoints a layer: Transformers' models, and the wrapper that FSDP brings.
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


class HierarchyContext(threading.local):
    """The call of one model that is running in this thread.

    Copies of the model get a context of their own, in which no call is running.

    part: the name of the innermost part that is being called; None where the model is not.
    hierarchy: what that part was called with: a `Hierarchy`, group ids, or None.
    """

    def __init__(
        self,
    ):  # in every thread anew; the compiler cannot guard defaults that are left to the class
        self.part: str | None = None
        self.hierarchy = None

    def __reduce__(self):
        return HierarchyContext, ()


def inherited_hierarchy(model: nn.Module):
    """The hierarchy for a call without one: that of the running call whose part the model is, else None.

    A model that is called again while it runs (by a hook, say) is no part of itself: that is another call.
    """
    context, name = getattr(model, PART)
    inside = context.part is not None and name != context.part and name.startswith(context.part)
    return context.hierarchy if inside else None


def use_hierarchy(
    context: HierarchyContext, part: str | None, hierarchy, function, /, *args, **keywords
):
    """`function(*args, **keywords)` as a call of this part with this hierarchy or None."""
    before = context.part, context.hierarchy
    context.part, context.hierarchy = part, hierarchy
    try:
        return function(*args, **keywords)
    finally:
        context.part, context.hierarchy = before


def hierarchy_of_call(host: nn.Module, keywords: dict):
    """The hierarchy that a host's call is about: a `Hierarchy`, group ids, or None.

    Raises:
        RuntimeError: the host is computed again in the backward pass, out of reach of the call that it belongs to.
    """
    if ignores_hierarchy(host):
        return None
    context, hierarchy = getattr(host, CONTEXT, None), keywords.get("hierarchy")
    if context is None:
        return hierarchy
    hierarchy = context.hierarchy if hierarchy is None else hierarchy
    if torch.compiler.is_compiling():
        return hierarchy
    if hierarchy is not None and (host.training or torch.is_grad_enabled()):
        host.__dict__[USED] = True
    again = context.part is None and torch._C._current_graph_task_id() != -1
    if hierarchy is None and again and USED in host.__dict__:
        raise RuntimeError(
            f"{type(host).__name__} is computed again in the backward pass without the hierarchy of its call; "
            "allowed: model.gradient_checkpointing_enable() or FSDP's activation checkpointing"
        )
    return hierarchy


def ignores_hierarchy(host: nn.Module) -> bool:
    """Whether the host is one that the hierarchies of its model are not about."""
    return getattr(host, CONTEXT, host) is None


class CheckpointWithHierarchy:
    """A function that checkpoints layers, so that they are computed again with the hierarchy of their own call.

    Args:
        checkpoint: the function. context: of the model whose layers they are.
    """

    def __init__(self, checkpoint, context: HierarchyContext):
        self.checkpoint, self.context = checkpoint, context

    def __call__(self, function, /, *args, **keywords):
        if not torch.compiler.is_compiling():
            call = self.context.part, self.context.hierarchy
            function = partial(use_hierarchy, self.context, *call, function)
        return self.checkpoint(function, *args, **keywords)


def wrap_checkpoints(model: nn.Module, context: HierarchyContext) -> None:
    """Let the functions that checkpoint the model's layers carry hierarchies; `unwrap_checkpoints` undoes it."""
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
